"""Publishing again what was published already, for a consumer that was rebuilt: same ids, keys, bytes and partitions.

Healthy consumers absorb the copies as duplicates, as long as their dedup window covers them; so older events are
refused. One batch at a time, in order inside each bucket. Whatever fails, running it again is safe.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby

from sqlalchemy import text

from shared.database import Database
from shared.errors import InvalidInput, KafkaFailure, Refused
from shared.kafka.producer import IdempotentProducer
from shared.kafka.settings import KafkaSettings
from shared.outbox.building import kafka_headers
from shared.outbox.log import POSTGRES_EPOCH_US, Row
from shared.outbox.publisher import partition_count_changed
from shared.outbox.tables import BUCKETS
from shared.outbox.topics import registered_topics

_ROWS_A_BATCH = 100
_MAX_BATCH_BYTES = 900_000
_DEADLINE_SECONDS = 30.0
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


@dataclass(frozen=True, slots=True)
class Selection:
    """Which published events: created since (and until) a moment, of a type, of a key. None selects all."""

    since: datetime
    until: datetime | None = None
    event_type: str | None = None
    key: str | None = None

    @property
    def parameters(self) -> dict[str, object]:
        """Return the parameters of `_SELECTED`."""
        return {
            "since": self.since,
            "until": self.until,
            "event_type": self.event_type,
            "key": None if self.key is None else self.key.encode(),
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


def parse_moment(given: str, now: datetime) -> datetime:
    """Return the moment that an operator wrote: ISO 8601 with an offset, or a duration back from now like 3d or 12h.

    Raises InvalidInput. A time without offset is refused (field report F32).
    """
    duration = re.fullmatch(r"(\d{1,6})([smhd])", given)
    if duration:
        return now - timedelta(**{_UNITS[duration[2]]: int(duration[1])})
    try:
        moment = datetime.fromisoformat(given)
    except ValueError:
        raise InvalidInput(f"{given!r} is no time; write 2026-11-30T12:00:00Z, or a duration like 12h or 3d") from None
    if moment.tzinfo is None:
        raise InvalidInput(f"{given!r} has no offset from UTC; write {given}Z or {given}+01:00")
    return moment


def refuse_outside_window(since: datetime, window_days: int, now: datetime) -> None:
    """Raise Refused when consumers may have forgotten events of that age: they would take them for new ones."""
    earliest = now - timedelta(days=window_days - 1)
    if since < earliest:
        raise Refused(
            f"events since {since:%Y-%m-%d %H:%M}Z are older than what consumers remember ({window_days} days, less "
            "one to be safe): healthy groups would not know them as duplicates. Say --since "
            f"{earliest:%Y-%m-%dT%H:%M}Z or later; if every group that reads these topics remembers more, set "
            "…_CONSUMERS_DEDUP_WINDOW_DAYS to the least of them"
        )


async def plan(database: Database, selection: Selection) -> Plan:
    """Count what the selection has, and tell what is still kept."""
    async with database.engine.connect() as connection:
        counts = [Count(*row) for row in await connection.execute(_COUNT, selection.parameters)]
        kept_since = (await connection.execute(_KEPT_SINCE)).scalar_one()
    return Plan(counts, kept_since)


class Pace:
    """At most so many events a second, on average since the beginning."""

    def __init__(
        self,
        events_per_second: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._rate, self._clock, self._sleep = events_per_second, clock, sleep
        self._began: float | None = None
        self._sent = 0

    async def admit(self, events: int) -> None:
        """Return when so many more events may be sent."""
        now = self._clock()
        if self._began is None:
            self._began = now
        due = self._began + self._sent / self._rate
        if due > now:
            await self._sleep(due - now)
        self._sent += events


async def republish(
    database: Database, kafka: KafkaSettings, selection: Selection, pace: Pace, on_progress: Callable[[int], None]
) -> int:
    """Publish the selection again and return how many events that were.

    Only what was published before this began, and nothing that is parked or was discarded. Raises KafkaFailure or
    Refused; what was sent until then is told by `on_progress` and harms nobody when it is sent again.
    """
    partitions = await registered_topics(database)
    producer = IdempotentProducer(kafka, max_batch_bytes=_MAX_BATCH_BYTES, max_request_bytes=1_048_576)
    sent = 0
    try:
        await producer.start(_DEADLINE_SECONDS)
        for topic, registered in partitions.items():
            found = await producer.partition_count(topic, _DEADLINE_SECONDS)
            if found != registered:
                raise Refused(partition_count_changed(topic, registered, found))
        async for rows in _pages(database, selection):
            for topic, run in groupby(rows, key=lambda row: row.topic):
                events = list(run)
                await pace.admit(len(events))
                await _send(producer, topic, events[0].bucket % partitions[topic], events)
                sent += len(events)
                on_progress(sent)
    finally:
        await producer.abandon()
    return sent


async def _pages(database: Database, selection: Selection) -> AsyncIterator[Sequence[Row]]:
    """Yield the selected events, bucket by bucket, in order inside each."""
    async with database.engine.connect() as connection:
        cursors = {row.bucket: row.position for row in await connection.execute(_CURSORS)}
        await connection.rollback()
        for bucket in range(BUCKETS):
            after = 0
            while True:
                parameters = {
                    **selection.parameters,
                    "bucket": bucket,
                    "after": after,
                    "cursor": cursors.get(bucket, 0),
                    "rows": _ROWS_A_BATCH,
                    "epoch_us": POSTGRES_EPOCH_US,
                }
                rows = [Row(*row) for row in await connection.execute(_PAGE, parameters)]
                await connection.rollback()  # no snapshot is held while Kafka is waited for
                if not rows:
                    break
                yield rows
                after = rows[-1].position


async def _send(producer: IdempotentProducer, topic: str, partition: int, events: Sequence[Row]) -> None:
    """Send events of one partition, each batch acknowledged before the next."""
    waiting = list(events)
    while waiting:
        batch = producer.new_batch(topic, partition)
        taken = 0
        for event in waiting:
            headers = kafka_headers(str(event.event_id), event.event_type, event.headers)
            if not batch.add((event.created_at + POSTGRES_EPOCH_US) // 1000, event.key, event.payload, headers):
                break
            taken += 1
        if not taken:
            raise KafkaFailure(f"event {waiting[0].event_id} fits into no batch of {topic}", permanent=True)
        handed_over = await producer.hand_over(batch, _DEADLINE_SECONDS)
        await producer.acknowledged(handed_over, _DEADLINE_SECONDS)
        del waiting[:taken]


# A NULL parameter selects everything. What is parked or was discarded is not published by going round it.
_SELECTED = """
    e.created_at >= :since AND (CAST(:until AS timestamptz) IS NULL OR e.created_at < :until)
    AND (CAST(:event_type AS text) IS NULL OR e.event_type = :event_type)
    AND (CAST(:key AS bytea) IS NULL OR e.key = :key)
    AND NOT EXISTS (SELECT FROM outbox_parked k WHERE k.bucket = e.bucket AND k.position = e.position
                    AND k.outcome IS DISTINCT FROM 'published')
"""

_CURSORS = text("SELECT bucket, max(position) AS position FROM outbox_progress GROUP BY bucket")

_KEPT_SINCE = text("SELECT min(created_at) FROM outbox_event")

_COUNT = text(
    f"""
    SELECT e.topic, e.event_type, count(*), min(e.created_at), max(e.created_at) FROM outbox_event e
    WHERE e.position <= (SELECT max(p.position) FROM outbox_progress p WHERE p.bucket = e.bucket) AND {_SELECTED}
    GROUP BY e.topic, e.event_type ORDER BY e.topic, e.event_type
"""  # noqa: S608
)

_PAGE = text(
    f"""
    SELECT e.bucket, e.position, e.event_id, e.topic, e.key, e.event_type, e.payload, CAST(e.headers AS text),
           CAST(date_part('epoch', e.created_at) * 1000000 AS bigint) - :epoch_us
    FROM outbox_event e
    WHERE e.bucket = :bucket AND e.position > :after AND e.position <= :cursor AND {_SELECTED}
    ORDER BY e.position LIMIT :rows
"""  # noqa: S608
)
