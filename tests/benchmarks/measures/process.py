"""The real process, `order-service run relay`: its memory with a large backlog, and what it costs when idle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil

from tests.benchmarks.databases import append, until_drained
from tests.benchmarks.events import events
from tests.benchmarks.lab import Lab
from tests.benchmarks.rows import Row, Target
from tests.benchmarks.sizes import Sizes
from tests.benchmarks.topic import check_complete

_DATABASE = "large_backlog"
_SETTLE_SECONDS = 3.0


async def measure(lab: Lab, sizes: Sizes) -> AsyncIterator[Row]:
    """Yield the peak of resident memory while the backlog drains, then the CPU of the same process when idle."""
    await lab.new_topic()
    await lab.databases.make_product(_DATABASE)
    async with lab.databases.connected(_DATABASE) as connection:
        await append(connection, events(sizes.memory_events))
        await lab.databases.settle(_DATABASE)
        async with lab.relay_process(_DATABASE) as pid:
            await until_drained(connection)
            peak = peak_bytes(pid)
            await asyncio.sleep(_SETTLE_SECONDS)  # what follows a drain, such as a last write of progress, is not idle
            idle = await _cpu_share(pid, sizes.idle_seconds)
    await check_complete(lab.kafka, sizes.memory_events)
    await lab.databases.server.drop_database(_DATABASE)
    yield Row(
        "resident memory, backlog of a million",
        "MiB",
        [peak / 2**20],
        Target.value_at_most(150),
        note=f"peak of the process (VmHWM) after draining {sizes.memory_events:,} events; one run",
    )
    yield Row(
        "CPU when idle",
        "%",
        [100 * idle],
        Target.value_at_most(2),
        note=f"of one core, over {sizes.idle_seconds:g} s, with all 96 buckets, in the same process; one run",
    )


def peak_bytes(pid: int) -> int:
    """Return the most memory that was ever resident, as the kernel kept it."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{pid}/status does not tell VmHWM")


async def _cpu_share(pid: int, seconds: float) -> float:
    """Return the share of one core that the process used while we slept."""
    process = psutil.Process(pid)
    before, began = process.cpu_times(), time.monotonic()
    await asyncio.sleep(seconds)
    after, ended = process.cpu_times(), time.monotonic()
    return (after.user + after.system - before.user - before.system) / (ended - began)
