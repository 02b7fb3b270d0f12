"""Keeps the daily partitions of `processed_event` (made ahead, dropped past the dedup window), and the tally and the
settled dead letters short.

A partition is made as a plain table and attached, and detached concurrently before it is dropped, so consumers never
wait for an exclusive lock on the parent. There is no default partition, and below `dedup_floor`, which only rises,
nothing is ever made again: what a dropped partition knew must not look new.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime, time, timedelta
from uuid import UUID

import structlog
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from shared.database import Database
from shared.identifiers import lowest_id_at
from shared.lifecycle import READY
from shared.schedule import PeriodicService

log = structlog.get_logger(__name__)

DAYS_AHEAD = 7
"""Days with a partition made ahead. More than the day that an event id may lie in the future (batch.py)."""

_LOCK = "x'494E42'::integer"  # "INB"
_MAKE, _DROP, _FOLD, _DELETE = 1, 2, 3, 4
_FOLDED_AT_ONCE = 10_000
_DELETED_AT_ONCE = 500  # letters, with their payloads
_NAME = re.compile(r"processed_event_p(\d{4})(\d{2})(\d{2})", re.ASCII)


async def ensure_partitions(
    database: Database, *, window_days: int, days_ahead: int = DAYS_AHEAD, now: datetime | None = None
) -> None:
    """Raise the floor to the window's first day and make every missing partition from there to `days_ahead`.

    Safe to run in several processes and at any time. `now` is the database's clock unless given.
    """
    async with database.engine.begin() as connection:
        await connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK}, {_MAKE})"))
        today = (now or await _database_time(connection)).astimezone(UTC).date()
        floor = await _raise_floor(connection, _lowest(today - timedelta(days=window_days)))
        attached = await _attached(connection)
        made: list[str] = []
        day = today - timedelta(days=window_days)
        while day <= today + timedelta(days=days_ahead):
            if _lowest(day) >= floor and _name(day) not in attached:
                await _attach(connection, day)
                made.append(_name(day))
            day += timedelta(days=1)
    if made:
        log.info("inbox.partitions_made", count=len(made), first=made[0], last=made[-1])


async def drop_expired_partitions(database: Database) -> list[str]:
    """Drop the partitions that lie wholly below the floor, one keeper at a time; return their names.

    Takes up what an interrupted run left: a detach that is pending is finished, a detached partition dropped. Raises
    what `errors.is_transient` understands when an old transaction still uses a partition; the next run goes on.
    """
    dropped: list[str] = []
    async with _keeper(database, _DROP) as connection:
        if connection is None:
            return dropped
        floor = await _floor(connection)
        for name, attached, pending in await _partition_tables(connection):
            day = _day(name)
            if day is None or _lowest(day + timedelta(days=1)) > floor:
                continue
            if pending:
                await connection.execute(text(f"ALTER TABLE processed_event DETACH PARTITION {name} FINALIZE"))
            elif attached:
                await connection.execute(text(f"ALTER TABLE processed_event DETACH PARTITION {name} CONCURRENTLY"))
            await connection.execute(text(f"DROP TABLE {name}"))
            dropped.append(name)
            log.info("inbox.partition_dropped", partition=name)
    return dropped


async def fold_tally(database: Database) -> None:
    """Replace the tally's rows by their sums, one keeper at a time. Every reader sees the same sums throughout.

    Rows of batches that commit meanwhile wait for the next time.
    """
    async with _keeper(database, _FOLD) as connection:
        if connection is None:
            return
        newest = (await connection.execute(text("SELECT max(tally_id) FROM inbox_tally"))).scalar_one()
        folded = _FOLDED_AT_ONCE
        while newest is not None and folded == _FOLDED_AT_ONCE:
            result = await connection.execute(_FOLD_ROWS, {"newest": newest, "most": _FOLDED_AT_ONCE})
            folded = int(result.scalar_one())


async def delete_settled_letters(database: Database, retention_days: int) -> int:
    """Delete letters that were settled so many days ago, in chunks, one keeper at a time; return how many."""
    deleted = 0
    async with _keeper(database, _DELETE) as connection:
        chunk = 0 if connection is None else _DELETED_AT_ONCE
        while connection is not None and chunk == _DELETED_AT_ONCE:
            result = await connection.execute(_DELETE_LETTERS, {"days": retention_days, "most": _DELETED_AT_ONCE})
            chunk = result.rowcount
            deleted += chunk
    return deleted


class InboxUpkeep(PeriodicService):
    """Does all of it every `interval_seconds`. Several processes may have one: whoever comes first does the work."""

    name = "inbox-upkeep"
    stop_deadline_seconds = 25.0

    def __init__(
        self,
        database: Database,
        *,
        window_days: int,
        days_ahead: int = DAYS_AHEAD,
        letter_retention_days: int = 90,
        interval_seconds: float = 300.0,
    ) -> None:
        super().__init__(interval_seconds)
        self._database = database
        self._window_days = window_days
        self._days_ahead = days_ahead
        self._letter_retention_days = letter_retention_days

    async def do(self) -> None:
        await ensure_partitions(self._database, window_days=self._window_days, days_ahead=self._days_ahead)
        await drop_expired_partitions(self._database)
        await fold_tally(self._database)
        await delete_settled_letters(self._database, self._letter_retention_days)
        self.readiness = READY


async def _database_time(connection: AsyncConnection) -> datetime:
    moment: datetime = (await connection.execute(text("SELECT now()"))).scalar_one()
    return moment


async def _raise_floor(connection: AsyncConnection, lowest: UUID) -> UUID:
    await connection.execute(
        text("UPDATE dedup_floor SET event_id = :lowest WHERE event_id < :lowest"), {"lowest": lowest}
    )
    return await _floor(connection)


async def _floor(connection: AsyncConnection) -> UUID:
    return UUID(str((await connection.execute(text("SELECT event_id FROM dedup_floor"))).scalar_one()))


async def _attached(connection: AsyncConnection) -> set[str]:
    return {name for name, attached, _ in await _partition_tables(connection) if attached}


async def _partition_tables(connection: AsyncConnection) -> list[tuple[str, bool, bool]]:
    """Return name, attached, detach pending of every table beside `processed_event` that is named as a partition."""
    rows = await connection.execute(
        text("""
            SELECT c.relname, i.inhrelid IS NOT NULL, coalesce(i.inhdetachpending, false)
            FROM pg_class AS parent
            JOIN pg_class AS c ON c.relnamespace = parent.relnamespace
            LEFT JOIN pg_inherits AS i ON i.inhrelid = c.oid AND i.inhparent = parent.oid
            WHERE parent.oid = 'processed_event'::regclass
              AND c.relkind = 'r' AND c.relname ~ '^processed_event_p[0-9]{8}$'
            ORDER BY c.relname
        """)
    )
    return [(str(name), bool(attached), bool(pending)) for name, attached, pending in rows]


async def _attach(connection: AsyncConnection, day: date) -> None:
    name = _name(day)
    await connection.execute(
        text(
            f"CREATE TABLE IF NOT EXISTS {name} "
            "(LIKE processed_event INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING INDEXES INCLUDING COMMENTS)"
        )
    )
    await connection.execute(
        text(
            f"ALTER TABLE processed_event ATTACH PARTITION {name} "
            f"FOR VALUES FROM ('{_lowest(day)}') TO ('{_lowest(day + timedelta(days=1))}')"
        )
    )


@asynccontextmanager
async def _keeper(database: Database, task: int) -> AsyncIterator[AsyncConnection | None]:
    """Yield an autocommit connection that holds the task's lock, or None when another process holds it."""
    async with database.engine.connect() as pooled:
        connection = await pooled.execution_options(isolation_level="AUTOCOMMIT")
        if not (await connection.execute(text(f"SELECT pg_try_advisory_lock({_LOCK}, {task})"))).scalar_one():
            yield None
            return
        try:
            yield connection
        finally:
            if not connection.invalidated:
                await connection.execute(text(f"SELECT pg_advisory_unlock({_LOCK}, {task})"))


