"""A minute with transactions that other sessions hold open: does the relay grow slower as dead rows pile up?"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from uuid import uuid4

import asyncpg

from shared.settings import OUTBOX_CHANNEL
from tests.benchmarks.databases import append, until_drained
from tests.benchmarks.events import EVENT_TYPE, HELD_BUCKET, events
from tests.benchmarks.lab import Lab
from tests.benchmarks.measures.latency import times_by_event, window
from tests.benchmarks.rows import Row, Target, percentile
from tests.benchmarks.sizes import Sizes
from tests.benchmarks.topic import TOPIC, check_complete, event_ids

_EMPTY = "empty_for_held"
_RATE_PER_SECOND = 1000
_TARGET = Target.ratio_at_least(0.95)
_NOTE = "the last quarter of the time in which the transactions are held open, against its first quarter"


async def measure(lab: Lab, sizes: Sizes) -> AsyncIterator[Row]:
    """Yield bursts drained again and again, and a steady rate, at the end of the hold against its beginning."""
    await lab.databases.make_product(_EMPTY)
    await lab.databases.settle(_EMPTY)
    yield _last_against_first("drain during held transactions", sizes, await _bursts(lab, sizes, _held), _TARGET)
    control = await _bursts(lab, sizes, _nothing_held)
    yield _last_against_first("drain with nothing held, to compare", sizes, control, None)
    for row in await _steady(lab, sizes):
        yield row
    await lab.databases.server.drop_database(_EMPTY)


def _last_against_first(measure: str, sizes: Sizes, drains: list[tuple[float, float]], target: Target | None) -> Row:
    quarter = sizes.hold_seconds / 4
    return Row(
        measure,
        "events/s",
        [rate for at, rate in drains if at >= sizes.hold_seconds - quarter] or [drains[-1][1]],
        target,
        "first quarter",
        [rate for at, rate in drains if at < quarter],
        f"{_NOTE}; each round is a burst of {sizes.burst_events:,} events",
        {"bursts": [{"at_seconds": at, "events_per_second": rate} for at, rate in drains]},
    )


@asynccontextmanager
async def _held(lab: Lab, database: str) -> AsyncIterator[None]:
    """Hold open a transaction that wrote an order, one that appended an event, and a snapshot; none is committed.

    The event lies in a bucket that no other event uses: those behind it in its own bucket wait for it by design.
    """
    async with AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(lab.databases.connected(database)) for _ in range(3)]
        order, appended, reader = sessions
        for session in sessions:
            transaction = session.transaction(isolation="repeatable_read" if session is reader else None)
            await transaction.start()
            stack.push_async_callback(transaction.rollback)
        await order.execute(
            "INSERT INTO orders (customer_id, currency, total_amount, status, payment_status, version, "
            "confirmed_event_id) VALUES (1, 'EUR', 1, 'confirmed', 'pending', 1, gen_random_uuid())"
        )
        await appended.execute(
            "INSERT INTO outbox_event (event_id, bucket, topic, key, event_type, payload) "
            "VALUES ($1, $2, $3, 'held', $4, '{}')",
            *(uuid4(), HELD_BUCKET, TOPIC, EVENT_TYPE),
        )
        await reader.fetch("SELECT count(*) FROM outbox_event")
        yield


@asynccontextmanager
async def _nothing_held(_lab: Lab, _database: str) -> AsyncIterator[None]:
    """The control: whatever grows slower here does so by itself."""
    yield


async def _bursts(
    lab: Lab, sizes: Sizes, hold: Callable[[Lab, str], AbstractAsyncContextManager[None]]
) -> list[tuple[float, float]]:
    """Drain bursts as long as the hold lasts; return when each was committed, and how fast it was drained.

    Bursts before it warm up: until the table has outgrown the server's buffers, each one is slower than the last, with
    and without a transaction that is held.
    """
    await lab.new_topic()
    total = 0
    drains: list[tuple[float, float]] = []
    async with (
        lab.databases.copy(_EMPTY) as database,
        lab.relay(database) as relay,
        lab.databases.connected(database) as writer,
    ):
        await relay.ask("start")
        began = time.time()
        while time.time() < began + sizes.hold_warm_up_seconds:
            await _burst(lab, writer, sizes.burst_events, total)
            total += sizes.burst_events
        async with hold(lab, database):
            began = time.time()
            while time.time() < began + sizes.hold_seconds:
                committed_at, rate = await _burst(lab, writer, sizes.burst_events, total)
                total += sizes.burst_events
                drains.append((committed_at - began, rate))
    await check_complete(lab.kafka, total)
    return drains


async def _burst(lab: Lab, writer: asyncpg.Connection, count: int, first: int) -> tuple[float, float]:
    """Commit a burst; return when that was, and the rate from there to the last recorded progress."""
    async with writer.transaction():
        await append(writer, events(count, first))
    committed_at = time.time()
    await writer.execute("SELECT pg_notify($1, '')", OUTBOX_CHANNEL)
    rate = count / (await until_drained(writer) - committed_at)
    await lab.databases.flush()  # or a checkpoint would fall into the later bursts only
    return committed_at, rate


async def _steady(lab: Lab, sizes: Sizes) -> list[Row]:
    await lab.new_topic()
    warm_up, hold = sizes.warm_up_seconds, sizes.hold_seconds
    async with (
        lab.databases.copy(_EMPTY) as database,
        lab.relay(database) as relay,
        lab.writer(database, naive=False, rate_per_second=_RATE_PER_SECOND, seconds=warm_up + hold) as writer,
        lab.databases.connected(database) as observer,
    ):
        await relay.ask("start")
        async with _held(lab, database):
            began, ended, _ = await window(relay, writer, warm_up, hold)
            commits = (await writer.ask("committed"))["commits"]
        await until_drained(observer)
        batches = (await relay.ask("acknowledged"))["batches"]
    acknowledged = times_by_event(batches, await event_ids(lab.kafka))
    quarter = hold / 4
    first, last = (began, began + quarter), (ended - quarter, ended)
    rate = [sum(begin <= at < end for at in acknowledged.values()) / quarter for begin, end in (first, last)]
    latency = [
        1000 * percentile([acknowledged[i] - at for i, at in commits.items() if begin <= at < end], 50)
        for begin, end in (first, last)
    ]
    return [
        Row(
            "1,000/s during held transactions",
            "events/s",
            [rate[1]],
            Target.ratio_at_least(0.95),
            "first quarter",
            [rate[0]],
            _NOTE,
        ),
        Row(
            "commit to ack at 1,000/s during held transactions, p50",
            "ms",
            [latency[1]],
            Target.ratio_at_most(1 / 0.95),
            "first quarter",
            [latency[0]],
            _NOTE,
        ),
    ]
