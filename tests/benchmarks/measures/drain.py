"""How fast a backlog leaves: the product's relay, the naive one, and the bare client with everything in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator

from tests.benchmarks.databases import append, append_naive, until_drained
from tests.benchmarks.events import events
from tests.benchmarks.lab import Lab
from tests.benchmarks.rows import Row, Target
from tests.benchmarks.sizes import Sizes
from tests.benchmarks.topic import check_complete, check_order

LIMIT_BATCH_BYTES = 900_000
"""As large as the relay makes them; of 60, 120, 250 and 900 kB the size at which the bare client was the fastest."""

_PRODUCT, _NAIVE = "backlog", "naive_backlog"
_SUBJECTS = ("ours", "naive", "limit", "settled limit")


async def measure(lab: Lab, sizes: Sizes) -> AsyncIterator[Row]:
    """Yield the drain against the naive relay and against the limit, a plain script or tuned as the relay is."""
    await _fill(lab, sizes.events)
    ours: list[float] = []
    naive: list[float] = []
    limit: list[float] = []
    settled: list[float] = []
    for number in range(sizes.rounds):
        # Nobody always comes first: what one leaves behind (dirty pages, a warm broker) falls to each in turn.
        for subject in _SUBJECTS[number % len(_SUBJECTS) :] + _SUBJECTS[: number % len(_SUBJECTS)]:
            await lab.new_topic()
            if subject == "ours":
                ours.append(await _drain(lab, sizes.events))
            elif subject == "naive":
                naive.append(await _drain_naive(lab, sizes.events))
            elif subject == "limit":
                limit.append(await _send_from_memory(lab, sizes.events, settled=False))
            else:
                settled.append(await _send_from_memory(lab, sizes.events, settled=True))
            await check_complete(lab.kafka, sizes.events)
            if number == 0:
                await check_order(lab.kafka, sizes.events)
    for name in (_PRODUCT, _NAIVE):
        await lab.databases.server.drop_database(name)
    note = f"backlog of {sizes.events:,} events, one relay, every guarantee on; all arrived, in order within each key"
    yield Row("drain against naive", "events/s", ours, Target.ratio_at_least(4), "naive relay", naive, note)
    yield Row("drain against limit", "events/s", ours, Target.ratio_at_least(0.5), "client alone", limit, note)
    yield Row(
        "drain against limit with the relay's memory settings", "events/s", ours, None, "client alone", settled, note
    )


async def _fill(lab: Lab, count: int) -> None:
    databases = lab.databases
    await databases.make_product(_PRODUCT)
    await databases.make_naive(_NAIVE)
    async with databases.connected(_PRODUCT) as connection:
        await append(connection, events(count))
    async with databases.connected(_NAIVE) as connection:
        await append_naive(connection, events(count))
    await databases.settle(_PRODUCT)
    await databases.settle(_NAIVE)


async def _drain(lab: Lab, count: int) -> float:
    """From joined leases to the last recorded progress."""
    async with (
        lab.databases.copy(_PRODUCT) as database,
        lab.relay(database) as relay,
        lab.databases.connected(database) as observer,
    ):
        started_at: float = (await relay.ask("start"))["started_at"]
        return count / (await until_drained(observer) - started_at)


async def _drain_naive(lab: Lab, count: int) -> float:
    """From the start of a relay that is connected to its last UPDATE."""
    async with (
        lab.databases.copy(_NAIVE) as database,
        lab.naive(database) as relay,
        lab.databases.connected(database) as observer,
    ):
        started_at: float = (await relay.ask("start"))["started_at"]
        await relay.ask("drained", deadline_seconds=300.0)
        ended_at: float = await observer.fetchval("SELECT extract(epoch FROM max(published))::float8 FROM outbox")
        return count / (ended_at - started_at)


async def _send_from_memory(lab: Lab, count: int, *, settled: bool) -> float:
    async with lab.limit(count, LIMIT_BATCH_BYTES, settled=settled) as client:
        await lab.databases.flush()
        seconds: float = (await client.ask("send", deadline_seconds=300.0))["seconds"]
        return count / seconds
