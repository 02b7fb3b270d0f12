"""Publishing again what was published already, for a consumer that was rebuilt: same ids, keys, payloads, partitions.

The header `republished_at` tells a copy from the first one: to consumers, headers they do not know are data (F30).

Healthy consumers absorb the copies as duplicates, as long as their dedup window covers them; so older events are
refused (field reports F24, F34). One batch at a time, in order inside each bucket. Whatever fails, running it again is
safe.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import groupby
from operator import attrgetter

from sqlalchemy import text

from shared.database import Database
from shared.errors import KafkaFailure, Refused
from shared.kafka.producer import IdempotentProducer, RecordBatch
from shared.kafka.settings import KafkaSettings
from shared.outbox.building import kafka_headers
from shared.outbox.log import POSTGRES_EPOCH_US, Row
from shared.outbox.publisher import partition_count_changed
from shared.outbox.topics import registered_topics

REPUBLISHED_AT_HEADER = "republished_at"
_ROWS_A_BATCH = 100
_BYTES_A_PAGE = 1_000_000  # of payloads; a larger event is a page of its own
_MAX_BATCH_BYTES = 900_000  # a larger event goes alone
_MAX_REQUEST_BYTES = 1_048_576
_DEADLINE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Selection:
    """Which published events: created since (and until) a moment, of a type, of a key. None selects all.

    What is older than the keeper's retention is left out, whether or not it was removed yet: that an event was
    discarded is remembered for no longer.
    """

    since: datetime
    until: datetime | None = None
    event_type: str | None = None
    key: str | None = None
    retention_hours: float = field(kw_only=True)

    @property
    def parameters(self) -> dict[str, object]:
        """Return the parameters of `_SELECTED`."""
        return {
            "since": self.since,
            "until": self.until,
            "event_type": self.event_type,
            "key": None if self.key is None else self.key.encode(),
            "hours": self.retention_hours,
        }


@dataclass(frozen=True, slots=True)
class Count:
    """How many selected events there are of a topic and a type."""

    topic: str
    event_type: str
    events: int
    oldest: datetime
    newest: datetime


@dataclass(frozen=True, slots=True)
class Plan:
    """What would be published again. Events before `kept_since` were removed after the retention, if there were any."""

    counts: Sequence[Count]
    kept_since: datetime | None

    @property
    def events(self) -> int:
        """Return how many events that are."""
        return sum(count.events for count in self.counts)


def refuse_outside_window(since: datetime, window_days: int, now: datetime, lasting: timedelta = timedelta(0)) -> None:
    """Raise Refused when consumers may forget events of that age before all are sent: they would take them for new."""
    earliest = now + lasting - timedelta(days=window_days - 1)
    if since < earliest:
        slowly = f", and sending them takes {lasting}; a higher --rate helps" if lasting else ""
        raise Refused(
            f"events since {since:%Y-%m-%d %H:%M}Z are older than what consumers remember ({window_days} days, less "
            f"one to be safe{slowly}): healthy groups would not know them as duplicates. Say --since "
            f"{earliest + timedelta(minutes=1):%Y-%m-%dT%H:%M}Z or later; if every group that reads these topics "
            "remembers more, set …_CONSUMERS_DEDUP_WINDOW_DAYS to the least of them"
        )


async def plan(database: Database, selection: Selection) -> Plan:
    """Count what the selection has, and tell what is still kept."""
    async with database.engine.connect() as connection:
        counts = [Count(*row) for row in await connection.execute(_COUNT, selection.parameters)]
        kept_since = (await connection.execute(_KEPT_SINCE, {"hours": selection.retention_hours})).scalar_one()
    return Plan(counts, kept_since)


class Pace:
    """At most so many events a second. What was not sent during a stall is not made up for by a burst (F34)."""

    def __init__(
        self,
        events_per_second: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._rate, self._clock, self._sleep = events_per_second, clock, sleep
        self._free_at = clock()

    @property
    def most_at_once(self) -> int:
        """Return how many events may be sent together: a second's worth, or a batch."""
        return max(1, min(_ROWS_A_BATCH, int(self._rate)))

    async def wait(self) -> None:
        """Return when more events may be sent."""
        self._free_at = max(self._free_at, self._clock())
        while (rest := self._free_at - self._clock()) > 0:
            await self._sleep(rest)

    def spend(self, events: int) -> None:
        """Note that so many were sent since `wait` returned."""
        self._free_at += events / self._rate


