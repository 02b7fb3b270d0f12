"""What an operator sees of parked events, and decides: release a key after a mend, or give one event up for ever.

Operators and the relay act at once. Rows are locked in (bucket, position) order, and what a decision stands on is
looked at again under the lock, so a race ends in a clear answer and not in both.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Row, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncTransaction

from shared.database import Database
from shared.errors import NotFound, Refused, Unavailable, sqlstate

_ROWS_HELD = frozenset({"55P03", "40P01"})  # lock_not_available (lock_timeout), deadlock_detected


@dataclass(frozen=True, slots=True)
class ParkedEvent:
    """A parked event. `refused` tells whether the broker refused it, or it waits behind one of its key."""

    event_id: UUID
    topic: str
    key: str
    event_type: str
    refused: bool
    reason: str
    parked_at: datetime
    released_at: datetime | None
    released_by: str | None

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            name: str(value) if isinstance(value, UUID | datetime) else value for name, value in asdict(self).items()
        }


@dataclass(frozen=True, slots=True)
class ParkedDetails:
    """Everything about a parked event, its end included."""

    event: ParkedEvent
    created_at: datetime
    headers: Mapping[str, str]
    size_bytes: int
    outcome: str | None
    settled_at: datetime | None
    settled_by: str | None
    note: str | None
    payload: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ParkedSummary:
    """How much is parked and waits for a person or for the relay."""

    keys: int
    refused: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Selection:
    """Which parked events: of a topic, and with a text in the reason. Empty selects all."""

    topic: str | None = None
    reason_contains: str | None = None

    @property
    def parameters(self) -> dict[str, str | None]:
        """Return the parameters of `_SELECTED`."""
        return {"topic": self.topic, "reason": self.reason_contains}


async def list_parked(database: Database, selection: Selection, limit: int) -> Sequence[ParkedEvent]:
    """Return parked events that are not settled, in the order in which they would be published."""
    async with database.engine.connect() as connection:
        rows = await connection.execute(_LIST, {**selection.parameters, "limit": limit})
        return [_event(row) for row in rows]


async def summarize(database: Database, selection: Selection) -> ParkedSummary:
    """Return how much of the selection is parked."""
    async with database.engine.connect() as connection:
        row = (await connection.execute(_SUMMARY, selection.parameters)).one()
        return ParkedSummary(row.keys, row.refused, row.waiting)


async def show_parked(database: Database, event_id: UUID) -> ParkedDetails:
    """Return one parked event, settled or not. Raises NotFound."""
    async with database.engine.connect() as connection:
        row = (await connection.execute(_SHOW, {"event_id": event_id})).one_or_none()
    if row is None:
        raise NotFound(_unknown(event_id))
    return ParkedDetails(
        event=_event(row),
        created_at=row.created_at,
        headers=row.headers,
        size_bytes=len(row.payload),
        outcome=row.outcome,
        settled_at=row.settled_at,
        settled_by=row.settled_by,
        note=row.note,
        payload=bytes(row.payload),
    )


async def release_key_of(database: Database, event_id: UUID, by: str, channel: str, *, dry_run: bool) -> int:
    """Release everything parked of the event's key; return how many events will be published, in order.

    Raises NotFound, and Refused when the event was settled already.
    """
    async with _deciding(database) as (connection, transaction):
        row = await _locked(connection, event_id)
        released = await connection.execute(_RELEASE_KEY, {"bucket": row.bucket, "key": row.key, "by": by})
        await _finish(transaction, connection, channel, dry_run=dry_run)
        return released.rowcount


async def release_all(database: Database, selection: Selection, by: str, channel: str, *, dry_run: bool) -> int:
    """Release every key that has a parked event of the selection; return how many events will be published."""
    async with _deciding(database) as (connection, transaction):
        await connection.execute(_LOCK_SELECTED, selection.parameters)
        released = await connection.execute(_RELEASE_SELECTED, {**selection.parameters, "by": by})
        await _finish(transaction, connection, channel, dry_run=dry_run)
        return released.rowcount


async def discard(database: Database, event_id: UUID, by: str, reason: str, *, dry_run: bool) -> int:
    """Give an event up for ever; return how many other events of its key still wait.

    Raises NotFound, and Refused when it was settled already or is released, for then the relay may be sending it.
    """
    async with _deciding(database) as (connection, transaction):
        row = await _locked(connection, event_id)
        if row.released:
            raise Refused(
                f"event {event_id} is released and the relay may be sending it: it cannot be discarded now. If the "
                "broker refuses it again it is parked again; discard it then"
            )
        await connection.execute(_DISCARD, {"event_id": event_id, "by": by, "note": reason})
        left = await connection.execute(_LEFT, {"bucket": row.bucket, "key": row.key})
        count = int(left.scalar_one())
        if dry_run:
            await transaction.rollback()
        return count


@asynccontextmanager
async def _deciding(database: Database) -> AsyncIterator[tuple[AsyncConnection, AsyncTransaction]]:
    """Open a decision's transaction. Raises Unavailable when it lost against another one that held the rows."""
    try:
        async with database.engine.connect() as connection, connection.begin() as transaction:
            yield connection, transaction
    except DBAPIError as error:
        if sqlstate(error) not in _ROWS_HELD:
            raise
        raise Unavailable(
            "another operator or the relay holds these events and did not let go of them in time: nothing was "
            "changed. Run the same command again"
        ) from error


