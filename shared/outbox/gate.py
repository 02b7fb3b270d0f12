"""The gate: at most one unacknowledged batch a partition, and nothing at all after the first failure.

A refused first batch lets the next one overtake it on a fresh producer (field report F46), and a failed batch leaves an
idempotent producer failing or out of order for ever (F15, F16). So batches wait here in one lane for each partition,
and the first failure ends the publisher. The events in doubt are read again from the durable progress by the next one:
second copies at worst, never a gap.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import prometheus_client as prometheus

from shared import failpoints
from shared.errors import KafkaFailure
from shared.kafka.producer import IdempotentProducer, RecordBatch, failure_of
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
        while waiting and (waiting[0][1] is None or waiting[0][1].acknowledged_at):
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

    Times are microseconds as PostgreSQL counts them; `acknowledged_at` is 0 until then. `released` are the positions of
    parked events in it; they are behind the cursor and settled by themselves.
    """

    records: RecordBatch
    up_to: dict[Bucket, int] = field(default_factory=dict)
    released: list[tuple[Bucket, int]] = field(default_factory=list)
    created_at: list[int] = field(default_factory=list)
    size_bytes: int = 0
    acknowledged_at: int = 0

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
    """A partition's batches: whether one is with the client, since when, and those that wait for it."""

    waiting: deque[Batch] = field(default_factory=deque)
    sent_at: float = 0.0


class Gate:
    """Sends batches, each partition's one after the other, until the first failure closes it for all of them.

    No task and no timer for each batch: under a steady trickle these would be most of the relay's work. `watch` looks
    at the clock for all of them.
    """

    def __init__(
        self,
        producer: IdempotentProducer,
        deadline_seconds: float,
        stopping: asyncio.Event,
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
        self._in_flight = 0
        self._at_rest = asyncio.Event()
        self._stopping = stopping
        self._closed = False
        self._answered_any = False
        self._counted: list[Batch] = []

    def is_answered(self, within_seconds: float) -> bool:
        """Tell whether the broker takes batches: it took one and answers in time, or has none to answer."""
        oldest = min((lane.sent_at for lane in self._lanes.values() if lane.sent_at), default=0.0)
        return not oldest or (self._answered_any and time.monotonic() - oldest < within_seconds)

    def put(self, batch: Batch) -> None:
        """Send the batch after those of its partition that wait already."""
        lane = self._lanes.get(batch.place)
        if lane is None:
            lane = self._lanes[batch.place] = _Lane()
        self.buffered_bytes += batch.size_bytes
        lane.waiting.append(batch)
        if not lane.sent_at:
            self._send_next(lane)

    def fail(self, error: Exception) -> None:
        """Close the gate: nothing that has not left yet leaves any more."""
        if self.failure is None:
            self.failure = error
        self._at_rest.set()
        self._on_closed()

    async def finish(self, deadline_seconds: float) -> None:
        """Let what is with the client arrive; nothing else is sent, for the relay is stopping."""
        if self._in_flight:
            await wait_for(self._at_rest, deadline_seconds)

    def close(self) -> None:
        """Send nothing else and heed no answer any more."""
        self._closed = True
        self.count()

    async def watch(self) -> None:
        """Close the gate when a batch has been with the client for longer than the deadline. Runs until cancelled."""
        while True:
            await asyncio.sleep(min(1.0, self._deadline_seconds / 4))
            now = time.monotonic()
            for (topic, partition), lane in self._lanes.items():
                if lane.sent_at and now - lane.sent_at > self._deadline_seconds:
                    self.fail(
                        KafkaFailure(f"{topic}/{partition}: no acknowledgement within {self._deadline_seconds:g} s")
                    )

    def _send_next(self, lane: _Lane) -> None:
        if not lane.waiting or self.failure is not None or self._closed or self._stopping.is_set():
            return
        batch = lane.waiting.popleft()
        try:
            submitted = self._producer.submit(batch.records)
        except Exception as error:
            self.fail(error)
            return
        lane.sent_at = time.monotonic()
        self._in_flight += 1
        self._at_rest.clear()
        failpoints.hit("R2")
        submitted.add_done_callback(lambda answer: self._answered(lane, batch, answer))

    def _answered(self, lane: _Lane, batch: Batch, answer: asyncio.Future[object]) -> None:
        """Take the broker's answer. Runs in the event loop's own call: whatever it raises must close the gate."""
        lane.sent_at = 0.0
        self._in_flight -= 1
        failure = failure_of(answer)
        if self._closed:
            return
        topic, partition = batch.place
        if failure is not None:
            detail = f"{topic}/{partition}: {failure.detail}"
            self.fail(RefusedBatch(batch, detail) if failure.permanent else KafkaFailure(detail, remedy=failure.remedy))
            return
        failpoints.hit("R3")
        self._answered_any = True
        try:
            batch.acknowledged_at = _now()
            self._counted.append(batch)
            self._on_acknowledged(batch)
            self._send_next(lane)
        except Exception as error:
            self.fail(error)
        if not self._in_flight:
            self._at_rest.set()

    def count(self) -> None:
        """Bring the metrics up to date with what was acknowledged since the last time."""
        counted, self._counted = self._counted, []
        if not counted:
            return
        now = _now()
        events: defaultdict[str, int] = defaultdict(int)
        created_at: list[int] = []
        for batch in counted:
            events[batch.records.topic] += len(batch.created_at)
            waited = now - batch.acknowledged_at
            created_at += [created + waited for created in batch.created_at]
        for topic, count in events.items():
            EVENTS.labels(topic).inc(count)
        BATCHES.inc(len(counted))
        BYTES.inc(sum(batch.records.size_bytes for batch in counted))
        LATENCY.observe_since(created_at, now, 1_000_000)


def _now() -> int:
    return time.time_ns() // 1000 - POSTGRES_EPOCH_US


async def wait_for(event: asyncio.Event, seconds: float) -> None:
    """Wait for the event, so many seconds at most."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
