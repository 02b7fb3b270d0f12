"""One producer's life: read the log, build batches, send them through the gate, record what was acknowledged.

Rules that keep the order of each key, with the field reports that taught them:

- At most one unacknowledged batch a partition is handed to the client; the next one waits in its lane (F46).
- Any failure closes the gate before anything else is sent, and ends this publisher (F15, F16). The events in doubt are
  read again from the durable progress by the next one: second copies at worst, never a gap.
- Progress covers only the contiguous acknowledged prefix of each bucket, under the lease's epoch (F4, F5).

Reading and building the next batches overlap with sending the current ones; what is read is bounded in bytes.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import prometheus_client as prometheus
import structlog
from sqlalchemy.ext.asyncio import AsyncConnection

from shared import failpoints
from shared.errors import KafkaFailure, Refused
from shared.kafka.producer import IdempotentProducer, Record, RecordBatch
from shared.lifecycle import is_cancelled
from shared.outbox.leases import BucketLeases, Lease
from shared.outbox.log import OutboxLog, Page, StoredEvent, refusal
from shared.telemetry import LATENCY_BUCKETS

log = structlog.get_logger(__name__)

EVENTS = prometheus.Counter("outbox_published_events", "Events acknowledged by all in-sync replicas.", ["topic"])
BATCHES = prometheus.Counter("outbox_published_batches", "Record batches acknowledged.")
BYTES = prometheus.Counter("outbox_published_bytes", "Encoded bytes of acknowledged batches.")
LOST = prometheus.Counter("outbox_leases_lost", "Buckets that turned out to be another relay's.")
LATENCY = prometheus.Histogram(
    "outbox_commit_to_ack_seconds", "From an event's row to its acknowledgement.", buckets=LATENCY_BUCKETS
)


@dataclass(frozen=True, slots=True)
class PublisherSettings:
    """Limits of a publisher. The delivery deadline exceeds the broker's replica.lag.time.max.ms (30 s by default)."""

    poll_seconds: float = 0.5
    first_poll_seconds: float = 0.02
    progress_interval_seconds: float = 0.05
    delivery_deadline_seconds: float = 45.0
    stop_deadline_seconds: float = 5.0
    check_seconds: float = 30.0
    healthy_after_seconds: float = 5.0
    rows_per_read: int = 4800
    least_rows_per_bucket: int = 50
    bytes_per_read: int = 16_000_000
    max_buffered_bytes: int = 16_000_000


@dataclass(slots=True)
class _Batch:
    """A record batch on its way, the buckets whose events it carries, and when those events were created."""

    records: RecordBatch
    buckets: list[_Bucket] = field(default_factory=list)
    created_at: list[float] = field(default_factory=list)
    size_bytes: int = 0
    acknowledged: bool = False


@dataclass(slots=True)
class _Bucket:
    """An owned bucket: how far it was read, and the batches that its unrecorded events lie in, in order."""

    lease: Lease
    read_up_to: int
    waiting: deque[tuple[int, _Batch]] = field(default_factory=deque)
    acknowledged_up_to: int = 0
    recorded_up_to: int = 0

    def add(self, position: int, batch: _Batch) -> None:
        """Note that the next event of this bucket travels in the batch."""
        if self.waiting and self.waiting[-1][1] is batch:
            self.waiting[-1] = (position, batch)
        else:
            self.waiting.append((position, batch))
            batch.buckets.append(self)
        self.read_up_to = position

    def advance(self) -> bool:
        """Move over the contiguous acknowledged prefix; tell whether there is progress to record."""
        while self.waiting and self.waiting[0][1].acknowledged:
            self.acknowledged_up_to = self.waiting.popleft()[0]
        return self.acknowledged_up_to > self.recorded_up_to

    @property
    def settled(self) -> bool:
        """Whether everything that was read is acknowledged and recorded."""
        return not self.waiting and self.acknowledged_up_to <= self.recorded_up_to


