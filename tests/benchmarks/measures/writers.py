"""What appending an event costs a writer: orders with it, against the same transaction without it."""

from __future__ import annotations

from collections.abc import AsyncIterator

from tests.benchmarks.lab import Lab
from tests.benchmarks.rows import Row, Target
from tests.benchmarks.sizes import Sizes

CONNECTIONS = 16
_EMPTY = "empty_for_writers"


async def measure(lab: Lab, sizes: Sizes) -> AsyncIterator[Row]:
    """Yield commits a second of the product's unit of work, with and without `work.publish`."""
    await lab.databases.make_product(_EMPTY)
    await lab.databases.settle(_EMPTY)
    rates: dict[bool, list[float]] = {True: [], False: []}
    for number in range(sizes.rounds):
        for publish in (True, False) if number % 2 == 0 else (False, True):
            rates[publish].append(await _commits_per_second(lab, sizes, publish=publish))
    await lab.databases.server.drop_database(_EMPTY)
    yield Row(
        "writers",
        "commits/s",
        rates[True],
        Target.ratio_at_least(0.75),
        "without append",
        rates[False],
        f"{CONNECTIONS} connections; order, items and event, against order and items; one process, wake-ups included",
    )


async def _commits_per_second(lab: Lab, sizes: Sizes, *, publish: bool) -> float:
    options = {"warm_up_seconds": min(1.0, sizes.writers_seconds), "seconds": sizes.writers_seconds}
    async with (
        lab.databases.copy(_EMPTY) as database,
        lab.orders(database, publish=publish, connections=CONNECTIONS, **options) as orders,
    ):
        rate: float = (await orders.ask("run"))["commits_per_second"]
        return rate
