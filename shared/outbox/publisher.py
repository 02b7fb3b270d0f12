"""One producer's life: read the log, build batches, put them through the gate, record what was acknowledged.

Progress covers only the contiguous acknowledged prefix of each bucket, under the lease's epoch (field reports F4, F5).
Reading the next page and building its batches overlap with sending the current ones; what is read is bounded in bytes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import prometheus_client as prometheus
import structlog
from sqlalchemy.ext.asyncio import AsyncConnection

from shared import failpoints
from shared.errors import Refused
from shared.kafka.producer import IdempotentProducer
from shared.outbox import parking
from shared.outbox.backlog import refusal
from shared.outbox.building import BatchBuilding
from shared.outbox.calls import Calls
from shared.outbox.gate import Batch, Bucket, Gate
from shared.outbox.leases import BucketLeases, Lease
from shared.outbox.log import LogReader, OutboxLog, Page, ProgressWriter, Row
from shared.outbox.parking import Aside, Suspects

log = structlog.get_logger(__name__)

_ROWS_AT_ONCE = 300
_LIKELY_MORE_ROWS = 2  # events come so thick that the next ones are looked for, twice, without waiting for a call

LOST = prometheus.Counter("outbox_leases_lost", "Buckets that turned out to be another relay's.")
PARKED = prometheus.Counter("outbox_parked_behind", "Events parked because one of their key is parked.")


@dataclass(frozen=True, slots=True)
class PublisherSettings:
    """Limits of a publisher. The delivery deadline exceeds the broker's replica.lag.time.max.ms (30 s by default).

    `pace_seconds` is the least time between two reads: under a steady load several events share one read and one
    request, and a single event after a pause does not wait. Called for some buckets, it reads those; every so many
    `sweep_seconds` at least it reads all that it owns.
    """

    poll_seconds: float = 0.5
    first_poll_seconds: float = 0.02
    sweep_seconds: float = 0.05
    pace_seconds: float = 0.003
    progress_interval_seconds: float = 0.1
    delivery_deadline_seconds: float = 45.0
    stop_deadline_seconds: float = 5.0
    check_seconds: float = 30.0
    released_seconds: float = 0.25
    healthy_after_seconds: float = 5.0
    rows_per_read: int = 4800
    least_rows_per_bucket: int = 50
    bytes_per_read: int = 16_000_000
    max_buffered_bytes: int = 16_000_000


@dataclass(frozen=True, slots=True)
class _Read:
    """A page that was read, the buckets it was read for, how far, and whether there may be more."""

    rows: Sequence[Row]
    buckets: Mapping[int, Bucket]
    last_positions: Mapping[int, int]
    more: bool


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
        calls: Calls,
        suspects: Suspects | None = None,
        on_healthy: Callable[[], None] = lambda: None,
    ) -> None:
        self._producer = producer
        self._outbox = outbox
        self._leases = leases
        self._partitions = partitions
        self._settings = settings
        self._stopping = stopping
        self._calls = calls
        self._suspects = suspects or Suspects()
        self._on_healthy = on_healthy
        self._gate = Gate(producer, settings.delivery_deadline_seconds, stopping, self._acknowledged, self._wake_all)
        self._buckets: dict[int, Bucket] = {}
        self._giving_back: set[int] = set()
        self._followed: Mapping[int, Lease] = {}
        self._aside = Aside({}, set())
        self._released_to_settle: list[tuple[Bucket, int]] = []
        self._released_in_flight = 0
        self._progress = asyncio.Event()
        self._busy_buckets = 0
        self._turn = 0
        self._finished = False

    async def run(self) -> None:
        """Publish until `stopping` is set; raises the failure that closed the gate."""
        recorder = asyncio.create_task(self._record_progress(), name="relay progress")
        watch = asyncio.create_task(self._gate.watch(), name="relay deadlines")
        try:
            await self._read_and_build()
            if self._gate.failure is None:
                await self._gate.finish(self._settings.stop_deadline_seconds)
        finally:
            watch.cancel()  # it only sleeps
            self._gate.close()
            self._finished = True
            self._progress.set()
            await recorder
        if self._gate.failure is not None:
            raise self._gate.failure

    # ------------------------------------------------------------------------------------------ read

    async def _read_and_build(self) -> None:
        poll = self._settings.first_poll_seconds
        began = time.monotonic()
        check_at = began + self._settings.check_seconds
        released_at = swept_at = 0.0
        thick = -1
        healthy = busy = False
        async with self._outbox.connect() as checking, self._outbox.reader() as reader:
            ahead: asyncio.Task[_Read] | None = None
            try:
                while self._gate.failure is None and not self._stopping.is_set():
                    now = time.monotonic()
                    await self._follow_leases(checking)
                    if now > check_at:
                        await self._check(checking)
                        check_at = now + self._settings.check_seconds
                    if not healthy and now - began > (patience := self._settings.healthy_after_seconds):
                        healthy = self._gate.is_answered(patience)
                        if healthy:
                            self._on_healthy()
                    if self._aside.blocked and now > released_at:
                        await self._publish_released(checking)
                        looked = time.monotonic()  # the more is parked the longer it takes, and so the rarer it is
                        released_at = looked + max(self._settings.released_seconds, 10 * (looked - now))
                    if ahead is not None:
                        page, ahead = await ahead, None
                    else:
                        called_for = self._calls.take()
                        if not (self._has_room and self._leases.valid and self._buckets):
                            await self._calls.wait(poll)
                            poll = min(2 * poll, self._settings.poll_seconds)
                            continue
                        if busy or now - swept_at > self._settings.sweep_seconds:
                            called_for, swept_at = set(), now  # under a load there is more by now than was called for
                        page = await self._read(reader, called_for)
                    if page.more and self._has_room and self._leases.valid:
                        # The server reads on while this process builds.
                        ahead = asyncio.create_task(self._read(reader, set()))
                        await asyncio.sleep(0)
                    if page.rows:
                        failpoints.hit("R1")
                        poll = self._settings.first_poll_seconds
                        busy = len(page.rows) >= _LIKELY_MORE_ROWS
                        await self._build(checking, page)
                    if page.more:
                        continue
                    thick = 1 if busy and page.rows else thick - 1
                    if thick < 0:
                        await self._calls.wait(poll)
                        poll = min(2 * poll, self._settings.poll_seconds)
                    await self._keep_pace(now)
            finally:
                if ahead is not None:
                    await asyncio.wait({ahead})  # a query is not cut off
                    ahead.exception()

    async def _keep_pace(self, read_at: float) -> None:
        rest = read_at + self._settings.pace_seconds - time.monotonic()
        if rest > 0 and not self._stopping.is_set():
            await asyncio.sleep(rest)

    async def _read(self, reader: LogReader, called_for: Collection[int]) -> _Read:
        """Read what follows in the buckets that were called for, or in every one.

        How far is noted on the bucket itself: when it changes hands before its rows are built, the one that takes its
        place begins at its own cursor.
        """
        if called_for:
            buckets = {n: self._buckets[n] for n in called_for if n in self._buckets and n not in self._giving_back}
            if not buckets:
                return _Read((), {}, {}, more=False)
        else:
            buckets = self._in_turn()
        page = self._page()
        rows = await reader.read({number: bucket.read_up_to for number, bucket in buckets.items()}, page)
        last_positions = {row[0]: row[1] for row in rows}
        for number, position in last_positions.items():
            buckets[number].read_up_to = position
        more = len(rows) >= page.rows_per_bucket or sum(len(row[6]) for row in rows) >= page.bytes_per_bucket
        self._busy_buckets = len(last_positions) if more else 0
        return _Read(rows, buckets, last_positions, more)

    def _in_turn(self) -> dict[int, Bucket]:
        """Return the buckets, beginning elsewhere each time: a page that fills up leaves out the last ones.

        What is to be given back is not read any more, or it would never come to rest.
        """
        numbers = [n for n in self._buckets if n not in self._giving_back] if self._giving_back else list(self._buckets)
        self._turn = (self._turn + len(numbers) // 3 + 1) % max(1, len(numbers))
        return {number: self._buckets[number] for number in numbers[self._turn :] + numbers[: self._turn]}

    @property
    def _has_room(self) -> bool:
        return self._gate.buffered_bytes < self._settings.max_buffered_bytes

    def _page(self) -> Page:
        """Return how much of each bucket to read: the more, the fewer buckets the last page came from.

        With 96 buckets and the largest events a page is some 100 MB; with ordinary ones it is bounded by its rows.
        """
        readers = max(1, self._busy_buckets or len(self._buckets))
        return Page(
            rows=2 * self._settings.rows_per_read,
            rows_per_bucket=max(self._settings.least_rows_per_bucket, self._settings.rows_per_read // readers),
            bytes_per_bucket=self._settings.bytes_per_read // max(1, len(self._buckets)),
            small_bytes=self._settings.bytes_per_read // (2 * self._settings.rows_per_read),
        )

    async def _follow_leases(self, connection: AsyncConnection) -> None:
        """Take up buckets that were gained, drop those that were lost, give back what is beyond the fair share."""
        held = self._leases.held
        if held is self._followed and len(held) == len(self._buckets) and not self._giving_back:
            return  # a refresh makes a new dict; what is lost or given back leaves both
        self._followed = held
        self._drop([n for n, bucket in self._buckets.items() if held.get(n) is not bucket.lease])
        surplus = self._giving_back = set(self._leases.surplus())
        gained = [number for number in held if number not in self._buckets and number not in surplus]
        if gained:
            aside = await parking.read_aside(connection, {number: held[number].cursor for number in gained})
            self._aside = Aside({**self._aside.blocked, **aside.blocked}, self._aside.settled | aside.settled)
            for number in gained:
                if held.get(number) is self._leases.held.get(number):
                    self._buckets[number] = Bucket.of(held[number])
        if self._released_in_flight or self._released_to_settle:
            return  # or the next owner would send again what is out
        settled = [n for n in surplus if n not in self._buckets or self._buckets[n].settled]
        if settled:
            self._drop(settled)
            LOST.inc(len(await self._leases.release(settled)))

    def _drop(self, numbers: Sequence[int]) -> None:
        dropped = [number for number in numbers if self._buckets.pop(number, None) is not None]
        if dropped:
            self._suspects.forget(dropped)
            blocked = {number: keys for number, keys in self._aside.blocked.items() if number not in dropped}
            self._aside = replace(self._aside, blocked=blocked)

    async def _check(self, connection: AsyncConnection) -> None:
        """Look again at what would make publishing wrong. Raises Refused."""
        problem = await refusal(connection)
        if problem:
            raise Refused(problem)
        for topic, registered in self._partitions.items():
            found = self._producer.known_partition_count(topic)
            if found is not None and found != registered:
                raise Refused(partition_count_changed(topic, registered, found))

    # ------------------------------------------------------------------------------------------ build

    async def _build(self, connection: AsyncConnection, page: _Read) -> None:
        """Put the events into their partitions' batches and the batches into their lanes.

        A bucket that changed hands while the rows were read starts again at its own cursor: its rows are left out.
        """
        rows: Sequence[Row] = page.rows
        stale = {n for n in page.last_positions if self._buckets.get(n) is not page.buckets[n]}
        if stale:
            rows = [row for row in rows if row[0] not in stale]
        passed_over: set[int] = set()
        if self._aside.blocked or self._aside.settled:
            rows, passed_over = await self._set_aside(connection, rows)
        batches = self._batches()
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            if start:
                await asyncio.sleep(0)  # acknowledgements and the next page come in between
            batches.add(rows[start : start + _ROWS_AT_ONCE], page.buckets)
        batches.close()
        for number in passed_over:
            self._suspects.passed_over(number, page.last_positions[number])
            if page.buckets[number].pass_over(page.last_positions[number]):
                self._progress.set()

    async def _set_aside(self, connection: AsyncConnection, rows: Sequence[Row]) -> tuple[Sequence[Row], set[int]]:
        """Park events of blocked keys behind what is parked of them; return the rest, and the buckets that had some."""
        if any(row[4] in self._aside.blocked.get(row[0], ()) for row in rows):
            await self._look_aside_again(connection)
        blocked, settled = self._aside.blocked, self._aside.settled
        behind = [row for row in rows if row[4] in blocked.get(row[0], ()) and (row[0], row[1]) not in settled]
        if behind:
            PARKED.inc(len(behind))
            waiting = [(row[0], self._buckets[row[0]].lease.epoch, row[1]) for row in behind]
            owned = await parking.park_behind(connection, self._leases.owner, waiting, "waits behind a refused event")
            for number, epoch in {(number, epoch) for number, epoch, _ in waiting if number not in owned}:
                self._lose(number, epoch)
        aside = {(row[0], row[1]) for row in behind} | settled
        rest = [row for row in rows if row[0] in self._buckets and (row[0], row[1]) not in aside]
        passed_over = {row[0] for row in rows if row[0] in self._buckets and (row[0], row[1]) in aside}
        self._aside = replace(self._aside, settled=settled - {(row[0], row[1]) for row in rows})
        return rest, passed_over

    async def _look_aside_again(self, connection: AsyncConnection) -> None:
        """Forget keys of which nothing is parked any more: an operator may have discarded the last of it.

        What was discarded ahead of its bucket's cursor is noted in the same go, for it must not be sent.
        """
        found = await self._read_aside_now(connection)
        blocked = {number: keys & found.blocked.get(number, set()) for number, keys in self._aside.blocked.items()}
        self._aside = Aside({n: keys for n, keys in blocked.items() if keys}, self._aside.settled | found.settled)

    async def _read_aside_now(self, connection: AsyncConnection) -> Aside:
        """Read what stands aside in buckets with blocked keys, as far as it may still be sent from the log."""
        blocking = [number for number in self._aside.blocked if number in self._buckets]
        return await parking.read_aside(connection, {n: self._buckets[n].recorded_up_to for n in blocking})

    async def _publish_released(self, connection: AsyncConnection) -> None:
        """Publish what an operator released, before anything newer of its keys; then their newer events may follow."""
        if self._released_in_flight or self._released_to_settle:
            return
        released = await parking.read_released(connection, list(self._aside.blocked), self._settings.bytes_per_read)
        if not released.events:
            return
        # A bucket may have yet to pass what is sent here, and what was discarded of a key that is released as a whole.
        discarded = (await self._read_aside_now(connection)).settled
        events = [row for row in released.events if row.bucket in self._buckets]
        sent = {(row[0], row[1]) for row in events if row[1] > self._buckets[row[0]].recorded_up_to}
        self._aside = replace(self._aside, settled=self._aside.settled | discarded | sent)
        if not events:
            return
        log.info("relay.publishing_released", events=len(events), whole_keys=len(released.whole_keys))
        self._released_in_flight = len(events)
        batches = self._batches()
        batches.add(events, self._buckets, released=True)
        batches.close()
        for number, key in released.whole_keys:
            self._aside.blocked.get(number, set()).discard(key)
        self._aside = replace(self._aside, blocked={n: keys for n, keys in self._aside.blocked.items() if keys})

    def _batches(self) -> BatchBuilding:
        return BatchBuilding(self._producer, self._gate, self._partitions, self._suspects)

    # ------------------------------------------------------------------------------------------ progress

    def _acknowledged(self, batch: Batch) -> None:
        had_room = self._has_room
        self._gate.buffered_bytes -= batch.size_bytes
        self._suspects.acknowledged(batch.place, batch.positions())
        for bucket in batch.up_to:
            if bucket.advance():
                self._progress.set()
        if batch.released:
            self._released_in_flight -= len(batch.released)
            self._released_to_settle += batch.released
            self._progress.set()
        if not had_room:
            self._calls.call()

    def _wake_all(self) -> None:
        self._calls.call()
        self._progress.set()

    async def _record_progress(self) -> None:
        """Write progress when there is some, at most once an interval; a last time when the publisher ends."""
        try:
            async with self._outbox.progress_writer() as writer:
                finished = False
                while not finished:
                    await self._progress.wait()
                    self._progress.clear()
                    finished = self._finished
                    await self._record(writer)
                    self._gate.count()
                    if not finished:
                        await asyncio.sleep(self._settings.progress_interval_seconds)
        except Exception as error:
            self._gate.fail(error)

    async def _record(self, writer: ProgressWriter) -> None:
        published = [
            (number, bucket.lease.epoch, bucket.acknowledged_up_to)
            for number, bucket in self._buckets.items()
            if bucket.acknowledged_up_to > bucket.recorded_up_to
        ]
        if published:
            recorded = await writer.write(self._leases.owner, published)
            self._note_recorded(published, recorded)
        released = list(self._released_to_settle)
        if released:
            settled = [(bucket.lease.bucket, bucket.lease.epoch, position) for bucket, position in released]
            async with self._outbox.connect() as connection:
                await parking.settle_published(connection, self._leases.owner, settled)
            del self._released_to_settle[: len(released)]

    def _note_recorded(self, published: Sequence[tuple[int, int, int]], recorded: set[int]) -> None:
        for number, epoch, position in published:
            bucket = self._buckets.get(number)
            if bucket is None or bucket.lease.epoch != epoch:
                continue
            if number in recorded:
                bucket.recorded_up_to = position
            else:
                self._lose(number, epoch)

    def _lose(self, number: int, epoch: int) -> None:
        log.warning("relay.lease_lost", bucket=number, epoch=epoch)
        LOST.inc()
        self._drop([number])
        self._leases.lose(number, epoch)


def partition_count_changed(topic: str, registered: int, found: int) -> str:
    """Return the message of a relay that must not publish to a topic that was repartitioned (field report F18)."""
    return (
        f"topic {topic} has {found} partitions and was registered with {registered}: its keys have moved, and "
        "publishing now would break their order. Nothing is lost: events wait in the outbox. Let consumers drain the "
        f"topic, then set partitions to {found} for it in outbox_topic and restart the relays."
    )
