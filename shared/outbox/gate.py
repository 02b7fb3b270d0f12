"""The gate: at most one unacknowledged batch a partition, and nothing at all after the first failure.

A refused first batch lets the next one overtake it on a fresh producer (field report F46), and a failed batch leaves an
idempotent producer failing or out of order for ever (F15, F16). So batches wait here in one lane for each partition,
and the first failure ends the publisher. The events in doubt are read again from the durable progress by the next one:
second copies at worst, never a gap.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import prometheus_client as prometheus

from shared import failpoints
from shared.errors import KafkaFailure
from shared.kafka.producer import IdempotentProducer, RecordBatch
from shared.lifecycle import is_cancelled
from shared.outbox.leases import Lease
from shared.outbox.log import POSTGRES_EPOCH_US
from shared.outbox.parking import Place
from shared.telemetry import BulkHistogram

EVENTS = prometheus.Counter("outbox_published_events", "Events acknowledged by all in-sync replicas.", ["topic"])
BATCHES = prometheus.Counter("outbox_published_batches", "Record batches acknowledged.")
BYTES = prometheus.Counter("outbox_published_bytes", "Bytes of acknowledged batches on the wire, compressed.")
LATENCY = BulkHistogram("outbox_commit_to_ack_seconds", "From an event's row to its acknowledgement.")


@dataclass(slots=True, eq=False)
class Bucket:
    """An owned bucket: how far it was read, and the batches that its unrecorded events lie in, in order."""

    lease: Lease
    read_up_to: int
    recorded_up_to: int
    acknowledged_up_to: int = 0
    waiting: deque[tuple[int, Batch | None]] = field(default_factory=deque)

    @classmethod
    def of(cls, lease: Lease) -> Bucket:
        """Begin where the lease found the durable progress."""
        return cls(lease, lease.cursor, lease.cursor)

    def advance(self) -> bool:
        """Move over the contiguous acknowledged prefix; tell whether there is progress to record."""
        waiting = self.waiting
        while waiting and (waiting[0][1] is None or waiting[0][1].acknowledged):
            self.acknowledged_up_to = waiting.popleft()[0]
        return self.acknowledged_up_to > self.recorded_up_to

    def pass_over(self, position: int) -> bool:
        """Note that what was read up to here and lies in no batch needs none; tell whether that is progress."""
        self.waiting.append((position, None))
        return self.advance()

    @property
    def settled(self) -> bool:
        """Whether everything that was read is acknowledged and recorded."""
        return not self.waiting and self.acknowledged_up_to <= self.recorded_up_to


@dataclass(slots=True, eq=False)
class Batch:
    """A record batch on its way: up to which position of which buckets its events reach, and when they were created.

    `released` are the positions of parked events in it; they are behind the cursor and settled by themselves.
    """

    records: RecordBatch
    up_to: dict[Bucket, int] = field(default_factory=dict)
    released: list[tuple[Bucket, int]] = field(default_factory=list)
    created_at: list[int] = field(default_factory=list)
    size_bytes: int = 0
    acknowledged: bool = False

    def reaches(self, bucket: Bucket, position: int) -> None:
        """Note the last event of a bucket that was added."""
        self.up_to[bucket] = position
        waiting = bucket.waiting
        if waiting and waiting[-1][1] is self:
            waiting[-1] = (position, self)
        else:
            waiting.append((position, self))

    @property
    def place(self) -> Place:
        """Topic and partition."""
        return self.records.topic, self.records.partition

    def positions(self) -> dict[int, int]:
        """Return the highest position of each bucket's number, parked events included."""
        highest = {bucket.lease.bucket: position for bucket, position in self.up_to.items()}
        for bucket, position in self.released:
            number = bucket.lease.bucket
            highest[number] = max(position, highest.get(number, 0))
        return highest


class RefusedBatch(KafkaFailure):
    """The broker refuses a batch for good. With several records in it, one of them or their sum may be at fault."""

    def __init__(self, batch: Batch, detail: str) -> None:
        super().__init__(detail, permanent=True)
        self.batch = batch


@dataclass(slots=True)
class _Lane:
    """A partition's batches: the one with the client, and those that wait for it."""

    waiting: deque[Batch] = field(default_factory=deque)
    sending: asyncio.Task[None] | None = None


class Gate:
    """Sends batches, each partition's one after the other, until the first failure closes it for all of them."""

    def __init__(
        self,
        producer: IdempotentProducer,
        deadline_seconds: float,
        on_acknowledged: Callable[[Batch], None],
        on_closed: Callable[[], None],
    ) -> None:
        self.failure: Exception | None = None
        self.buffered_bytes = 0
        self._producer = producer
        self._deadline_seconds = deadline_seconds
        self._on_acknowledged = on_acknowledged
        self._on_closed = on_closed
        self._lanes: dict[Place, _Lane] = {}
        self._stopping = False

    def put(self, batch: Batch) -> None:
        """Send the batch after those of its partition that wait already."""
        lane = self._lanes.setdefault(batch.place, _Lane())
        self.buffered_bytes += batch.size_bytes
        lane.waiting.append(batch)
        if lane.sending is None and self.failure is None and not self._stopping:
            lane.sending = asyncio.create_task(self._send_in_turn(lane), name=f"relay lane {batch.place}")

    def fail(self, error: Exception) -> None:
        """Close the gate: nothing that has not left yet leaves any more."""
        if self.failure is None:
            self.failure = error
        self._on_closed()

    async def finish(self, deadline_seconds: float) -> None:
        """Let what is with the client arrive, and send nothing else."""
        self._stopping = True
        sending = self._sending()
        if sending:
            await asyncio.wait(sending, timeout=deadline_seconds)

    async def close(self) -> None:
        """End the lanes. They wait for the network only; no query is cut off."""
        self._stopping = True
        sending = self._sending()
        for task in sending:
            task.cancel()
        await asyncio.gather(*sending, return_exceptions=True)

    def _sending(self) -> list[asyncio.Task[None]]:
        return [lane.sending for lane in self._lanes.values() if lane.sending is not None]

    async def _send_in_turn(self, lane: _Lane) -> None:
        try:
            while lane.waiting and self.failure is None and not self._stopping:
                await self._send(lane.waiting.popleft())
        finally:
            lane.sending = None

    async def _send(self, batch: Batch) -> None:
        topic, partition = batch.place
        try:
            handed_over = await self._producer.hand_over(batch.records, self._deadline_seconds)
            failpoints.hit("R2")
            await self._producer.acknowledged(handed_over, self._deadline_seconds)
            failpoints.hit("R3")
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            self.fail(KafkaFailure("the client cancelled a batch by itself"))
        except KafkaFailure as failure:
            detail = f"{topic}/{partition}: {failure.detail}"
            self.fail(RefusedBatch(batch, detail) if failure.permanent else KafkaFailure(detail, remedy=failure.remedy))
        except Exception as error:
            self.fail(error)
        else:
            batch.acknowledged = True
            _count(batch)
            self._on_acknowledged(batch)


def _count(batch: Batch) -> None:
    EVENTS.labels(batch.records.topic).inc(len(batch.created_at))
    BATCHES.inc()
    BYTES.inc(batch.records.size_bytes)
    LATENCY.observe_since(batch.created_at, time.time_ns() // 1000 - POSTGRES_EPOCH_US, 1_000_000)


async def wait_for(event: asyncio.Event, seconds: float) -> None:
    """Wait for the event, so many seconds at most."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
