"""Parking: what the broker refuses for good steps aside, with every later event of its key, so that the rest goes on.

A key is blocked while it has unsettled rows in `outbox_parked`. Its later events are copied there too, in order, and
only then passed over, so a crash in between repeats the copy. Releasing is a flag that an operator sets (F12, F13);
the bucket's owner then publishes all that is parked of the key before it publishes anything newer of it. All writes
here check the lease's owner and epoch, like progress.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from uuid import UUID

import structlog
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from shared.outbox.log import POSTGRES_EPOCH_US, Row

log = structlog.get_logger(__name__)

Place = tuple[str, int]
"""A topic and a partition."""


@dataclass(slots=True)
class Suspicion:
    """Part of a partition's events in which a refused one hides: batches have at most `records` until it is passed."""

    records: int
    size_bytes: int
    until: dict[int, int]
    guilty_found: bool = False


@dataclass(slots=True)
class Suspects:
    """Finds the one record for which a batch is refused, by sending ever smaller batches. Outlives producers.

    When no single record turns out to be at fault, the batch as a whole was too large for its topic, and what the topic
    takes is remembered. Every hour twice as much is tried, for the topic's limit may have been raised meanwhile.
    """

    clock: Callable[[], float] = time.monotonic
    _learned: dict[str, tuple[int, float]] = field(default_factory=dict)
    _suspicions: dict[Place, Suspicion] = field(default_factory=dict)

    def batch_bytes(self, topic: str) -> int | None:
        """Return how many bytes a batch for the topic may have; None when no limit is known."""
        if topic not in self._learned:
            return None
        size, learned_at = self._learned[topic]
        if self.clock() - learned_at > _TRY_MORE_SECONDS:
            size *= 2
            if size > _MOST_BATCH_BYTES:
                del self._learned[topic]
                return None
            self._learned[topic] = size, self.clock()
        return size

    def most_records(self, place: Place) -> int | None:
        """Return how many records a batch of the partition may have; None when there is no suspicion."""
        suspicion = self._suspicions.get(place)
        return suspicion.records if suspicion else None

    def refused(self, place: Place, until: Mapping[int, int], records: int, size_bytes: int) -> None:
        """Note that a batch was refused whose events reach up to these positions of these buckets."""
        known = self._suspicions.get(place)
        if known is None:
            self._suspicions[place] = Suspicion(max(1, records // 2), size_bytes, dict(until), records <= 1)
            return
        known.records = max(1, records // 2)
        known.size_bytes = min(known.size_bytes, size_bytes)
        known.guilty_found |= records <= 1
        for bucket, position in until.items():
            known.until[bucket] = max(position, known.until.get(bucket, 0))

    def acknowledged(self, place: Place, until: Mapping[int, int]) -> None:
        """Note that a batch was taken; the suspicion ends when everything under it was."""
        suspicion = self._suspicions.get(place)
        if suspicion is not None:
            self._pass(place, suspicion, [b for b, position in until.items() if position >= suspicion.until.get(b, 0)])

    def parked(self, bucket: int, position: int) -> None:
        """Note that an event stepped aside."""
        for place, suspicion in list(self._suspicions.items()):
            if position >= suspicion.until.get(bucket, position + 1):
                self._pass(place, suspicion, [bucket])

    def passed_over(self, bucket: int, position: int) -> None:
        """Note that nothing up to here is left to be built, and that some of it is not sent at all but set aside."""
        for suspicion in self._suspicions.values():
            if position >= suspicion.until.get(bucket, position + 1):
                suspicion.guilty_found = True  # nobody can tell any more
        self.parked(bucket, position)

    def forget(self, buckets: Collection[int]) -> None:
        """Drop what concerns buckets that are no longer ours."""
        for place, suspicion in list(self._suspicions.items()):
            if not suspicion.until.keys().isdisjoint(buckets):
                suspicion.guilty_found = True  # nobody can tell any more
                self._pass(place, suspicion, buckets)

    def _pass(self, place: Place, suspicion: Suspicion, buckets: Collection[int]) -> None:
        for bucket in buckets:
            suspicion.until.pop(bucket, None)
        if not suspicion.until:
            del self._suspicions[place]
            if not suspicion.guilty_found:
                size = max(_LEAST_BATCH_BYTES, suspicion.size_bytes // 2)
                self._learned[place[0]] = size, self.clock()
                log.warning(
                    "relay.batches_made_smaller",
                    topic=place[0],
                    bytes=size,
                    meaning="the topic takes no larger ones (its max.message.bytes); no event is at fault",
                )


_LEAST_BATCH_BYTES, _MOST_BATCH_BYTES = 1_024, 1_048_576
_TRY_MORE_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class RefusedEvent:
    """An event that the broker refuses for good, alone in its batch."""

    bucket: int
    position: int
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Aside:
    """What is not to be sent from the log: events of blocked keys, and events settled before their progress was."""

    blocked: Mapping[int, set[bytes]]
    settled: set[tuple[int, int]]


async def read_aside(connection: AsyncConnection, cursors: Mapping[int, int]) -> Aside:
    """Return what stands aside in these buckets, which are sent from behind these positions."""
    blocked: defaultdict[int, set[bytes]] = defaultdict(set)
    for row in await connection.execute(_BLOCKED, {"buckets": list(cursors)}):
        blocked[row.bucket].add(row.key)
    parameters = {"buckets": list(cursors), "cursors": list(cursors.values())}
    settled = await connection.execute(_SETTLED_AHEAD, parameters)
    return Aside(dict(blocked), {(row.bucket, row.position) for row in settled})


async def park_behind(
    connection: AsyncConnection, owner: UUID, waiting: Sequence[tuple[int, int, int]], reason: str
) -> set[int]:
    """Copy events `(bucket, epoch, position)` of blocked keys behind what is parked of them; return the buckets owned.

    A bucket that is not returned belongs to another relay, and nothing of it was parked.
    """
    buckets, epochs, positions = zip(*sorted(waiting), strict=True)
    rows = await connection.execute(
        _PARK,
        {
            "owner": owner,
            "buckets": list(buckets),
            "epochs": list(epochs),
            "positions": list(positions),
            "reason": reason,
            "refused": False,
        },
    )
    return set(rows.scalars())


async def park_refused(connection: AsyncConnection, owner: UUID, event: RefusedEvent) -> bool:
    """Park a refused event, or park it again when it was released; tell whether the lease still allowed it."""
    parameters = {
        "owner": owner,
        "buckets": [event.bucket],
        "epochs": [event.epoch],
        "positions": [event.position],
        "reason": event.reason,
        "refused": True,
    }
    owned = (await connection.execute(_PARK, parameters)).scalars().all()
    if owned:
        await connection.execute(
            _PARK_AGAIN,
            {
                "owner": owner,
                "bucket": event.bucket,
                "epoch": event.epoch,
                "position": event.position,
                "reason": event.reason,
            },
        )
    return bool(owned)


async def refused_waiting(connection: AsyncConnection) -> int:
    """Return how many refused events are parked: when that grows without end, the topic is at fault and not they."""
    return int((await connection.execute(_REFUSED_WAITING)).scalar_one())


@dataclass(frozen=True, slots=True)
class Released:
    """Parked events of released keys, in order, and those of the keys of which nothing else is parked."""

    events: Sequence[Row]
    whole_keys: set[tuple[int, bytes]]


async def read_released(connection: AsyncConnection, buckets: Collection[int], most_bytes: int) -> Released:
    """Return what is to be published of the released keys of these buckets, up to so many payload bytes."""
    found = (
        await connection.execute(
            _RELEASED, {"buckets": list(buckets), "bytes": most_bytes, "epoch_us": POSTGRES_EPOCH_US}
        )
    ).all()
    events = [Row(*row[:-1]) for row in found]
    read = Counter((event.bucket, event.key) for event in events)
    of_key = {(row.bucket, row.key): row.of_key for row in found}
    return Released(events, {key for key, count in read.items() if count == of_key[key]})


async def settle_published(connection: AsyncConnection, owner: UUID, published: Sequence[tuple[int, int, int]]) -> None:
    """Record that released events `(bucket, epoch, position)` were acknowledged."""
    buckets, epochs, positions = zip(*sorted(published), strict=True)
    await connection.execute(
        _SETTLE,
        {"owner": owner, "buckets": list(buckets), "epochs": list(epochs), "positions": list(positions)},
    )


# The lease rows are locked until the statement ends: a new owner waits for it. No value stands in these texts.
_OWNED = """
    given AS (
        SELECT * FROM unnest(CAST(:buckets AS smallint[]), CAST(:epochs AS bigint[]), CAST(:positions AS bigint[]))
                      AS g (bucket, epoch, position)
    ), owned AS (
        SELECT b.bucket FROM outbox_bucket b
        WHERE b.lease_owner = :owner
          AND EXISTS (SELECT FROM given g WHERE g.bucket = b.bucket AND g.epoch = b.lease_epoch)
        ORDER BY b.bucket FOR SHARE OF b
    )
"""

_PARK = text(
    f"""
    WITH {_OWNED}, parked AS (
        INSERT INTO outbox_parked
               (bucket, position, event_id, topic, key, event_type, payload, headers, created_at, reason, refused)
        SELECT e.bucket, e.position, e.event_id, e.topic, e.key, e.event_type, e.payload, e.headers, e.created_at,
               :reason, :refused
        FROM given g JOIN owned USING (bucket)
        CROSS JOIN LATERAL (
            SELECT * FROM outbox_event
            WHERE outbox_event.bucket = g.bucket AND outbox_event.position = g.position LIMIT 1
        ) AS e
        ON CONFLICT (bucket, position) DO NOTHING
    )
    SELECT bucket FROM owned
"""  # noqa: S608
)

_PARK_AGAIN = text("""
    WITH owned AS (
        SELECT bucket FROM outbox_bucket
        WHERE bucket = :bucket AND lease_owner = :owner AND lease_epoch = :epoch FOR SHARE
    ), event AS (
        SELECT p.bucket, p.key FROM outbox_parked p JOIN owned USING (bucket) WHERE p.position = :position
    ), locked AS (
        SELECT p.bucket, p.position FROM outbox_parked p JOIN event USING (bucket, key)
        WHERE p.settled_at IS NULL
        ORDER BY p.position FOR UPDATE OF p  -- as operators' commands do, or the two could deadlock
    )
    UPDATE outbox_parked p
    SET released_at = NULL, released_by = NULL,
        refused = p.refused OR p.position = :position,
        reason = CASE WHEN p.position = :position THEN :reason ELSE p.reason END
    FROM locked
    WHERE p.bucket = locked.bucket AND p.position = locked.position
""")

_BLOCKED = text("""
    SELECT DISTINCT bucket, key FROM outbox_parked
    WHERE settled_at IS NULL AND bucket = ANY (CAST(:buckets AS smallint[]))
""")

_SETTLED_AHEAD = text("""
    SELECT p.bucket, p.position
    FROM unnest(CAST(:buckets AS smallint[]), CAST(:cursors AS bigint[])) AS c (bucket, position)
    JOIN outbox_parked p ON p.bucket = c.bucket AND p.position > c.position
    WHERE p.settled_at IS NOT NULL
""")

_REFUSED_WAITING = text("SELECT count(*) FROM outbox_parked WHERE settled_at IS NULL AND refused")

# Each step is linear in what is parked, whatever the statistics say: no join of the rows with themselves, and each
# row that is due is looked up in the index.
_RELEASED = text("""
    SELECT p.bucket, p.position, p.event_id, p.topic, p.key, p.event_type, p.payload, CAST(p.headers AS text),
           CAST(date_part('epoch', p.created_at) * 1000000 AS bigint) - :epoch_us, due.of_key
    FROM (
        SELECT bucket, position, of_key, sum(bytes) OVER (ORDER BY bucket, position) - bytes AS bytes_before
        FROM (
            SELECT bucket, position, octet_length(payload) AS bytes, count(*) OVER of_key AS of_key,
                   bool_or(released_at IS NOT NULL) OVER of_key AS released
            FROM outbox_parked
            WHERE settled_at IS NULL AND bucket = ANY (CAST(:buckets AS smallint[]))
            WINDOW of_key AS (PARTITION BY bucket, key)
        ) AS waiting
        WHERE released
    ) AS due
    CROSS JOIN LATERAL (
        SELECT * FROM outbox_parked
        WHERE outbox_parked.bucket = due.bucket AND outbox_parked.position = due.position LIMIT 1
    ) AS p
    WHERE due.bytes_before < :bytes
    ORDER BY p.bucket, p.position
""")

_SETTLE = text(
    f"""
    WITH {_OWNED}, locked AS (
        SELECT p.place
        FROM (SELECT g.* FROM given g JOIN owned USING (bucket) ORDER BY g.bucket, g.position) AS due
        CROSS JOIN LATERAL (
            SELECT ctid AS place FROM outbox_parked
            WHERE outbox_parked.bucket = due.bucket AND outbox_parked.position = due.position AND settled_at IS NULL
            LIMIT 1 FOR UPDATE  -- in order, as operators' commands do, or the two could deadlock
        ) AS p
    )
    UPDATE outbox_parked p SET settled_at = clock_timestamp(), outcome = 'published', settled_by = 'relay'
    FROM locked WHERE p.ctid = locked.place
"""  # noqa: S608
)
