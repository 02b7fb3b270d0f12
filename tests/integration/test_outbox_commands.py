"""The operator's commands on parked events, as processes on a real database; end to end with a real relay and Kafka."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import asyncpg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from chargeonce.stack import KafkaBroker
from shared.errors import Refused
from shared.identifiers import new_event_id
from shared.outbox.append import OutgoingEvent
from shared.outbox.parked_events import discard, release_key_of
from shared.settings import OUTBOX_CHANNEL
from tests.support.outbox import OutboxUnderTest, outbox_under_test, scalar

REPOSITORY = Path(__file__).parents[2]
SECRET = "secret of a customer"


@pytest.fixture
async def outbox(database_url: str, kafka: KafkaBroker, unique_name: str) -> AsyncIterator[OutboxUnderTest]:
    async with outbox_under_test(database_url, kafka.bootstrap_servers, unique_name) as made:
        yield made


@dataclass
class Answer:
    status: int
    said: str
    complained: str


async def command(outbox: OutboxUnderTest, *arguments: str, service: str = "order_service") -> Answer:
    """Run `order-service outbox parked …`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", f"from {service}.cli import main; main()", "outbox", "parked", *arguments),
        env={**os.environ, f"{service.upper()}_DATABASE_URL": outbox.database.settings.url, "COLUMNS": "400"},
        cwd=REPOSITORY,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    said, complained = await process.communicate()
    assert process.returncode is not None
    return Answer(process.returncode, said.decode(), complained.decode())


async def park(outbox: OutboxUnderTest, *events: OutgoingEvent) -> None:
    """Park events, the first of each key as refused."""
    await outbox.publish(*events)
    async with outbox.database.engine.begin() as connection:
        await connection.execute(
            text(
                "INSERT INTO outbox_parked (bucket, position, event_id, topic, key, event_type, payload, headers, "
                "created_at, reason, refused) SELECT bucket, position, event_id, topic, key, event_type, payload, "
                "headers, created_at, 'MessageSizeTooLargeError', "
                "position = min(position) OVER (PARTITION BY bucket, key) "
                "FROM outbox_event WHERE event_id = ANY (:ids)"
            ),
            {"ids": [event.event_id for event in events]},
        )


async def released(outbox: OutboxUnderTest) -> object:
    return await scalar(outbox.database, "SELECT count(*) FROM outbox_parked WHERE released_at IS NOT NULL")


async def test_list_tells_what_is_parked_and_what_it_means(outbox: OutboxUnderTest) -> None:
    assert "nothing is parked" in (await command(outbox, "list")).said
    first, second = outbox.event("order-1", 0, payload=SECRET.encode()), outbox.event("order-1", 1)
    await park(outbox, first, second, outbox.event("order-2", 0))
    told = await command(outbox, "list")
    assert told.status == 0
    assert f"{first.event_id} test.happened.v1 on {outbox.topic} key order-1 refused since" in told.said
    assert "2 refused and 1 waiting behind them, of 2 keys." in told.said
    assert "an order that such an event confirms is not charged" in told.said
    assert "a payment that it reports, whose money has moved," in told.said
    assert (await command(outbox, "list", service="billing_service")).said == told.said
    assert SECRET not in told.said + told.complained
    some = json.loads((await command(outbox, "list", "--json", "--limit", "1", "--reason-contains", "sizetoo")).said)
    assert (some["keys"], some["refused"], some["waiting"], len(some["events"])) == (2, 2, 1, 1)
    assert json.loads((await command(outbox, "list", "--json", "--topic", "other")).said)["keys"] == 0


async def test_show_has_the_payload_only_when_asked_for_it(outbox: OutboxUnderTest) -> None:
    event = outbox.event("order-1", 0, payload=SECRET.encode(), headers={"traceparent": "00-1"})
    await park(outbox, event)
    told = await command(outbox, "show", str(event.event_id))
    assert SECRET not in told.said + told.complained
    assert "'traceparent': '00-1'" in told.said
    told = await command(outbox, "show", str(event.event_id), "--json", "--payload")
    assert json.loads(told.said)["payload"] == SECRET
    unknown = await command(outbox, "show", str(new_event_id()))
    assert unknown.status == 2
    assert "outbox parked list" in unknown.complained


