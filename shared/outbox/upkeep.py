"""Watching the backlog, and cleaning what has been published for longer than the retention."""

from __future__ import annotations

import time

import structlog
from prometheus_client import Counter, Gauge
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from shared.database import Database
from shared.lifecycle import READY, Readiness, State
from shared.outbox.admission import BacklogLimits
from shared.outbox.backlog import COUNTED, Backlog, measure_backlog
from shared.outbox.log import OutboxLog
from shared.schedule import PeriodicService

log = structlog.get_logger(__name__)

UNPUBLISHED = Gauge("outbox_unpublished_events", f"Events waiting in the outbox; a lower bound from {COUNTED} on.")
PARKED = Gauge("outbox_parked_events", "Parked events that wait for a person: refused by the broker, or behind one.")
PARKED_HEADS = Gauge("outbox_parked_heads", "Those of them that the broker refused; the others wait behind these.")
REFUSING = Gauge("outbox_backpressure", "Whether new work is refused because too much waits in the outbox (1) or not.")
OLDEST_AGE = Gauge("outbox_oldest_unpublished_age_seconds", "Age of the oldest event that waits in the outbox.")
DELETED = Counter("outbox_deleted_rows", "Rows removed after the retention.", ["table"])
KEEPER_LAG = Gauge("outbox_keeper_lag_seconds", "How much longer than the retention the oldest published row is kept.")

NO_LIMITS = BacklogLimits()

# 0x4B454550 is "KEEP".
_KEEPER_LOCK = 0x4B454550


class BacklogMonitor(PeriodicService):
    """Measures what waits in the outbox; degraded, with the reason, while events do not leave or are parked.

    Takes a database of `log.relay_database`, for the plans that the measurement needs. `limits` are those past which
    new work is refused; it counts one event further than their number.
    """

    name = "outbox-backlog"

    def __init__(
        self,
        database: Database,
        degraded_after_seconds: float,
        limits: BacklogLimits = NO_LIMITS,
        interval_seconds: float | None = None,
    ) -> None:
        if interval_seconds is None:
            interval_seconds = 2.0 if limits == NO_LIMITS else 0.5
        super().__init__(interval_seconds)
        self._outbox = OutboxLog(database)
        self._degraded_after_seconds = degraded_after_seconds
        self._limits = limits
        self._count = max(COUNTED, (limits.events or 0) + 1)
        self._stale_after_seconds = 5 * interval_seconds
        self._measured: tuple[float, Backlog] | None = None

    def latest(self) -> Backlog | None:
        """Return the last measurement, or None when it is too old to act on."""
        if self._measured is None or time.monotonic() - self._measured[0] > self._stale_after_seconds:
            return None
        return self._measured[1]

    async def do(self) -> None:
        async with self._outbox.connect() as connection:
            backlog = await measure_backlog(connection, self._count)
        self._measured = (time.monotonic(), backlog)
        UNPUBLISHED.set(backlog.events)
        OLDEST_AGE.set(backlog.oldest_age_seconds)
        PARKED.set(backlog.parked)
        PARKED_HEADS.set(backlog.refused)
        excess = self._limits.excess(backlog)
        REFUSING.set(bool(excess))
        self.readiness = self._judge(backlog, excess)

    def _judge(self, backlog: Backlog, excess: str) -> Readiness:
        if excess:
            return Readiness(
                State.DEGRADED,
                f"new orders are refused with 503: {excess}. What was accepted is safe and reading goes on; orders are "
                "taken again as soon as events leave: look at the relay and at Kafka.",
            )
        if backlog.oldest_age_seconds > self._degraded_after_seconds:
            count = f"{'at least ' if backlog.at_least else ''}{backlog.events}"
            return Readiness(
                State.DEGRADED,
                f"events do not leave the outbox: {count} wait, the oldest for {backlog.oldest_age_seconds:.0f} s. "
                "Work is accepted and nothing is lost; look at the relay and at Kafka.",
            )
        if backlog.parked:
            return Readiness(
                State.DEGRADED,
                f"{backlog.parked} events are parked: the broker refused some for good and the later ones of their "
                "keys wait behind them. Their consumers hear nothing of them meanwhile; all other keys go on. See "
                "`outbox parked list`.",
            )
        return READY


