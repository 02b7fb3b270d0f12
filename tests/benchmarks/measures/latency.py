"""From commit to acknowledgement at a steady rate, and what the relay spends on it."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.benchmarks.databases import until_drained
from tests.benchmarks.events import PARTITIONS
from tests.benchmarks.lab import Lab
from tests.benchmarks.processes import BenchmarkError, Subject
from tests.benchmarks.rows import Row, Target, percentile
from tests.benchmarks.sizes import Sizes
from tests.benchmarks.topic import check_complete, event_ids

_PRODUCT, _NAIVE = "empty", "naive_empty"


@dataclass(frozen=True, slots=True)
class Flow:
    """A run at a steady rate: for each event when its commit returned and when the relay had its acknowledgement.

    Times are monotonic seconds, ascending by commit; `cpu` is the relay's seconds of CPU a second of the window.
    """

    pairs: list[tuple[float, float]]
    began: float
    ended: float
    cpu: float

    def latencies(self, begin: float, end: float) -> list[float]:
        """Return the latencies, in seconds, of what was committed in a part of the run."""
        return [acknowledged - committed for committed, acknowledged in self.pairs if begin <= committed < end]

    def milliseconds(self, percent: float) -> float:
        """Return a percentile of the latencies in the window."""
        return 1000 * percentile(self.latencies(self.began, self.ended), percent)


async def measure(lab: Lab, sizes: Sizes) -> AsyncIterator[Row]:
    """Yield p50, p99 and CPU at each rate, against the naive relay."""
    await lab.databases.make_product(_PRODUCT)
    await lab.databases.make_naive(_NAIVE)
    for name in (_PRODUCT, _NAIVE):
        await lab.databases.settle(name)
    flows: dict[tuple[float, bool], list[Flow]] = defaultdict(list)
    for number in range(sizes.rounds):
        for rate in sizes.rates_per_second:
            for naive in (False, True) if number % 2 == 0 else (True, False):
                run = _naive_run if naive else product_run
                flows[rate, naive].append(await run(lab, rate, sizes.warm_up_seconds, sizes.window_seconds))
    for rate in sizes.rates_per_second:
        ours, theirs = flows[rate, False], flows[rate, True]
        for percent in (50, 99):
            yield Row(
                f"commit to ack at {rate:,}/s, p{percent}",
                "ms",
                [flow.milliseconds(percent) for flow in ours],
                Target.ratio_at_most(1.2),
                "naive relay",
                [flow.milliseconds(percent) for flow in theirs],
                "one event a transaction; from the commit's return to the relay's acknowledgement",
            )
        yield Row(
            f"CPU of the relay at {rate:,}/s",
            "s/s",
            [flow.cpu for flow in ours],
            Target.ratio_at_most(0.8),
            "naive relay",
            [flow.cpu for flow in theirs],
            "seconds of CPU, user and system, of the relay's process alone in each second of the same runs",
        )
    for name in (_PRODUCT, _NAIVE):
        await lab.databases.server.drop_database(name)


async def product_run(lab: Lab, rate_per_second: float, warm_up_seconds: float, window_seconds: float) -> Flow:
    """Run the product's relay at a rate, in a fresh copy of the empty database and a new topic."""
    await lab.new_topic()
    total = warm_up_seconds + window_seconds
    async with (
        lab.databases.copy(_PRODUCT) as database,
        lab.relay(database) as relay,
        lab.writer(database, naive=False, rate_per_second=rate_per_second, seconds=total) as writer,
        lab.databases.connected(database) as observer,
    ):
        await relay.ask("start")
        began, ended, cpu = await window(relay, writer, warm_up_seconds, window_seconds)
        commits = (await writer.ask("committed"))["commits"]
        await until_drained(observer)
        batches = (await relay.ask("acknowledged"))["batches"]
    await check_complete(lab.kafka, len(commits))
    acknowledged = times_by_event(batches, await event_ids(lab.kafka))
    return Flow(_pairs(commits, acknowledged), began, ended, cpu)


async def _naive_run(lab: Lab, rate_per_second: float, warm_up_seconds: float, window_seconds: float) -> Flow:
    await lab.new_topic()
    total = warm_up_seconds + window_seconds
    async with (
        lab.databases.copy(_NAIVE) as database,
        lab.naive(database, note=True) as relay,
        lab.writer(database, naive=True, rate_per_second=rate_per_second, seconds=total) as writer,
    ):
        await relay.ask("start")
        began, ended, cpu = await window(relay, writer, warm_up_seconds, window_seconds)
        commits = (await writer.ask("committed"))["commits"]
        await relay.ask("drained")
        batches = (await relay.ask("acknowledged"))["batches"]
    await check_complete(lab.kafka, len(commits))
    acknowledged = {event_id: at for at, ids in batches for event_id in ids}
    return Flow(_pairs(commits, acknowledged), began, ended, cpu)


async def window(
    relay: Subject, writer: Subject, warm_up_seconds: float, window_seconds: float
) -> tuple[float, float, float]:
    """Start the writer and sit through the window; return its begin and end, and the relay's CPU seconds a second."""
    began = (await writer.ask("start"))["began"] + warm_up_seconds
    await asyncio.sleep(began - time.monotonic())
    cpu_before, at_before = await relay.usage()
    await asyncio.sleep(began + window_seconds - time.monotonic())
    cpu_after, at_after = await relay.usage()
    return began, began + window_seconds, (cpu_after - cpu_before) / (at_after - at_before)


def times_by_event(batches: Iterable[Any], ids: Mapping[int, Any]) -> dict[str, float]:
    """Return when each event was acknowledged, from batches in order and the ids that lie in each partition.

    Raises BenchmarkError when the two do not match: the relay failed in between and sent something twice.
    """
    times: dict[str, float] = {}
    offsets = dict.fromkeys(range(PARTITIONS), 0)
    for at, partition, records in batches:
        first = offsets[partition]
        offsets[partition] += records
        times.update(dict.fromkeys(ids[partition][first : first + records], at))
    if any(offsets[partition] != len(of_partition) for partition, of_partition in ids.items()):
        raise BenchmarkError("acknowledged batches and the topic do not match: the relay had a failure during the run")
    return times


def _pairs(commits: Mapping[str, float], acknowledged: Mapping[str, float]) -> list[tuple[float, float]]:
    missing = len(commits) - len(commits.keys() & acknowledged.keys())
    if missing:
        raise BenchmarkError(f"{missing} committed events were never acknowledged")
    return sorted((at, acknowledged[event_id]) for event_id, at in commits.items())