async def test_release_releases_the_whole_key_and_nothing_else(outbox: OutboxUnderTest) -> None:
    first, second = outbox.event("order-1", 0), outbox.event("order-1", 1)
    await park(outbox, first, second, outbox.event("order-2", 0))
    dry = await command(outbox, "release", str(second.event_id), "--by", "ada", "--dry-run")
    assert dry.said.startswith("2 events would be published")
    assert await released(outbox) == 0
    told = await command(outbox, "release", str(second.event_id), "--by", "ada")
    assert told.said.startswith("2 events are released")
    assert await released(outbox) == 2
    assert (
        await scalar(outbox.database, "SELECT DISTINCT released_by FROM outbox_parked WHERE key = 'order-1'") == "ada"
    )


async def test_release_of_all_or_of_some(outbox: OutboxUnderTest) -> None:
    await park(outbox, *(outbox.event(f"order-{key}", number) for key in range(3) for number in range(2)))
    nothing = "nothing that is parked matches; 6 events are parked in all"
    assert (await command(outbox, "release", "--all", "--by", "ada", "--topic", "other")).said.startswith(nothing)
    assert (await command(outbox, "list", "--topic", "other")).said.startswith(nothing)
    some = await command(outbox, "release", "--all", "--by", "ada", "--reason-contains", "TooLarge", "--dry-run")
    assert some.said.startswith("6 events would be")
    assert (await command(outbox, "release", "--all", "--by", "ada")).said.startswith("6 events are released")
    assert await released(outbox) == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["release", "--by", "ada"], "name one event id, or say --all"),
        (["release", "--all", str(UUID(int=1)), "--by", "ada"], "name one event id, or say --all"),
        (["release", str(UUID(int=1)), "--by", "ada", "--topic", "t"], "belong to --all"),
        (["release", "--all", "--by", " "], "--by is empty"),
        (["release", "--all"], "--by"),
        (["discard", str(UUID(int=1)), "--by", "ada"], "--reason"),
        (["discard", str(UUID(int=1)), "--by", "ada", "--reason", " "], "--reason is empty"),
        (["discard", str(UUID(int=1)), "--by", "ada", "--reason", "x"], "no event"),
        (["show", "not-an-id"], "UUID"),
    ],
)
async def test_what_cannot_be_done_is_one_readable_line_and_changes_nothing(
    outbox: OutboxUnderTest, arguments: list[str], message: str
) -> None:
    await park(outbox, outbox.event("order-1", 0))
    told = await command(outbox, *arguments)
    assert told.status == 2
    assert message in told.complained
    assert "Traceback" not in told.complained
    assert await released(outbox) == 0


async def test_discard_gives_up_one_event_and_tells_of_those_behind_it(outbox: OutboxUnderTest) -> None:
    first, second = outbox.event("order-1", 0), outbox.event("order-1", 1)
    await park(outbox, first, second)
    arguments = ("discard", str(first.event_id), "--by", "ada", "--reason", "test data")
    assert "nothing was changed" in (await command(outbox, *arguments, "--dry-run")).said
    told = await command(outbox, *arguments)
    assert "nothing will ever be charged by it" in told.said
    assert "1 other events of its key still wait" in told.said
    shown = json.loads((await command(outbox, "show", str(first.event_id), "--json")).said)
    assert (shown["outcome"], shown["settled_by"], shown["note"]) == ("discarded", "ada", "test data")
    again = await command(outbox, *arguments)
    assert again.status == 2
    assert "was discarded already, by ada" in again.complained


