"""Dead letters end: retried in sequence by the same handler, by themselves or by command, or given up (F34, F35)."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prometheus_client import REGISTRY
from sqlalchemy.exc import OperationalError

from chargeonce.stack import KafkaBroker
from shared.errors import MessageRejected
from shared.identifiers import new_event_id
from shared.inbox import letters
from shared.inbox.batch import BatchSettler, Unreadable, receive
from shared.inbox.dead_letters import BEHIND, HANDLER_FAILED
from shared.inbox.letters import Decision, Selection
from shared.inbox.messages import ConsumedRecord
from shared.inbox.retrying import FAILURES_IN_A_ROW, DeadLetterRetrier, Result, RetrySettings
from shared.inbox.upkeep import delete_settled_letters
from shared.lifecycle import running
from shared.unit_of_work import UnitOfWork
from tests.support.inbox import Happened, InboxUnderTest, counted, inbox_under_test, payload
from tests.support.outbox import until

REPOSITORY = Path(__file__).parents[2]
DECISION = Decision("ada", "the cause is mended")


@pytest.fixture
async def inbox(database_url: str, unique_name: str) -> AsyncIterator[InboxUnderTest]:
    async with inbox_under_test(database_url, "", unique_name, topic=False) as made:
        yield made


def retrier(inbox: InboxUnderTest, **settings: float) -> DeadLetterRetrier[Happened]:
    return DeadLetterRetrier(
        group=inbox.group,
        units=inbox.units,
        handler=inbox.handler,
        settings=RetrySettings(**{"poll_seconds": 0.01, **settings}),
    )


async def bury(inbox: InboxUnderTest, *records: ConsumedRecord, error: str = "a bug") -> None:
    """Dead-letter valid events whose handling failed, as the consumer does with one that is alone."""
    settler = BatchSettler(group=inbox.group, units=inbox.units, handler=inbox.handler, deadline_seconds=25)
    failed = MessageRejected(HANDLER_FAILED, error)
    read = [receive(inbox.handler, record) for record in records]
    dead = [Unreadable(one.record, one.event_id, failed, one.digest, blocks=True) for one in read]
    await settler._settle(dead)


async def make_due(inbox: InboxUnderTest, chosen: Selection | None = None, per_second: float = 1e6) -> list[int]:
    async with inbox.units.begin() as work:
        return await letters.request_retry(work.session, inbox.group, chosen or Selection(), DECISION, per_second)


async def retry_all(inbox: InboxUnderTest) -> list[Result]:
    """Retry what is due until nothing is."""
    retrying = retrier(inbox)
    results = []
    while (result := await retrying.retry_next()) is not None:
        results.append(result)
    return results


async def states(inbox: InboxUnderTest) -> dict[int, tuple[Any, ...]]:
    rows = await inbox.rows(
        "SELECT letter_id, status, reason, attempts, next_attempt_at IS NOT NULL, blocks FROM dead_letter"
    )
    return {row[0]: row[1:] for row in rows}


async def test_f34_later_events_of_a_key_wait_behind_one_that_failed_and_follow_in_order(inbox: InboxUnderTest) -> None:
    await bury(inbox, inbox.record(payload(1), key=b"order-1"))
    later = [inbox.record(payload(number), key=b"order-1") for number in (2, 3)]
    settled = await inbox.settle(later[0], inbox.record(payload(10), key=b"order-2"), later[1])
    assert (settled.handled, settled.dead, dict(settled.reasons)) == (1, 2, {BEHIND: 2})
    assert await inbox.numbers() == [10]
    again = await inbox.settle(*later)
    assert (again.duplicates, again.dead) == (2, 0), "they are settled, as letters"
    await make_due(inbox, Selection(reason=HANDLER_FAILED))
    assert await retry_all(inbox) == [Result.RESOLVED] * 3
    assert [number for (number,) in await inbox.rows("SELECT number FROM effect ORDER BY place")] == [10, 1, 2, 3]
    assert await inbox.marks() == {"done": 4}
    assert await inbox.letters() == {}
    after = await inbox.settle(*later, inbox.record(payload(4), key=b"order-1"))
    assert (after.duplicates, after.handled) == (2, 1), "nothing is handled twice, and the key is free"


async def test_garbage_and_verdicts_hold_up_nobody(inbox: InboxUnderTest) -> None:
    inbox.handler.rejects = {5}
    settled = await inbox.settle(
        inbox.record(b"no json", key=b"order-1"),
        inbox.record(payload(5), key=b"order-1"),
        inbox.record(None, key=b"order-1"),
    )
    assert settled.dead == 3
    assert (await inbox.settle(inbox.record(payload(6), key=b"order-1"))).handled == 1


async def test_the_same_key_in_another_topic_and_events_without_a_key_do_not_wait(inbox: InboxUnderTest) -> None:
    await bury(inbox, inbox.record(payload(1), key=b"order-1"))
    elsewhere = replace(inbox.record(payload(2), key=b"order-1"), topic="another")
    without_key = replace(inbox.record(payload(3)), key=None)
    assert (await inbox.settle(elsewhere, without_key)).handled == 2


async def test_f35_attempts_are_counted_before_the_handler_and_a_failure_waits_longer_each_time(
    inbox: InboxUnderTest,
) -> None:
    await bury(inbox, inbox.record(payload(1)))
    seen: list[object] = []

    async def look(work: UnitOfWork) -> None:
        seen.extend(await inbox.rows("SELECT attempts, retrying FROM dead_letter"))  # on another connection

    inbox.handler.before = look
    inbox.handler.fails_on = lambda message: ValueError("still broken")
    delays = []
    for _ in range(4):
        await make_due(inbox)
        assert await retrier(inbox).retry_next() is Result.FAILED
        [(delay,)] = await inbox.rows(
            "SELECT CAST(round(extract(epoch FROM next_attempt_at - last_failed_at)) AS integer) FROM dead_letter"
        )
        delays.append(delay)
    assert seen == [(2, True), (3, True), (4, True), (5, True)]
    assert delays == [300, 1800, 7200, None], "then it waits for a person"
    [(error, attempts, retrying)] = await inbox.rows("SELECT error, attempts, retrying FROM dead_letter")
    assert (error, attempts, retrying) == ("ValueError: still broken", 5, False)
    assert await inbox.marks() == {"dead": 1}


async def test_a_valid_event_that_failed_is_tried_again_by_itself(inbox: InboxUnderTest) -> None:
    await bury(inbox, inbox.record(payload(1)))
    [(delay,)] = await inbox.rows(
        "SELECT CAST(round(extract(epoch FROM next_attempt_at - first_failed_at)) AS integer) FROM dead_letter"
    )
    assert delay == 60


async def test_a_verdict_at_the_retry_frees_the_key(inbox: InboxUnderTest) -> None:
    await bury(inbox, inbox.record(payload(1), key=b"order-1"))
    await inbox.settle(inbox.record(payload(2), key=b"order-1"))
    inbox.handler.rejects = {1}
    await make_due(inbox, Selection(reason=HANDLER_FAILED))
    assert await retry_all(inbox) == [Result.FAILED, Result.RESOLVED]
    assert await inbox.letters() == {"not_wanted": 1}
    assert await inbox.numbers() == [2]


async def test_f34_what_passes_counts_no_attempt_and_the_letter_is_due_again(inbox: InboxUnderTest) -> None:
    await bury(inbox, inbox.record(payload(1)))
    await make_due(inbox)
    inbox.handler.fails_on = lambda message: OperationalError("x", None, ConnectionResetError())
    with pytest.raises(OperationalError):
        await retrier(inbox, put_back_seconds=0).retry_next()
    [(attempts, retrying)] = await inbox.rows("SELECT attempts, retrying FROM dead_letter")
    assert (attempts, retrying) == (1, False)
    inbox.handler.fails_on = lambda message: None
    assert await retry_all(inbox) == [Result.RESOLVED]


async def test_f34_a_retry_into_a_broken_dependency_stops_itself(inbox: InboxUnderTest) -> None:
    await bury(inbox, *(inbox.record(payload(number)) for number in range(10)))
    await make_due(inbox)
    inbox.handler.fails_on = lambda message: ValueError("broken")
    retrying = retrier(inbox)
    for _ in range(FAILURES_IN_A_ROW):
        assert await retrying.retry_next() is Result.FAILED
    assert await retrying.retry_next() is None, "the others wait for a person again"
    attempts = await inbox.rows("SELECT attempts, count(*) FROM dead_letter GROUP BY 1 ORDER BY 1")
    assert attempts == [(1, 10 - FAILURES_IN_A_ROW), (2, FAILURES_IN_A_ROW)]
    await retrying.start()
    await until(lambda: "wait again" in retrying.ready().reason)
    inbox.handler.fails_on = lambda message: None
    await make_due(inbox)
    async with asyncio.timeout(20):
        while await inbox.letters():
            await asyncio.sleep(0.01)
    await until(lambda: retrying.ready().state == "ready")
    await retrying.stop()
    assert await inbox.numbers() == list(range(10))


async def test_f35_what_kills_the_process_is_tried_once_more_and_then_waits_for_a_person(inbox: InboxUnderTest) -> None:
    await bury(inbox, inbox.record(payload(1)))
    await make_due(inbox)
    for due_again in (True, False):
        async with inbox.units.begin() as work:  # and then the process is gone
            begun = await letters.begin_retry(work.session, inbox.group, 0.0)
        assert begun is not None
        [(due,)] = await inbox.rows("SELECT next_attempt_at IS NOT NULL FROM dead_letter")
        assert due is due_again
    assert await retry_all(inbox) == []
    await make_due(inbox)
    assert await retry_all(inbox) == [Result.RESOLVED], "a person may ask again"


async def test_f36_two_processes_never_retry_one_letter_at_a_time(inbox: InboxUnderTest) -> None:
    await bury(inbox, inbox.record(payload(1)))
    await make_due(inbox)
    entered, go_on = asyncio.Event(), asyncio.Event()

    async def wait(work: UnitOfWork) -> None:
        entered.set()
        await go_on.wait()

    inbox.handler.before = wait
    first = asyncio.create_task(retrier(inbox).retry_next())
    await entered.wait()
    assert await retrier(inbox).retry_next() is None
    go_on.set()
    assert await first is Result.RESOLVED


async def test_a_retry_that_outlived_its_lease_settles_nothing_twice(inbox: InboxUnderTest) -> None:
    await bury(inbox, inbox.record(payload(1)))
    await make_due(inbox)
    async with inbox.units.begin() as work:
        slow = await letters.begin_retry(work.session, inbox.group, 0.0)
    assert slow is not None
    assert await retry_all(inbox) == [Result.RESOLVED]
    result, _ = await retrier(inbox)._retry(slow)
    assert result is Result.DECIDED
    assert await inbox.numbers() == [1]


async def waiting_for_a_lock(inbox: InboxUnderTest) -> bool:
    return bool(
        await inbox.rows(
            "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted "
            "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
    )


async def until_a_lock_is_waited_for(inbox: InboxUnderTest) -> None:
    async with asyncio.timeout(20):
        while not await waiting_for_a_lock(inbox):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("batch_first", [True, False])
async def test_an_event_that_comes_while_its_predecessor_is_released_is_not_stranded(
    inbox: InboxUnderTest, batch_first: bool
) -> None:
    await bury(inbox, inbox.record(payload(1), key=b"order-1"))
    await make_due(inbox)
    entered, go_on = asyncio.Event(), asyncio.Event()
    first = True

    async def wait(work: UnitOfWork) -> None:
        nonlocal first
        if first:
            first = False
            entered.set()
            await go_on.wait()

    inbox.handler.before = wait
    # The batch has an event of another key too, so that its handler runs, and waits, under the group's lock.
    batch = (inbox.record(payload(2), key=b"order-1"), inbox.record(payload(9), key=b"order-2"))
    if batch_first:
        settling = asyncio.create_task(inbox.settle(*batch))
        await entered.wait()
        retrying = asyncio.create_task(retrier(inbox).retry_next())
    else:
        retrying = asyncio.create_task(retrier(inbox).retry_next())
        await entered.wait()
        settling = asyncio.create_task(inbox.settle(*batch))
    await until_a_lock_is_waited_for(inbox)
    go_on.set()
    assert await retrying is Result.RESOLVED
    settled = await settling
    assert settled.dead == (1 if batch_first else 0)
    assert await retry_all(inbox) == ([Result.RESOLVED] if batch_first else [])
    order = [number for (number,) in await inbox.rows("SELECT number FROM effect ORDER BY place")]
    assert order.index(1) < order.index(2)


async def test_f34_a_thousand_mixed_letters_are_retried_by_one_request(inbox: InboxUnderTest) -> None:
    """After a fix: those that can succeed do, once and in the order of their key, by two processes at a time."""
    keys = [f"order-{number}".encode() for number in range(100)]
    await bury(inbox, *(inbox.record(payload(number), key=key) for number, key in enumerate(keys)))
    followers = [
        inbox.record(payload(100 * turn + number), key=key) for turn in range(1, 8) for number, key in enumerate(keys)
    ]
    garbage = [inbox.record(b"no json") for _ in range(100)] + [
        inbox.record(payload(1, number="x")) for _ in range(100)
    ]
    assert (await inbox.settle(*followers, *garbage)).dead == 900
    assert len(await make_due(inbox)) == 1000
    retriers = [retrier(inbox) for _ in range(2)]
    for one in retriers:
        await one.start()
    async with asyncio.timeout(120):
        while (await inbox.rows("SELECT count(*) FROM dead_letter WHERE status = 'resolved'")) != [(800,)]:
            await asyncio.sleep(0.05)
        while await inbox.rows("SELECT 1 FROM dead_letter WHERE next_attempt_at IS NOT NULL LIMIT 1"):
            await asyncio.sleep(0.05)
    for one in retriers:
        await one.stop()
    assert await inbox.numbers() == list(range(800))
    by_key: dict[int, list[int]] = {}
    for (number,) in await inbox.rows("SELECT number FROM effect ORDER BY place"):
        by_key.setdefault(number % 100, []).append(number)
    assert all(numbers == sorted(numbers) for numbers in by_key.values())
    assert await inbox.letters() == {"not_json": 100, "invalid_message": 100}


async def test_settled_letters_are_deleted_after_their_retention_and_open_ones_never(inbox: InboxUnderTest) -> None:
    await bury(inbox, *(inbox.record(payload(number)) for number in range(4)))
    await inbox.rows(
        "UPDATE dead_letter SET status = CASE WHEN source_offset < 4 THEN 'resolved' ELSE 'open' END, "
        "settled_at = now() - make_interval(days => CAST(source_offset AS integer) * 40), "
        "first_failed_at = now() - interval '1 year'"
    )
    assert await delete_settled_letters(inbox.database, retention_days=90) == 1
    assert await inbox.rows("SELECT source_offset FROM dead_letter ORDER BY 1") == [(1,), (2,), (4,)]


async def test_open_letters_are_measured_by_reason_and_age(inbox: InboxUnderTest) -> None:
    await bury(inbox, inbox.record(payload(1)))
    await inbox.settle(inbox.record(b"no json"))
    await inbox.rows("UPDATE dead_letter SET first_failed_at = now() - interval '1 hour' WHERE reason = 'not_json'")
    retrying = retrier(inbox, measure_seconds=0)
    async with running([retrying]):
        await until(lambda: _gauge("inbox_dead_letters_open", group=inbox.group, reason=HANDLER_FAILED) == 1)
        assert _gauge("inbox_dead_letters_open", group=inbox.group, reason="not_json") == 1
        assert 3590 < _gauge("inbox_dead_letters_oldest_seconds", group=inbox.group) < 3700
        await make_due(inbox)
        await until(lambda: _gauge("inbox_dead_letters_open", group=inbox.group, reason=HANDLER_FAILED) == 0)


def _gauge(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


async def test_a_discarded_letter_lets_the_next_one_follow(inbox: InboxUnderTest) -> None:
    await bury(inbox, inbox.record(payload(1), key=b"order-1"))
    await inbox.settle(inbox.record(payload(2), key=b"order-1"))
    async with inbox.units.begin() as work:
        discarded = await letters.discard_letters(work.session, inbox.group, Selection(reason=HANDLER_FAILED), DECISION)
    assert len(discarded) == 1
    assert await retry_all(inbox) == [Result.RESOLVED]
    assert await inbox.numbers() == [2]
    rows = await inbox.rows("SELECT status, decided_by, decision_reason FROM dead_letter ORDER BY letter_id")
    assert rows == [("discarded", "ada", DECISION.because), ("resolved", None, None)]


async def test_a_letter_whose_event_was_handled_after_all_is_resolved_without_the_handler(
    inbox: InboxUnderTest,
) -> None:
    await bury(inbox, inbox.record(payload(1)))
    await inbox.rows("UPDATE processed_event SET outcome = 'done'")
    await make_due(inbox)
    assert await retry_all(inbox) == [Result.RESOLVED]
    assert inbox.handler.batches == []


async def test_an_event_without_open_letters_costs_no_further_statement(inbox: InboxUnderTest) -> None:
    async with counted(inbox) as (without, _):
        await inbox.settle(inbox.record(payload(1), key=b"order-1"))
    await bury(inbox, inbox.record(payload(2), key=b"order-2"))
    async with counted(inbox) as (blocked, _):
        await inbox.settle(inbox.record(payload(3), key=b"order-1"))
    assert len(blocked) == len(without) + 2, "the lock, and the keys that are blocked"


async def test_f34_a_failed_event_of_a_batch_holds_back_the_later_ones_of_its_key(
    database_url: str, kafka: KafkaBroker, unique_name: str
) -> None:
    async with inbox_under_test(database_url, kafka.bootstrap_servers, unique_name) as inbox:
        inbox.handler.fails_on = lambda message: ValueError("a bug") if message.number == 1 else None
        await inbox.produce(*(payload(number) for number in (1, 2, 3)), partition=0, key=b"order-1")
        await inbox.produce(*(payload(number) for number in (10, 11, 12)), partition=0)
        async with inbox.consuming():
            await inbox.settled(6)
        assert await inbox.numbers() == [10, 11, 12]
        assert await inbox.letters() == {HANDLER_FAILED: 1, BEHIND: 2}
        inbox.handler.fails_on = lambda message: None
        await make_due(inbox)
        await retry_all(inbox)
        assert [number for (number,) in await inbox.rows("SELECT number FROM effect ORDER BY place")][3:] == [1, 2, 3]


# ------------------------------------------------------------------------------------------------- commands


async def command(inbox: InboxUnderTest, *arguments: str) -> tuple[int, str, str]:
    """Run `order-service dead-letters …`: its exit status, and what it said and complained."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from order_service.cli import main; main()", "dead-letters", *arguments),
        env={
            **os.environ,
            "ORDER_SERVICE_DATABASE_URL": inbox.database.settings.url,
            "ORDER_SERVICE_CONSUMER_GROUP": inbox.group,
            "COLUMNS": "400",
        },
        cwd=REPOSITORY,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    said, complained = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said.decode(), complained.decode()


