"""A poison that kills the process is a dead letter in the end; nobody else pays for it (field report F35)."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from chargeonce.stack import KafkaBroker
from shared.inbox.caution import CHUNK_RECORDS, Caution
from shared.inbox.dead_letters import BEHIND, KILLS
from shared.kafka.records import ConsumedRecord, Fetched
from tests.support.inbox import InboxUnderTest, inbox_under_test, payload, record

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
async def inbox(database_url: str, kafka: KafkaBroker, unique_name: str) -> AsyncIterator[InboxUnderTest]:
    async with inbox_under_test(database_url, kafka.bootstrap_servers, unique_name) as made:
        yield made


def caution(inbox: InboxUnderTest, batch_records: int = 1000) -> Caution:
    return Caution(inbox.database, inbox.group, batch_records)


def fetched(inbox: InboxUnderTest, count: int, first: int = 0, partition: int = 0) -> Fetched:
    offsets = range(first, first + count)
    return Fetched([record(payload(n), n, topic=inbox.topic, partition=partition) for n in offsets], 1)


def sizes(parts: Sequence[Sequence[ConsumedRecord]]) -> list[int]:
    return [len(part) for part in parts]


async def die(member: Caution) -> None:
    """What the server sees when the process is gone."""
    assert member._connection is not None
    member._connection.terminate()


async def test_while_nobody_died_a_batch_is_one_transaction_and_nothing_is_written_for_it(
    inbox: InboxUnderTest,
) -> None:
    one, other = caution(inbox), caution(inbox)
    for member in (one, other):
        assert sizes(await member.chunks(fetched(inbox, 500))) == [500]
    await other.leave()
    one.assigned()
    assert sizes(await one.chunks(fetched(inbox, 500))) == [500], "it left in good order"
    assert await inbox.rows("SELECT count(*) FROM inbox_member") == [(1,)]
    assert await inbox.rows("SELECT count(*) FROM inbox_attempt") == [(0,)]
    await one.leave()
    assert await inbox.rows("SELECT count(*) FROM inbox_member") == [(0,)]


async def test_f35_when_a_member_died_the_others_go_in_chunks_and_then_alone(inbox: InboxUnderTest) -> None:
    first = caution(inbox)
    await first.chunks(fetched(inbox, 1))
    await die(first)
    second = caution(inbox, batch_records=120)
    parts = await second.chunks(fetched(inbox, 200, first=1000))
    assert sizes(parts) == [CHUNK_RECORDS, CHUNK_RECORDS, 20, 80], "a batch beyond the committed offset, and the rest"
    assert await second.attempt(parts[0]) == 0
    assert await second.attempt(parts[1]) == 0
    assert second.is_due(parts[2][0])
    assert not second.is_due(parts[3][0])
    await die(second)
    third = caution(inbox, batch_records=120)
    parts = await third.chunks(fetched(inbox, 200, first=1000 + CHUNK_RECORDS))
    assert sizes(parts)[:CHUNK_RECORDS] == [1] * CHUNK_RECORDS, "the chunk that was in hand"
    assert sizes(parts)[CHUNK_RECORDS : CHUNK_RECORDS + 2] == [CHUNK_RECORDS, 20]
    for _ in range(3):
        await third.attempt(parts[0])
    assert await third.attempt(parts[0]) == 3
    assert await third.attempt(parts[1]) == 0
    kept = await inbox.rows("SELECT first_offset FROM inbox_attempt WHERE first_offset = last_offset")
    assert kept == [(parts[1][0].offset,)], "what lies behind is settled"
    await third.leave()


async def test_a_batch_of_several_partitions_is_in_chunks_of_one(inbox: InboxUnderTest) -> None:
    await (gone := caution(inbox)).chunks(fetched(inbox, 1))
    await die(gone)
    member = caution(inbox)
    records = [*fetched(inbox, 60, partition=0).records, *fetched(inbox, 10, partition=1).records]
    parts = await member.chunks(Fetched(records, 1))
    assert sizes(parts) == [CHUNK_RECORDS, 10, 10]
    assert all(len({each.source for each in part}) == 1 for part in parts)
    await member.leave()


async def test_a_session_that_was_cut_is_replaced_and_is_no_death_of_its_own(inbox: InboxUnderTest) -> None:
    member = caution(inbox)
    await member.chunks(fetched(inbox, 1))
    await die(member)
    member.assigned()
    assert sizes(await member.chunks(fetched(inbox, 500))) == [500]
    assert await inbox.rows("SELECT count(*), count(died_at) FROM inbox_member") == [(1, 0)]
    await member.leave()


async def everything_is_settled(inbox: InboxUnderTest, effects: int, letters: int) -> None:
    wanted = [(effects, letters)]
    while await inbox.rows("SELECT (SELECT count(*) FROM effect), (SELECT count(*) FROM dead_letter)") != wanted:
        await asyncio.sleep(0.05)


async def test_f35_an_event_that_kills_the_process_is_a_dead_letter_in_the_end(
    inbox: InboxUnderTest, kafka: KafkaBroker
) -> None:
    await inbox.produce(*(payload(number) for number in range(202)), partition=0)
    await inbox.produce(payload(777), partition=0, key=b"order-1")
    await inbox.produce(payload(778), partition=0, key=b"order-1")
    await inbox.produce(*(payload(number) for number in range(400, 450)), partition=0)
    options = {
        "url": inbox.database.settings.url,
        "bootstrap_servers": kafka.bootstrap_servers,
        "topic": inbox.topic,
        "group": inbox.group,
        "kills": 777,
        "instance_id": "the-only-one",
    }
    ends = []
    for _ in range(8):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.support.consuming_process", json.dumps(options)), cwd=REPOSITORY
        )
        settled = asyncio.create_task(everything_is_settled(inbox, 252, 2))
        ended = asyncio.create_task(process.wait())
        async with asyncio.timeout(60):
            await asyncio.wait({settled, ended}, return_when=asyncio.FIRST_COMPLETED)
        if settled.done():
            process.terminate()
            ends.append(await ended)
            break
        settled.cancel()
        ends.append(await ended)
    assert ends == [*[-signal.SIGKILL] * 4, 0], "with its batch, with its chunk, and twice alone"
    assert await inbox.letters() == {KILLS: 1, BEHIND: 1}
    assert await inbox.numbers() == [*range(202), *range(400, 450)], "each of the others once"
    [(due,)] = await inbox.rows("SELECT count(next_attempt_at) FROM dead_letter")
    assert due == 0, "by itself it is never tried again"