async def test_an_event_that_is_released_is_not_discarded(outbox: OutboxUnderTest) -> None:
    first, second = outbox.event("order-1", 0), outbox.event("order-1", 1)
    await park(outbox, first, second)
    await command(outbox, "release", str(first.event_id), "--by", "ada")
    told = await command(outbox, "discard", str(second.event_id), "--by", "bob", "--reason", "x")
    assert told.status == 2
    assert "the relay may be sending it" in told.complained


async def waits_for_a_lock(outbox: OutboxUnderTest) -> None:
    """Return when a session of this database waits for another one's rows."""
    async with asyncio.timeout(20):
        while not await scalar(
            outbox.database,
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'",
        ):
            await asyncio.sleep(0.01)


async def decide(connection: AsyncConnection, change: str, event: OutgoingEvent) -> None:
    """What another operator does at the same time, not committed yet."""
    await connection.execute(text(f"UPDATE outbox_parked SET {change} WHERE event_id = :id"), {"id": event.event_id})  # noqa: S608


async def test_a_discard_that_loses_to_a_release_is_refused(outbox: OutboxUnderTest) -> None:
    first, second = outbox.event("order-1", 0), outbox.event("order-1", 1)
    await park(outbox, first, second)
    async with outbox.database.engine.connect() as other:
        await decide(other, "released_at = now(), released_by = 'bob'", first)
        discarding = asyncio.create_task(discard(outbox.database, second.event_id, "ada", "why", dry_run=False))
        await waits_for_a_lock(outbox)
        await other.commit()
        with pytest.raises(Refused, match="the relay may be sending it"):
            await discarding
    assert {outcome for _, _, outcome in await outbox.parked()} == {None}


async def test_a_release_that_loses_to_a_discard_releases_nothing_of_it(outbox: OutboxUnderTest) -> None:
    first, second = outbox.event("order-1", 0), outbox.event("order-1", 1)
    await park(outbox, first, second)
    async with outbox.database.engine.connect() as other:
        await decide(other, "settled_at = now(), outcome = 'discarded', settled_by = 'bob'", first)
        of_first, of_second = [
            asyncio.create_task(release_key_of(outbox.database, event.event_id, "ada", OUTBOX_CHANNEL, dry_run=False))
            for event in (first, second)
        ]
        await waits_for_a_lock(outbox)
        await other.commit()
        with pytest.raises(Refused, match="was discarded already, by bob"):
            await of_first
        assert await of_second == 1
    assert [outcome for _, _, outcome in await outbox.parked()] == ["discarded", None]
    assert await released(outbox) == 1


async def test_many_operators_at_once_end_in_one_decision_an_event(outbox: OutboxUnderTest) -> None:
    events = [outbox.event(f"order-{key}", number) for number in range(4) for key in range(5)]
    await park(outbox, *events)

    async def act(number: int, event: OutgoingEvent) -> None:
        try:
            if number % 2:
                await discard(outbox.database, event.event_id, "ada", "why", dry_run=False)
            else:
                await release_key_of(outbox.database, event.event_id, "bob", OUTBOX_CHANNEL, dry_run=False)
        except Refused as refusal:
            assert "already" in refusal.detail or "may be sending it" in refusal.detail  # noqa: PT017

    await asyncio.gather(*(act(number, event) for number, event in enumerate(events)))
    undecided = "SELECT count(*) FROM outbox_parked WHERE settled_at IS NULL AND released_at IS NULL"
    both = "SELECT count(*) FROM outbox_parked WHERE settled_at IS NOT NULL AND released_at IS NOT NULL"
    assert await scalar(outbox.database, undecided) == 0
    assert await scalar(outbox.database, both) == 0


async def test_a_release_wakes_the_relay_and_a_dry_run_does_not(outbox: OutboxUnderTest) -> None:
    event = outbox.event("order-1", 0)
    await park(outbox, event)
    heard = asyncio.Event()
    calls = 0

    def hear(*_: object) -> None:
        nonlocal calls
        calls += 1
        heard.set()

    listener = await asyncpg.connect(outbox.dsn)
    try:
        await listener.add_listener(OUTBOX_CHANNEL, hear)
        await release_key_of(outbox.database, event.event_id, "ada", OUTBOX_CHANNEL, dry_run=True)
        await release_key_of(outbox.database, event.event_id, "ada", OUTBOX_CHANNEL, dry_run=False)
        async with asyncio.timeout(10):
            await heard.wait()
        await listener.execute("SELECT 1")
        assert calls == 1
    finally:
        await listener.close()


