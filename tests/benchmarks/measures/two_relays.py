"""Two relays on one backlog, against one: does sharing the buckets cost anything?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import asyncpg

from shared.outbox.tables import BUCKETS
from shared.settings import OUTBOX_CHANNEL
from tests.benchmarks.databases import append, until_drained
from tests.benchmarks.events import events
from tests.benchmarks.lab import Lab
from tests.benchmarks.processes import BenchmarkError
from tests.benchmarks.rows import Row, Target
from tests.benchmarks.sizes import Sizes
from tests.benchmarks.topic import check_complete, check_order

_EMPTY = "empty_for_two"
_SHARES_DEADLINE_SECONDS = 60.0


async def measure(lab: Lab, sizes: Sizes) -> AsyncIterator[Row]:
    """Yield the rate of two relays against one, the backlog appearing by one commit when they idle."""
    await lab.databases.make_product(_EMPTY)
    await lab.databases.settle(_EMPTY)
    rates: dict[int, list[float]] = {1: [], 2: []}
    for number in range(sizes.rounds):
        for relays in (2, 1) if number % 2 == 0 else (1, 2):
            rates[relays].append(await _drain(lab, relays, sizes.events))
            await check_complete(lab.kafka, sizes.events)
            if number == 0:
                await check_order(lab.kafka, sizes.events)
    await lab.databases.server.drop_database(_EMPTY)
    yield Row(
        "two relays on one backlog",
        "events/s",
        rates[2],
        Target.ratio_at_least(0.9),
        "one relay",
        rates[1],
        f"{sizes.events:,} events appear by one commit while relays with their fair shares idle; order read back",
    )


async def _drain(lab: Lab, relays: int, count: int) -> float:
    await lab.new_topic()
    async with AsyncExitStack() as stack:
        database = await stack.enter_async_context(lab.databases.copy(_EMPTY))
        observer = await stack.enter_async_context(lab.databases.connected(database))
        writer = await stack.enter_async_context(lab.databases.connected(database))
        for _ in range(relays):
            # Short leases: the shares are fair sooner, and renewing them costs more, not less, while it is timed.
            relay = await stack.enter_async_context(lab.relay(database, relay_lease_seconds=3.0))
            await relay.ask("start")
        await _until_shared(observer, relays)
        async with writer.transaction():
            await append(writer, events(count))
            await lab.databases.flush()
        committed_at = time.time()
        await writer.execute("SELECT pg_notify($1, '')", OUTBOX_CHANNEL)
        return count / (await until_drained(observer) - committed_at)


async def _until_shared(connection: asyncpg.Connection, relays: int) -> None:
    """Wait until each relay holds its fair share of the buckets."""
    deadline = time.monotonic() + _SHARES_DEADLINE_SECONDS
    while [row["held"] for row in await connection.fetch(_SHARES)] != [BUCKETS // relays] * relays:
        if time.monotonic() > deadline:
            raise BenchmarkError(f"{relays} relays did not share the buckets within {_SHARES_DEADLINE_SECONDS:g} s")
        await asyncio.sleep(0.1)


_SHARES = "SELECT count(*) AS held FROM outbox_bucket WHERE lease_owner IS NOT NULL GROUP BY lease_owner"
