"""How fast a topic becomes charges: billing's consumer against a naive one, fresh, again, with poison, and by two."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from itertools import count as numbers

import asyncpg
from aiokafka import AIOKafkaConsumer, TopicPartition

from tests.benchmarks.events import EVENT_TYPE, PARTITION_OF, PARTITIONS, Event, events
from tests.benchmarks.lab import Lab
from tests.benchmarks.measures.process import peak_bytes
from tests.benchmarks.processes import BenchmarkError, Subject
from tests.benchmarks.rows import Row, Target
from tests.benchmarks.sizes import Sizes
from tests.benchmarks.subjects.client import started_producer
from tests.benchmarks.topic import TOPIC

_PRODUCT, _NAIVE = "empty_billing", "empty_naive_billing"
_POISON_EVERY = 100
_POLL_SECONDS = 0.05
_DEADLINE_SECONDS = 300.0
# What a rebalance brings again is no progress.
_SETTLED = "SELECT coalesce(sum(handled + dead + outside_window), 0)::bigint FROM inbox_tally"
_REPEATED = "SELECT coalesce(sum(duplicates), 0)::bigint FROM inbox_tally"
_groups = (f"benchmark-{number}" for number in numbers())


async def measure(lab: Lab, sizes: Sizes) -> AsyncIterator[Row]:
    """Yield fresh events against the naive consumer, duplicates, two consumers, and poison."""
    await lab.databases.make_billing(_PRODUCT)
    await lab.databases.make_naive_billing(_NAIVE)
    for name in (_PRODUCT, _NAIVE):
        await lab.databases.settle(name)
    total = sizes.consumed_events
    await _fill(lab, events(total, at_milliseconds=_now()))
    fresh: list[float] = []
    again: list[float] = []
    naive: list[float] = []
    two: list[float] = []
    memory: list[float] = []
    for number in range(sizes.rounds):
        for subject in ("ours", "naive", "two") if number % 2 == 0 else ("two", "naive", "ours"):
            if subject == "naive":
                naive.append(await _naive(lab, total))
            elif subject == "two":
                two.append(await _together(lab, total, 2))
            else:
                first, second, peak = await _fresh_and_again(lab, total)
                fresh.append(first)
                again.append(second)
                memory.append(peak)
    await _fill(lab, _with_poison(events(total, at_milliseconds=_now())))
    poisoned = [await _together(lab, total, 1, dead=total // _POISON_EVERY) for _ in range(sizes.rounds)]
    for name in (_PRODUCT, _NAIVE):
        await lab.databases.server.drop_database(name)
    note = f"a topic of {total:,} events of 400 bytes in {PARTITIONS} partitions; mark, charge and offsets"
    yield Row("fresh events", "events/s", fresh, Target.ratio_at_least(1.3), "naive consumer", naive, note)
    yield Row("duplicates, the whole topic again", "events/s", again, Target.ratio_at_least(2), "fresh", fresh, note)
    yield Row("1 % poison", "events/s", poisoned, Target.ratio_at_least(0.6), "without poison", fresh, note)
    yield Row("two consumers", "events/s", two, Target.ratio_at_least(0.9), "one", fresh, note)
    yield Row(
        "resident memory of the consumer", "MiB", memory, Target.value_at_most(200), note="peak of the process (VmHWM)"
    )


def _now() -> int:
    return int(time.time() * 1000) - 3_600_000


def _with_poison(made: Iterator[Event]) -> Iterator[Event]:
    """Make one event in a hundred invalid."""
    for number, event in enumerate(made):
        poison = number % _POISON_EVERY == _POISON_EVERY // 2
        yield Event(event.event_id, event.key, b'{"event_type":"order.confirmed.v1"}') if poison else event


async def _fill(lab: Lab, made: Iterator[Event]) -> None:
    """Make the topic anew with these events."""
    await lab.new_topic()
    producer = await started_producer(lab.kafka, TOPIC)
    try:
        sent = []
        batches = {partition: producer.create_batch() for partition in range(PARTITIONS)}
        for event in made:
            partition = PARTITION_OF[event.key]
            headers = [("event_id", str(event.event_id).encode()), ("event_type", EVENT_TYPE.encode())]
            fields = {"timestamp": None, "key": event.key, "value": event.payload, "headers": headers}
            if batches[partition].append(**fields) is None:
                batches[partition].close()
                sent.append(await producer.send_batch(batches[partition], TOPIC, partition=partition))
                batches[partition] = producer.create_batch()
                batches[partition].append(**fields)
        for partition, batch in batches.items():
            batch.close()
            sent.append(await producer.send_batch(batch, TOPIC, partition=partition))
        await asyncio.gather(*sent)
    finally:
        await producer.stop()


async def _naive(lab: Lab, total: int) -> float:
    async with (
        lab.databases.copy(_NAIVE) as database,
        lab.databases.connected(database) as observer,
        lab.naive_consumer(database, next(_groups)) as consumer,
    ):
        started_at: float = (await consumer.ask("start"))["started_at"]
        rate = total / (await _until_charged(observer, total) - started_at)
        await _check_charges(observer, total)
        return rate


async def _fresh_and_again(lab: Lab, total: int) -> tuple[float, float, float]:
    """Consume a topic, and again from its beginning with everything known; return both rates and the peak of memory."""
    group = next(_groups)
    async with lab.databases.copy(_PRODUCT) as database, lab.databases.connected(database) as observer:
        async with lab.consumer(database, group) as consumer:
            fresh = await _rate(observer, [consumer], total)
            peak = peak_bytes(consumer.pid) / 2**20
            await _until_committed(lab, group, total)
        await _forget_offsets(lab, group)
        await lab.databases.flush()
        async with lab.consumer(database, group) as consumer:
            started_at: float = (await consumer.ask("start"))["started_at"]
            again = total / (await _until_tallied(observer, total, _REPEATED) - started_at)
        await _check_charges(observer, total)
        return fresh, again, peak


async def _together(lab: Lab, total: int, consumers: int, dead: int = 0) -> float:
    group = next(_groups)
    async with (
        AsyncExitStack() as stack,
        lab.databases.copy(_PRODUCT) as database,
        lab.databases.connected(database) as observer,
    ):
        subjects = [await stack.enter_async_context(lab.consumer(database, group)) for _ in range(consumers)]
        rate = await _rate(observer, subjects, total)
        await _check_charges(observer, total - dead)
        return rate


async def _rate(observer: asyncpg.Connection, consumers: list[Subject], total: int) -> float:
    """Return the rate from the first assignment to the commit of the last batch."""
    answers = await asyncio.gather(*(consumer.ask("start", 90.0) for consumer in consumers))
    started_at: float = min(answer["started_at"] for answer in answers)
    return total / (await _until_tallied(observer, total) - started_at)


async def _until_charged(observer: asyncpg.Connection, total: int) -> float:
    """Return when the last charge was stored, by the database's clock, which is this machine's."""
    await _until(observer, "SELECT count(*) FROM charge", total)
    at: float = await observer.fetchval("SELECT extract(epoch FROM max(requested_at))::float8 FROM charge")
    return at


async def _until_tallied(observer: asyncpg.Connection, total: int, counted: str = _SETTLED) -> float:
    """Return when so many records were settled; seen at most a poll too late."""
    await _until(observer, counted, total)
    return time.time()


async def _until(observer: asyncpg.Connection, query: str, wanted: int) -> None:
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while (found := await observer.fetchval(query)) < wanted:
        if time.monotonic() > deadline:
            raise BenchmarkError(f"{found} of {wanted} events were settled after {_DEADLINE_SECONDS:g} s")
        await asyncio.sleep(_POLL_SECONDS)


async def _check_charges(observer: asyncpg.Connection, wanted: int) -> None:
    """Raise BenchmarkError unless there is exactly one charge for each order."""
    [found] = await observer.fetch("SELECT count(*), count(DISTINCT order_id) FROM charge")
    if tuple(found) != (wanted, wanted):
        raise BenchmarkError(f"{found[0]} charges of {found[1]} orders, and {wanted} orders were confirmed")


async def _until_committed(lab: Lab, group: str, total: int) -> None:
    async with asyncio.timeout(30):
        while await _committed(lab, group) < total:
            await asyncio.sleep(_POLL_SECONDS)


async def _committed(lab: Lab, group: str) -> int:
    consumer = AIOKafkaConsumer(bootstrap_servers=lab.kafka, group_id=group, enable_auto_commit=False)
    await consumer.start()
    try:
        offsets = [await consumer.committed(TopicPartition(TOPIC, partition)) for partition in range(PARTITIONS)]
        return sum(offset or 0 for offset in offsets)
    finally:
        await consumer.stop()


async def _forget_offsets(lab: Lab, group: str) -> None:
    """Do what an operator does who resets a group to earliest."""
    consumer = AIOKafkaConsumer(bootstrap_servers=lab.kafka, group_id=group, enable_auto_commit=False)
    places = [TopicPartition(TOPIC, partition) for partition in range(PARTITIONS)]
    consumer.assign(places)
    await consumer.start()
    try:
        await consumer.commit(dict.fromkeys(places, 0))
    finally:
        await consumer.stop()