async def test_a_second_release_keeps_on_record_who_released_first(outbox: OutboxUnderTest) -> None:
    event = outbox.event("order-1", 0)
    await park(outbox, event)
    for operator in ("ada", "bob"):
        assert await release_key_of(outbox.database, event.event_id, operator, OUTBOX_CHANNEL, dry_run=False) == 1
    assert await scalar(outbox.database, "SELECT released_by FROM outbox_parked") == "ada"


async def test_rows_that_stay_held_are_told_in_one_line_and_nothing_changes(outbox: OutboxUnderTest) -> None:
    event = outbox.event("order-1", 0)
    await park(outbox, event)
    async with outbox.database.engine.connect() as other:
        await decide(other, "note = note", event)
        told = await command(outbox, "release", str(event.event_id), "--by", "ada")
    assert told.status == 2
    assert "nothing was changed. Run the same command again" in told.complained
    assert told.complained.count("\n") == 1
    assert await released(outbox) == 0


async def everything_settled(outbox: OutboxUnderTest) -> None:
    async with asyncio.timeout(20):
        while await scalar(outbox.database, "SELECT count(*) FROM outbox_parked WHERE settled_at IS NULL"):
            await asyncio.sleep(0.02)


async def test_f13_refused_listed_and_released_after_the_topic_takes_more(outbox: OutboxUnderTest) -> None:
    await outbox.limit_message_bytes(20_000)
    bad = outbox.event("order-1", 0, payload=b"order-1:0:" + b"x" * 30_000)
    await outbox.publish(bad)
    await outbox.publish(*(outbox.event("order-1", number) for number in range(1, 4)))
    async with outbox.relay():
        await outbox.drained()
        assert f"{bad.event_id} test.happened.v1" in (await command(outbox, "list")).said
        await outbox.limit_message_bytes(1_000_000)
        told = await command(outbox, "release", "--all", "--reason-contains", "MessageSizeTooLarge", "--by", "ada")
        assert told.said.startswith("4 events are released")
        await everything_settled(outbox)
        await outbox.publish(outbox.event("order-1", 4))
        await outbox.drained()
        assert "nothing is parked" in (await command(outbox, "list")).said
    first_copies = list(dict.fromkeys(record.value[:9] for record in await outbox.arrived()))
    assert first_copies == [f"order-1:{number}".encode() for number in range(5)]


async def test_f13_refused_listed_discarded_and_the_rest_released(outbox: OutboxUnderTest) -> None:
    await outbox.limit_message_bytes(20_000)
    bad = outbox.event("order-1", 0, payload=b"order-1:0:" + b"x" * 30_000)
    await outbox.publish(bad)
    await outbox.publish(*(outbox.event("order-1", number) for number in range(1, 4)))
    async with outbox.relay():
        await outbox.drained()
        [head, *behind] = json.loads((await command(outbox, "list", "--json")).said)["events"]
        assert (head["event_id"], head["refused"]) == (str(bad.event_id), True)
        assert "MessageSizeTooLarge" in head["reason"]
        assert not any(event["refused"] for event in behind)
        assert (await command(outbox, "discard", head["event_id"], "--by", "ada", "--reason", "too large")).status == 0
        assert (await command(outbox, "release", behind[0]["event_id"], "--by", "ada")).status == 0
        await everything_settled(outbox)
        await outbox.publish(outbox.event("order-1", 4))
        await outbox.drained()
    assert [record.value for record in await outbox.arrived()] == [
        f"order-1:{number}".encode() for number in range(1, 5)
    ]