async def test_f34_letters_are_listed_shown_retried_and_discarded_by_command(inbox: InboxUnderTest) -> None:
    event_id: UUID = new_event_id()
    personal = payload(1, event_id, customer={"name": "Ada", "iban": "DE02"}, note="gift")
    headers = [("traceparent", b"00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01"), ("authorization", b"Bearer abc")]
    await bury(inbox, inbox.record(personal, headers, key=b"order-1"))
    await inbox.settle(inbox.record(payload(2), key=b"order-1"), inbox.record(b"no json"))
    [first, second, third] = sorted(await states(inbox))
    (status, said, _), (_, as_json, _), (_, shown, _), (bad_status, _, complained) = await asyncio.gather(
        command(inbox, "list"),
        command(inbox, "list", "--reason", HANDLER_FAILED, "--json"),
        command(inbox, "show", str(first), "--payload", "--json"),
        command(inbox, "retry", "--because", "why not"),
    )
    assert status == 0
    assert all(reason in said for reason in (HANDLER_FAILED, BEHIND, "not_json"))
    assert [line["event_id"] for line in json.loads(as_json)["letters"]] == [str(event_id)]
    details = json.loads(shown)
    assert details["waiting_behind"] == 1
    assert details["payload"]["customer"] == "(masked)"
    assert details["payload"]["note"] == "gift"
    assert dict(details["headers"])["authorization"] == "(masked)"
    assert dict(details["headers"])["traceparent"].startswith("00-1111")
    assert "Ada" not in shown
    assert "Bearer" not in shown
    assert bad_status == 2
    assert "--all" in complained
    dry, misspelt, unknown = await asyncio.gather(
        command(inbox, "retry", "--all", "--because", "mended", "--dry-run"),
        command(inbox, "retry", "--reason", "handler_faild", "--because", "mended"),
        command(inbox, "show", "999999"),
    )
    assert dry[0] == 0
    assert "3 letters" in dry[1]
    assert "Nothing was changed" in dry[1]
    assert misspelt[0] == 2
    assert "nothing was done" in misspelt[2]
    assert unknown[0] == 2
    assert "999999" in unknown[2]
    assert not any(due for _, _, _, due, _ in list((await states(inbox)).values())[1:])
    retrying = retrier(inbox)
    await retrying.start()
    asked = await command(
        inbox, "retry", str(first), str(second), "--because", "mended in 1.2", "--by", "ada", "--wait"
    )
    assert (asked[0], asked[1].splitlines()[-1][:10]) == (0, "2 resolved"), asked
    failing = await command(inbox, "retry", str(third), "--because", "perhaps", "--wait")
    await retrying.stop()
    assert failing[0] == 1
    assert "1 failed again" in failing[1]
    given_up = await command(inbox, "discard", str(third), "--because", "never an order", "--by", "bob")
    assert given_up[0] == 0
    assert "1 letters are discarded" in given_up[1]
    rows = await inbox.rows("SELECT status, decided_by, decision_reason FROM dead_letter ORDER BY letter_id")
    assert rows == [
        ("resolved", "ada", "mended in 1.2"),
        ("resolved", "ada", "mended in 1.2"),
        ("discarded", "bob", "never an order"),
    ]
    assert await inbox.numbers() == [1, 2]
