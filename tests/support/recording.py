"""A consumer that records every copy of every event of a topic in the order of arrival."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from uuid import UUID

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition

from shared.kafka.partitioner import partition_of
from tests.support.load import Committed


@dataclass(frozen=True, slots=True)
class Arrival:
    """One copy of an event. Times are seconds since the epoch; `created_at` is when its row was inserted."""

    event_id: UUID
    key: str
    number: int
    partition: int
    created_at: float
    arrived_at: float


@dataclass(frozen=True, slots=True)
class Told:
    """What a recording tells of the committed events once all have arrived."""

    events: int
    duplicates: int
    longest_delay_seconds: float


class Recording:
    """Follows a topic without a group: from offset 0, each record once, in the order of each partition."""

    def __init__(self, bootstrap_servers: str, topic: str) -> None:
        self.arrivals: list[Arrival] = []
        self.topic = topic
        self.seen: set[UUID] = set()
        self._consumer = AIOKafkaConsumer(
            bootstrap_servers=bootstrap_servers, auto_offset_reset="none", metadata_max_age_ms=2_000
        )
        self._next: dict[TopicPartition, int] = {}
        self._stopping = False
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to follow the partitions that the topic has."""
        await self._consumer.start()
        self._consumer._client.set_topics([self.topic])
        await self._assign()
        self._following = asyncio.create_task(self._follow(), name="recording")

    async def stop(self) -> None:
        """Stop following. Raises what the recording failed of."""
        self._stopping = True
        try:
            if self._following is not None:
                await self._following
        finally:
            await self._consumer.stop()

    async def complete(self, committed: Committed, deadline_seconds: float = 60.0) -> None:
        """Return when every committed event has arrived, and every copy that is in the topic by then."""
        try:
            async with asyncio.timeout(deadline_seconds):
                while not committed.keys() <= self.seen:
                    await self._step()
                ends = await self._consumer.end_offsets(list(self._next))
                while any(self._next[place] < end for place, end in ends.items()):
                    await self._step()
        except TimeoutError:
            lost = committed.keys() - self.seen
            some = [committed[event_id] for event_id in list(lost)[:10]]
            raise AssertionError(f"{len(lost)} of {len(committed)} events have not arrived, as {some}") from None

    def check(self, committed: Committed) -> Told:
        """Assert that nothing is lost or invented and that first copies of each key came in order without a gap."""
        assert self.seen == committed.keys(), f"never committed: {list(self.seen - committed.keys())[:10]}"
        first: dict[UUID, Arrival] = {}
        numbers: dict[str, int] = {}
        for arrival in self.arrivals:
            assert committed[arrival.event_id] == (arrival.key, arrival.number)
            if arrival.event_id in first:
                continue
            first[arrival.event_id] = arrival
            expected = numbers.get(arrival.key, 0)
            assert arrival.number == expected, f"{arrival.key}: {arrival.number} arrived where {expected} was due"
            numbers[arrival.key] = expected + 1
        delays = [arrival.arrived_at - arrival.created_at for arrival in first.values()]
        return Told(len(first), len(self.arrivals) - len(first), max(delays, default=0.0))

    def first_delays(self, since: float, until: float, without: Collection[str] = ()) -> list[float]:
        """Return the seconds from row to arrival of the first copies of events created in a span of time."""
        first: dict[UUID, Arrival] = {}
        for arrival in self.arrivals:
            first.setdefault(arrival.event_id, arrival)
        return [
            a.arrived_at - a.created_at
            for a in first.values()
            if since <= a.created_at <= until and a.key not in without
        ]

    async def partitions_grew(self, count: int, deadline_seconds: float = 20.0) -> None:
        """Follow the new partitions too."""
        async with asyncio.timeout(deadline_seconds):
            while len(self._consumer.partitions_for_topic(self.topic) or ()) < count:
                await self._consumer._client.force_metadata_update()
                await asyncio.sleep(0.1)
        await self._pause_following()
        await self._assign()
        self._following = asyncio.create_task(self._follow(), name="recording")

    def partitions_by_kafkas_rule(self, count: int) -> bool:
        """Tell whether every copy so far lies where Kafka's default partitioner puts it among so many partitions."""
        return all(arrival.partition == partition_of(arrival.key.encode(), count) for arrival in self.arrivals)

    async def _pause_following(self) -> None:
        self._stopping = True
        if self._following is not None:
            await self._following
        self._stopping = False

    async def _assign(self) -> None:
        async with asyncio.timeout(20):
            while not (partitions := self._consumer.partitions_for_topic(self.topic)):
                await self._consumer._client.force_metadata_update()
                await asyncio.sleep(0.05)
        places = [TopicPartition(self.topic, partition) for partition in sorted(partitions)]
        self._consumer.assign(places)
        for place in places:
            self._consumer.seek(place, self._next.setdefault(place, 0))

    async def _step(self) -> None:
        if self._following is not None and self._following.done():
            self._following.result()
        await asyncio.sleep(0.02)

    async def _follow(self) -> None:
        while not self._stopping:
            fetched = await self._consumer.getmany(timeout_ms=100)
            arrived_at = time.time()
            for place, records in fetched.items():
                for record in records:
                    assert record.offset == self._next[place], "the recording itself has a gap"
                    self._next[place] += 1
                    self._record(record, arrived_at)

    def _record(self, record: ConsumerRecord, arrived_at: float) -> None:
        key, number, *_ = record.value.split(b":")
        assert key == record.key
        event_id = UUID(dict(record.headers)["event_id"].decode())
        self.seen.add(event_id)
        self.arrivals.append(
            Arrival(event_id, key.decode(), int(number), record.partition, record.timestamp / 1000, arrived_at)
        )


@asynccontextmanager
async def recording(bootstrap_servers: str, topic: str) -> AsyncIterator[Recording]:
    """Record a topic until the block ends."""
    following = Recording(bootstrap_servers, topic)
    await following.start()
    try:
        yield following
    finally:
        await following.stop()