async def republish(
    database: Database, kafka: KafkaSettings, selection: Selection, pace: Pace, on_progress: Callable[[int], None]
) -> int:
    """Publish the selection again and return how many events that were.

    Only what was published before this began, and nothing that is parked or was discarded. Raises KafkaFailure or
    Refused; what was sent until then is told by `on_progress` and harms nobody when it is sent again.
    """
    mark = (REPUBLISHED_AT_HEADER, datetime.now(UTC).isoformat(timespec="seconds").encode())
    sender = _Sender(kafka, await registered_topics(database), mark)
    sent = 0
    try:
        await sender.start()
        async for rows in _pages(database, selection):
            for _, run in groupby(rows, key=attrgetter("topic")):
                waiting = list(run)
                while waiting:
                    await pace.wait()
                    taken = await sender.send(waiting[: pace.most_at_once])
                    pace.spend(taken)
                    del waiting[:taken]
                    sent += taken
                    on_progress(sent)
    finally:
        await sender.close()
    return sent


class _Sender:
    """Sends through one producer after the other: one to which a batch was refused is finished (field report F15)."""

    def __init__(self, kafka: KafkaSettings, partitions: Mapping[str, int], mark: tuple[str, bytes]) -> None:
        self._kafka = kafka
        self._partitions = partitions
        self._mark = mark
        self._producer = self._new_producer()
        self._most_records = _ROWS_A_BATCH

    async def start(self) -> None:
        """Connect. Raises KafkaFailure, and Refused when a topic was repartitioned (F18)."""
        await self._producer.start(_DEADLINE_SECONDS)
        for topic in self._partitions:
            self._check(topic, await self._producer.partition_count(topic, _DEADLINE_SECONDS))

    async def send(self, events: Sequence[Row]) -> int:
        """Send the first of these events of one bucket and topic in one batch; return how many were acknowledged.

        Batches that are too large for their topic get smaller, and an event that only just fits goes without the mark.
        Raises Refused when the topic was repartitioned, and KafkaFailure, permanent when one event alone is refused:
        the topic takes less than it did.
        """
        topic = events[0].topic
        marks = [self._mark]
        while True:
            self._check(topic, self._producer.known_partition_count(topic))
            batch = self._fill(events[: self._most_records], marks)
            try:
                handed_over = await self._producer.hand_over(batch, _DEADLINE_SECONDS)
                await self._producer.acknowledged(handed_over, _DEADLINE_SECONDS)
            except KafkaFailure as error:
                if not error.permanent:
                    raise
                if batch.record_count > 1:
                    self._most_records = batch.record_count // 2
                elif marks:
                    marks = []
                else:
                    raise KafkaFailure(
                        f"{topic} does not take event {events[0].event_id} any more ({error.detail})",
                        permanent=True,
                        remedy="compare its max.message.bytes with what it was, or leave the event out by --since, "
                        "--until or --key",
                    ) from error
                await self.close()
                self._producer = self._new_producer()
                await self.start()
            else:
                return batch.record_count

    async def close(self) -> None:
        """End the producer, whatever state it is in."""
        await self._producer.abandon()

    def _new_producer(self) -> IdempotentProducer:
        return IdempotentProducer(self._kafka, max_batch_bytes=_MAX_BATCH_BYTES, max_request_bytes=_MAX_REQUEST_BYTES)

    def _check(self, topic: str, found: int | None) -> None:
        """Raise Refused when the topic is not registered, or was with another partition count (F18)."""
        registered = self._partitions.get(topic)
        if registered is None:
            raise Refused(f"topic {topic} is not registered in outbox_topic; run the service's migrate command")
        if found is not None and found != registered:
            raise Refused(partition_count_changed(topic, registered, found))

    def _fill(self, events: Sequence[Row], marks: Sequence[tuple[str, bytes]]) -> RecordBatch:
        """Return a batch with the first of these events, as the relay writes them, each with the marks."""
        topic = events[0].topic
        batch = self._producer.new_batch(topic, events[0].bucket % self._partitions[topic])
        for event in events:
            headers = [*kafka_headers(str(event.event_id), event.event_type, event.headers), *marks]
            if not batch.add((event.created_at + POSTGRES_EPOCH_US) // 1000, event.key, event.payload, headers):
                break
        return batch


async def _pages(database: Database, selection: Selection) -> AsyncIterator[Sequence[Row]]:
    """Yield the selected events, bucket by bucket, in order inside each."""
    async with database.engine.connect() as connection:
        cursors = (await connection.execute(_CURSORS)).all()
        await connection.rollback()
        for bucket, cursor in cursors:
            after = 0
            while True:
                parameters = {
                    **selection.parameters,
                    "bucket": bucket,
                    "after": after,
                    "cursor": cursor,
                    "rows": _ROWS_A_BATCH,
                    "bytes": _BYTES_A_PAGE,
                    "epoch_us": POSTGRES_EPOCH_US,
                }
                rows = [Row(*row) for row in await connection.execute(_PAGE, parameters)]
                await connection.rollback()  # no snapshot is held while Kafka is waited for
                if not rows:
                    break
                yield rows
                after = rows[-1].position


# A NULL parameter selects everything. What is parked or was discarded is not published by going round it. The keeper
# forgets what was discarded a retention after that was decided, and so more than a retention after the event was made.
_KEPT = "e.created_at >= clock_timestamp() - make_interval(secs => :hours * 3600)"
_SELECTED = f"""
    {_KEPT} AND e.created_at >= :since AND (CAST(:until AS timestamptz) IS NULL OR e.created_at < :until)
    AND (CAST(:event_type AS text) IS NULL OR e.event_type = :event_type)
    AND (CAST(:key AS bytea) IS NULL OR e.key = :key)
    AND NOT EXISTS (SELECT FROM outbox_parked k WHERE k.bucket = e.bucket AND k.position = e.position
                    AND k.outcome IS DISTINCT FROM 'published')
"""  # noqa: S608

_CURSORS = text("""
    SELECT b.bucket, cursor.position FROM outbox_bucket b
    CROSS JOIN LATERAL (SELECT max(position) AS position FROM outbox_progress WHERE bucket = b.bucket) AS cursor
    WHERE cursor.position IS NOT NULL ORDER BY b.bucket
""")

_KEPT_SINCE = text(f"SELECT min(e.created_at) FROM outbox_event e WHERE {_KEPT}")  # noqa: S608

_COUNT = text(
    f"""
    SELECT e.topic, e.event_type, count(*), min(e.created_at), max(e.created_at)
    FROM ({_CURSORS.text}) AS published JOIN outbox_event e USING (bucket)
    WHERE e.position <= published.position AND {_SELECTED}
    GROUP BY e.topic, e.event_type ORDER BY e.topic, e.event_type
"""  # noqa: S608
)

_PAGE = text(
    f"""
    SELECT e.bucket, e.position, e.event_id, e.topic, e.key, e.event_type, e.payload, CAST(e.headers AS text),
           CAST(date_part('epoch', e.created_at) * 1000000 AS bigint) - :epoch_us
    FROM (
        SELECT e.*, sum(octet_length(e.payload)) OVER (ORDER BY e.position) - octet_length(e.payload) AS bytes_before
        FROM (
            SELECT * FROM outbox_event e
            WHERE e.bucket = :bucket AND e.position > :after AND e.position <= :cursor AND {_SELECTED}
            ORDER BY e.position LIMIT :rows
        ) AS e
    ) AS e
    WHERE e.bytes_before < :bytes
    ORDER BY e.position
"""  # noqa: S608
)