async def _locked(connection: AsyncConnection, event_id: UUID) -> Row[Any]:
    """Lock what is parked of the event's key and return the event's own row."""
    place = (await connection.execute(_PLACE, {"event_id": event_id})).one_or_none()
    if place is None:
        raise NotFound(_unknown(event_id))
    await connection.execute(_LOCK_KEY, {"bucket": place.bucket, "key": place.key})
    row = (await connection.execute(_STATE, {"event_id": event_id})).one_or_none()
    if row is None:
        raise NotFound(_unknown(event_id))
    if row.outcome is not None:
        raise Refused(
            f"event {event_id} was {row.outcome} already, by {row.settled_by} at {row.settled_at:%Y-%m-%d %H:%M}Z"
        )
    return row


async def _finish(transaction: AsyncTransaction, connection: AsyncConnection, channel: str, *, dry_run: bool) -> None:
    """Wake the relay with the commit: an operator's transaction is rare, so its NOTIFY serialises nobody."""
    if dry_run:
        await transaction.rollback()
    else:
        await connection.execute(text("SELECT pg_notify(:channel, '')"), {"channel": channel})
        await transaction.commit()


def _event(row: Row[Any]) -> ParkedEvent:
    return ParkedEvent(
        event_id=row.event_id,
        topic=row.topic,
        key=bytes(row.key).decode(errors="replace"),
        event_type=row.event_type,
        refused=row.refused,
        reason=row.reason,
        parked_at=row.parked_at,
        released_at=row.released_at,
        released_by=row.released_by,
    )


def _unknown(event_id: UUID) -> str:
    return f"no event {event_id} is parked; `outbox parked list` tells what is"


# A NULL parameter selects everything. No value stands in these texts.
_SELECTED = """
    settled_at IS NULL AND (CAST(:topic AS text) IS NULL OR topic = :topic)
    AND (CAST(:reason AS text) IS NULL OR strpos(lower(reason), lower(:reason)) > 0)
"""
_KEYS = f"SELECT bucket, key FROM outbox_parked WHERE {_SELECTED}"  # noqa: S608

_LIST = text(f"SELECT * FROM outbox_parked WHERE {_SELECTED} ORDER BY bucket, position LIMIT :limit")  # noqa: S608
_SUMMARY = text(
    f"""
    SELECT count(DISTINCT (bucket, key)) AS keys, count(*) FILTER (WHERE refused) AS refused,
           count(*) FILTER (WHERE NOT refused) AS waiting
    FROM outbox_parked WHERE {_SELECTED}
"""  # noqa: S608
)
_SHOW = text("SELECT * FROM outbox_parked WHERE event_id = :event_id")
_PLACE = text("SELECT bucket, key FROM outbox_parked WHERE event_id = :event_id")
_LOCK_KEY = text("""
    SELECT FROM outbox_parked WHERE bucket = :bucket AND key = :key AND settled_at IS NULL
    ORDER BY bucket, position FOR UPDATE
""")
# Release is a property of the key: whatever the flag of one row says holds for all of them.
_STATE = text("""
    SELECT p.bucket, p.key, p.outcome, p.settled_by, p.settled_at,
           EXISTS (SELECT FROM outbox_parked r WHERE r.bucket = p.bucket AND r.key = p.key
                   AND r.settled_at IS NULL AND r.released_at IS NOT NULL) AS released
    FROM outbox_parked p WHERE p.event_id = :event_id
""")
# Who released first stays on record.
_RELEASE_KEY = text("""
    UPDATE outbox_parked
    SET released_at = coalesce(released_at, clock_timestamp()), released_by = coalesce(released_by, :by)
    WHERE bucket = :bucket AND key = :key AND settled_at IS NULL
""")
_LOCK_SELECTED = text(
    "SELECT FROM outbox_parked "
    f"WHERE (bucket, key) IN ({_KEYS}) AND settled_at IS NULL ORDER BY bucket, position FOR UPDATE"
)
_RELEASE_SELECTED = text(
    f"""
    UPDATE outbox_parked
    SET released_at = coalesce(released_at, clock_timestamp()), released_by = coalesce(released_by, :by)
    WHERE (bucket, key) IN ({_KEYS}) AND settled_at IS NULL
"""  # noqa: S608
)
_DISCARD = text("""
    UPDATE outbox_parked
    SET settled_at = clock_timestamp(), outcome = 'discarded', settled_by = :by, note = :note
    WHERE event_id = :event_id
""")
_LEFT = text("SELECT count(*) FROM outbox_parked WHERE bucket = :bucket AND key = :key AND settled_at IS NULL")