class OutboxKeeper(PeriodicService):
    """Deletes published rows older than the retention: one keeper at a time, in small chunks behind the cursor (F7)."""

    name = "outbox-keeper"

    def __init__(self, database: Database, retention_hours: float, interval_seconds: float = 60.0) -> None:
        super().__init__(interval_seconds)
        self._database = database
        self._retention_hours = retention_hours

    async def do(self) -> None:
        deleted = 1
        while deleted and not self.stopping.is_set():
            async with self._database.engine.begin() as connection:
                if not (await connection.execute(_TRY_KEEPER, {"key": _KEEPER_LOCK})).scalar_one():
                    break
                deleted = await self._clean_chunk(connection)
        async with self._database.engine.connect() as connection:
            lag = (await connection.execute(_LAG, {"hours": self._retention_hours})).scalar_one()
        KEEPER_LAG.set(max(0.0, float(lag or 0.0)))
        self.readiness = READY

    async def _clean_chunk(self, connection: AsyncConnection) -> int:
        deleted = 0
        for table, statement in _CLEANING:
            result = await connection.execute(statement, {"hours": self._retention_hours})
            DELETED.labels(table).inc(result.rowcount)
            deleted += result.rowcount
        return deleted


_TRY_KEEPER = text("SELECT pg_try_advisory_xact_lock(:key)")

# At most 50 rows a bucket and statement, from the old end. A row above its bucket's cursor is unpublished and stays,
# and so does one that is parked. Nothing that commits later has a position at or below the cursor.
_CLEAN_EVENTS = text("""
    DELETE FROM outbox_event e USING (
        SELECT old.bucket, old.position
        FROM outbox_bucket b
        CROSS JOIN LATERAL (SELECT max(position) AS position FROM outbox_progress WHERE bucket = b.bucket) AS cursor
        CROSS JOIN LATERAL (
            SELECT o.bucket, o.position, o.created_at FROM outbox_event o
            WHERE o.bucket = b.bucket AND o.position <= cursor.position
              AND NOT EXISTS (SELECT FROM outbox_parked k
                              WHERE k.bucket = o.bucket AND k.position = o.position AND k.settled_at IS NULL)
            ORDER BY o.position LIMIT 50
        ) AS old
        WHERE old.created_at < clock_timestamp() - make_interval(secs => :hours * 3600)
    ) AS chunk
    WHERE e.bucket = chunk.bucket AND e.position = chunk.position
""")

# The cursor of a bucket is max(position): the newest row always stays.
_CLEAN_PROGRESS = text("""
    DELETE FROM outbox_progress p USING (
        SELECT old.bucket, old.position
        FROM outbox_bucket b
        CROSS JOIN LATERAL (SELECT max(position) AS position FROM outbox_progress WHERE bucket = b.bucket) AS cursor
        CROSS JOIN LATERAL (
            SELECT bucket, position, published_at FROM outbox_progress
            WHERE bucket = b.bucket AND position < cursor.position ORDER BY position LIMIT 50
        ) AS old
        WHERE old.published_at < clock_timestamp() - make_interval(secs => :hours * 3600)
    ) AS chunk
    WHERE p.bucket = chunk.bucket AND p.position = chunk.position
""")

# A settled event that the cursor has not passed yet stays: until then its row here keeps the relay from sending it.
_CLEAN_PARKED = text("""
    DELETE FROM outbox_parked k USING (
        SELECT p.bucket, p.position FROM outbox_parked p
        WHERE p.settled_at < clock_timestamp() - make_interval(secs => :hours * 3600)
          AND p.position <= (SELECT max(position) FROM outbox_progress WHERE bucket = p.bucket)
        LIMIT 1000
    ) AS chunk
    WHERE k.bucket = chunk.bucket AND k.position = chunk.position
""")

_CLEANING = (
    ("outbox_event", _CLEAN_EVENTS),
    ("outbox_progress", _CLEAN_PROGRESS),
    ("outbox_parked", _CLEAN_PARKED),
)

_LAG = text("""
    SELECT extract(epoch FROM clock_timestamp() - min(oldest.created_at)) - :hours * 3600
    FROM outbox_bucket b
    CROSS JOIN LATERAL (SELECT max(position) AS position FROM outbox_progress WHERE bucket = b.bucket) AS cursor
    CROSS JOIN LATERAL (
        SELECT o.created_at FROM outbox_event o
        WHERE o.bucket = b.bucket AND o.position <= cursor.position
          AND NOT EXISTS (SELECT FROM outbox_parked k
                          WHERE k.bucket = o.bucket AND k.position = o.position AND k.settled_at IS NULL)
        ORDER BY o.position LIMIT 1
    ) AS oldest
""")