@dataclass(slots=True)
class _Lane:
    """A partition: the batches that wait for it, of which at most one is with the client."""

    queue: asyncio.Queue[_Batch] = field(default_factory=asyncio.Queue)
    open_batch: _Batch | None = None


class Publisher:
    """Publishes through one started producer until it is told to stop, or until the first failure."""

    def __init__(
        self,
        *,
        producer: IdempotentProducer,
        outbox: OutboxLog,
        leases: BucketLeases,
        partitions: Mapping[str, int],
        settings: PublisherSettings,
        stopping: asyncio.Event,
        wakeup: asyncio.Event,
        on_healthy: Callable[[], None] = lambda: None,
    ) -> None:
        self._producer = producer
        self._outbox = outbox
        self._leases = leases
        self._partitions = partitions
        self._settings = settings
        self._stopping = stopping
        self._wakeup = wakeup
        self._on_healthy = on_healthy
        self._buckets: dict[int, _Bucket] = {}
        self._lanes: dict[tuple[str, int], _Lane] = {}
        self._lane_tasks: set[asyncio.Task[None]] = set()
        self._progress = asyncio.Event()
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._buffered_bytes = 0
        self._full_buckets = 0
        self._turn = 0
        self._failure: Exception | None = None
        self._finished = False

    async def run(self) -> None:
        """Publish until `stopping` is set; raises the failure that closed the gate."""
        recorder = asyncio.create_task(self._record_progress(), name="relay progress")
        try:
            await self._read_and_build()
            if self._failure is None:
                await self._finish_in_flight()
        finally:
            for task in self._lane_tasks:
                task.cancel()  # lanes wait for the network only; no query is cut off
            await asyncio.gather(*self._lane_tasks, return_exceptions=True)
            self._finished = True
            self._progress.set()
            await recorder
        if self._failure is not None:
            raise self._failure

    # ------------------------------------------------------------------------------------------ read and build

    async def _read_and_build(self) -> None:
        poll = self._settings.first_poll_seconds
        began = time.monotonic()
        check_at = began + self._settings.check_seconds
        healthy = False
        async with self._outbox.connect() as connection:
            while self._failure is None and not self._stopping.is_set():
                self._wakeup.clear()
                await self._follow_leases()
                now = time.monotonic()
                if now > check_at:
                    await self._check(connection)
                    check_at = now + self._settings.check_seconds
                if not healthy and now - began > self._settings.healthy_after_seconds:
                    healthy = True
                    self._on_healthy()
                read = await self._read_page(connection) if self._has_room and self._leases.valid else 0
                if read:
                    poll = self._settings.first_poll_seconds
                if not (read and self._full_buckets and self._has_room):
                    await self._wait_for_work(poll)
                    poll = min(2 * poll, self._settings.poll_seconds)

    async def _read_page(self, connection: AsyncConnection) -> int:
        """Read what follows in every bucket, put it into the lanes, and return the number of events read."""
        reading = self._in_turn()
        cursors = {number: bucket.read_up_to for number, bucket in reading.items()}
        page = self._page()
        events = await self._outbox.read(connection, cursors, page) if cursors else ()
        rows = Counter(event.bucket for event in events)
        sizes = Counter[int]()
        for event in events:
            sizes[event.bucket] += len(event.payload)
        full = [b for b in rows if rows[b] >= page.rows_per_bucket or sizes[b] >= page.bytes_per_bucket]
        self._full_buckets = len(full) or int(len(events) >= page.rows)
        if events:
            failpoints.hit("R1")
            self._build(events, reading)
        return len(events)

    def _in_turn(self) -> dict[int, _Bucket]:
        """Return the buckets, beginning elsewhere each time: a page that fills up leaves out the last ones."""
        numbers = list(self._buckets)
        self._turn = (self._turn + len(numbers) // 3 + 1) % max(1, len(numbers))
        return {number: self._buckets[number] for number in numbers[self._turn :] + numbers[: self._turn]}

    @property
    def _has_room(self) -> bool:
        return self._buffered_bytes < self._settings.max_buffered_bytes

    def _page(self) -> Page:
        """Return how much of each bucket to read: the more, the fewer buckets had a full page the last time.

        With 96 buckets and the largest events a page is some 100 MB; with ordinary ones it is bounded by its rows.
        """
        readers = max(1, self._full_buckets or len(self._buckets))
        return Page(
            rows=2 * self._settings.rows_per_read,
            rows_per_bucket=max(self._settings.least_rows_per_bucket, self._settings.rows_per_read // readers),
            bytes_per_bucket=self._settings.bytes_per_read // max(1, len(self._buckets)),
        )

    async def _wait_for_work(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wakeup.wait()

    async def _follow_leases(self) -> None:
        """Take up buckets that were gained, drop those that were lost, give back what is beyond the fair share."""
        held = self._leases.held
        for number in [n for n, bucket in self._buckets.items() if held.get(n) != bucket.lease]:
            del self._buckets[number]
        surplus = set(self._leases.surplus())
        for number, lease in held.items():
            if number not in self._buckets and number not in surplus:
                self._buckets[number] = _Bucket(lease, lease.cursor, recorded_up_to=lease.cursor)
        settled = [n for n in surplus if n not in self._buckets or self._buckets[n].settled]
        if settled:
            for number in settled:
                self._buckets.pop(number, None)
            await self._leases.release(settled)

    async def _check(self, connection: AsyncConnection) -> None:
        """Look again at what would make publishing wrong. Raises Refused."""
        problem = await refusal(connection)
        if problem:
            raise Refused(problem)
        for topic, registered in self._partitions.items():
            found = self._producer.known_partition_count(topic)
            if found is not None and found != registered:
                raise Refused(partition_count_changed(topic, registered, found))

    def _build(self, events: Sequence[StoredEvent], reading: Mapping[int, _Bucket]) -> None:
        """Put the events into their partitions' batches and the batches into their lanes.

        A bucket that changed hands while the rows were read starts again at its own cursor: its rows are left out.
        """
        touched: dict[tuple[str, int], _Lane] = {}
        for event in events:
            bucket = self._buckets.get(event.bucket)
            if bucket is None or bucket is not reading[event.bucket]:
                continue
            place = (event.topic, event.bucket % self._partition_count(event.topic))
            lane = touched.setdefault(place, self._lane(place))
            self._add(event, bucket, place, lane)
        for lane in touched.values():
            self._close_batch(lane)

    def _partition_count(self, topic: str) -> int:
        count = self._partitions.get(topic)
        if count is None:
            raise Refused(f"topic {topic} is not registered in outbox_topic; run the service's migrate command")
        return count

    def _add(self, event: StoredEvent, bucket: _Bucket, place: tuple[str, int], lane: _Lane) -> None:
        record = Record(event.key, event.payload, kafka_headers(event), event.created_at)
        batch = lane.open_batch
        if batch is None or not batch.records.append(record):
            self._close_batch(lane)
            batch = lane.open_batch = _Batch(self._producer.new_batch(*place))
            if not batch.records.append(record):
                raise KafkaFailure(f"event {event.event_id} fits into no batch of {event.topic}", permanent=True)
        batch.created_at.append(event.created_at.timestamp())
        batch.size_bytes += event.size_bytes
        self._buffered_bytes += event.size_bytes
        bucket.add(event.position, batch)

    def _close_batch(self, lane: _Lane) -> None:
        if lane.open_batch is not None:
            lane.queue.put_nowait(lane.open_batch)
            lane.open_batch = None

    def _lane(self, place: tuple[str, int]) -> _Lane:
        if place not in self._lanes:
            lane = self._lanes[place] = _Lane()
            self._lane_tasks.add(
                asyncio.create_task(self._send_in_turn(lane), name=f"relay lane {place[0]}/{place[1]}")
            )
        return self._lanes[place]

    # ------------------------------------------------------------------------------------------ the gate

    async def _send_in_turn(self, lane: _Lane) -> None:
        """Send the lane's batches one after the other: the gate. The first failure closes it for every lane."""
        while True:
            batch = await lane.queue.get()
            if self._failure is not None or self._stopping.is_set():
                return
            self._in_flight += 1
            self._idle.clear()
            try:
                await self._send(batch)
            except asyncio.CancelledError:
                if is_cancelled():
                    raise
                self._fail(KafkaFailure("the client cancelled a batch by itself"))
                return
            except KafkaFailure as failure:
                place = f"{batch.records.topic}/{batch.records.partition}"
                self._fail(KafkaFailure(f"{place}: {failure.detail}", permanent=failure.permanent))
                return
            except Exception as error:
                self._fail(error)
                return
            finally:
                self._in_flight -= 1
                if not self._in_flight:
                    self._idle.set()

    async def _send(self, batch: _Batch) -> None:
        deadline = self._settings.delivery_deadline_seconds
        acknowledgement = await self._producer.hand_over(batch.records, deadline)
        failpoints.hit("R2")
        await self._producer.acknowledged(acknowledgement, deadline)
        failpoints.hit("R3")
        had_room = self._has_room
        batch.acknowledged = True
        self._buffered_bytes -= batch.size_bytes
        for bucket in batch.buckets:
            if bucket.advance():
                self._progress.set()
        if not had_room:
            self._wakeup.set()
        self._count(batch)

    def _count(self, batch: _Batch) -> None:
        now = time.time()
        EVENTS.labels(batch.records.topic).inc(len(batch.created_at))
        BATCHES.inc()
        BYTES.inc(batch.size_bytes)
        for created_at in batch.created_at:
            LATENCY.observe(max(0.0, now - created_at))

    def _fail(self, error: Exception) -> None:
        if self._failure is None:
            self._failure = error
        self._wakeup.set()
        self._progress.set()

    async def _finish_in_flight(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.stop_deadline_seconds):
                await self._idle.wait()

    # ------------------------------------------------------------------------------------------ progress

    async def _record_progress(self) -> None:
        """Write progress when there is some, at most once an interval; a last time when the publisher ends."""
        try:
            async with self._outbox.connect() as connection:
                finished = False
                while not finished:
                    await self._progress.wait()
                    self._progress.clear()
                    finished = self._finished
                    published = [
                        (number, bucket.lease.epoch, bucket.acknowledged_up_to)
                        for number, bucket in self._buckets.items()
                        if bucket.acknowledged_up_to > bucket.recorded_up_to
                    ]
                    if published:
                        recorded = await self._outbox.write_progress(connection, self._leases.owner, published)
                        self._note_recorded(published, recorded)
                    if not finished:
                        await asyncio.sleep(self._settings.progress_interval_seconds)
        except Exception as error:
            self._fail(error)

    def _note_recorded(self, published: Sequence[tuple[int, int, int]], recorded: set[int]) -> None:
        for number, epoch, position in published:
            bucket = self._buckets.get(number)
            if bucket is None or bucket.lease.epoch != epoch:
                continue
            if number in recorded:
                bucket.recorded_up_to = position
            else:
                log.warning("relay.lease_lost", bucket=number, epoch=epoch, position=position)
                LOST.inc()
                del self._buckets[number]
                self._leases.lose(number, epoch)


def kafka_headers(event: StoredEvent) -> list[tuple[str, bytes]]:
    """Return the record's headers: the event's id and type, then what the writer gave (traceparent)."""
    return [
        ("event_id", str(event.event_id).encode()),
        ("event_type", event.event_type.encode()),
        *((name, value.encode()) for name, value in event.headers.items()),
    ]


def partition_count_changed(topic: str, registered: int, found: int) -> str:
    """Return the message of a relay that must not publish to a topic that was repartitioned (field report F18)."""
    return (
        f"topic {topic} has {found} partitions and was registered with {registered}: its keys have moved, and "
        "publishing now would break their order. Nothing is lost: events wait in the outbox. Let consumers drain the "
        f"topic, then set partitions to {found} for it in outbox_topic and restart the relays."
    )