def _lowest(day: date) -> UUID:
    return lowest_id_at(datetime.combine(day, time(), UTC))


def _name(day: date) -> str:
    return f"processed_event_p{day:%Y%m%d}"


def _day(name: str) -> date | None:
    match = _NAME.fullmatch(name)
    try:
        return None if match is None else date(*map(int, match.groups()))
    except ValueError:
        return None


_DELETE_LETTERS = text("""
    DELETE FROM dead_letter WHERE letter_id IN (
        SELECT letter_id FROM dead_letter
        WHERE status <> 'open' AND settled_at < clock_timestamp() - make_interval(days => :days) LIMIT :most
    )
""")

_FOLD_ROWS = text("""
    WITH taken AS (
        DELETE FROM inbox_tally
        WHERE tally_id IN (SELECT tally_id FROM inbox_tally WHERE tally_id <= :newest ORDER BY tally_id LIMIT :most)
        RETURNING consumer_group, handled, duplicates, dead, outside_window
    ), summed AS (
        INSERT INTO inbox_tally (consumer_group, handled, duplicates, dead, outside_window)
        SELECT consumer_group, sum(handled), sum(duplicates), sum(dead), sum(outside_window)
        FROM taken GROUP BY consumer_group
    )
    SELECT count(*) FROM taken
""")
