"""Reading the outbox as a log, and writing how far each bucket was published. Every query of the relay's hot path.

Inside a bucket, position order is commit order (the insert trigger draws it under the bucket's lock), so reading
`position > cursor` can never skip an event that commits late (field report F1).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import NamedTuple, cast
from uuid import UUID

import asyncpg
from asyncpg.prepared_stmt import PreparedStatement
from sqlalchemy.ext.asyncio import AsyncConnection

from shared.database import Database, DatabaseSettings

# A plan cached while the log was empty stays a sequential scan after a burst, and sorts what the index has in order
# (field report F8). The relay's queries have one good plan each.
PLANNER_SWITCHES = {"enable_seqscan": "off", "enable_bitmapscan": "off", "enable_sort": "off"}


class Row(NamedTuple):
    """An event of the log. `headers` is a JSON object as text, `created_at` microseconds as PostgreSQL counts them.

    The relay's hot path: what the driver gives is taken as it is.
    """

    bucket: int
    position: int
    event_id: UUID
    topic: str
    key: bytes
    event_type: str
    payload: bytes
    headers: str
    created_at: int


POSTGRES_EPOCH_US = 946_684_800_000_000
"""2000-01-01, where PostgreSQL's clock begins, in microseconds since 1970."""


def relay_database(settings: DatabaseSettings, lease_seconds: float) -> Database:
    """Return a database whose sessions plan as the relay needs it, and whose calls end before a lease does.

    A relay that is frozen in the middle of a transaction holds the rows of its leases: the server ends that transaction
    soon, so that it is succeeded no later than any other.
    """
    return Database(
        replace(
            settings,
            idle_in_transaction_timeout_seconds=min(
                settings.idle_in_transaction_timeout_seconds, max(0.5, lease_seconds / 3)
            ),
            command_timeout_seconds=min(settings.command_timeout_seconds, max(1.0, 0.8 * lease_seconds)),
            session_settings={**settings.session_settings, **PLANNER_SWITCHES},
        )
    )


@dataclass(frozen=True, slots=True)
class Page:
    """How much to read at once: rows in all, and rows and payload bytes of each bucket.

    A full page of payloads of `small_bytes` is no more than may be read at once.
    """

    rows: int
    rows_per_bucket: int
    bytes_per_bucket: int
    small_bytes: int


class LogReader:
    """Reads the log on a connection of its own, with statements that are prepared once.

    Through the driver itself, as the design allows for this path only: no second object for each event.
    """

    def __init__(self, small: PreparedStatement, summed: PreparedStatement) -> None:
        self._small = small
        self._summed = summed
        self._summed_for = 0

    async def read(self, cursors: Mapping[int, int], page: Page) -> Sequence[Row]:
        """Return the next events of each bucket behind its cursor, in order inside a bucket, within the page's limits.

        A bucket's first event is always included, whatever its size. Buckets come one after the other.

        A running sum of the bytes costs a quarter of the reading, and is not needed while every payload is so small
        that a page of them stays within its limit: a larger one comes as None, and the page is read again with sums.
        """
        behind = _array(cursors), _array(cursors.values()), page.rows_per_bucket
        if self._summed_for:
            self._summed_for -= 1
        else:
            rows = await self._small.fetch(*behind, page.small_bytes, page.rows)
            if None not in map(_PAYLOAD, rows):
                return cast("Sequence[Row]", rows)
            self._summed_for = _LARGE_ONES_COME_TOGETHER
        rows = await self._summed.fetch(*behind, page.bytes_per_bucket, page.rows)
        return cast("Sequence[Row]", rows)


class ProgressWriter:
    """Records how far buckets were published, on a connection of its own."""

    def __init__(self, statement: PreparedStatement) -> None:
        self._statement = statement

    async def write(self, owner: UUID, published: Sequence[tuple[int, int, int]]) -> set[int]:
        """Record `(bucket, lease epoch, position)` of events that the broker acknowledged; return the buckets recorded.

        One statement, fenced: a bucket whose lease row no longer has this owner and epoch is left out, and its new
        owner publishes again from the last recorded position (field report F5).
        """
        buckets, epochs, positions = zip(*sorted(published), strict=True)
        rows = await self._statement.fetch(_array(buckets), _array(epochs), _array(positions), owner)
        return {row[0] for row in rows}


def _array(values: Iterable[int]) -> str:
    """Return an array's literal: the driver takes five times as long over a list."""
    return f"{{{','.join(map(str, values))}}}"


class OutboxLog:
    """The log of one database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._engine = database.engine.execution_options(isolation_level="AUTOCOMMIT")

    def connect(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """Return a connection in autocommit: each statement is one round trip and one transaction."""
        return self._engine.connect()

    @asynccontextmanager
    async def reader(self) -> AsyncIterator[LogReader]:
        """Yield a reader; its connection is closed afterwards."""
        async with self._driver_connection() as connection:
            await connection.set_type_codec(
                "timestamptz",
                schema="pg_catalog",
                encoder=lambda microseconds: (microseconds,),
                decoder=itemgetter(0),
                format="tuple",
            )
            yield LogReader(await connection.prepare(_READ_SMALL), await connection.prepare(_READ_SUMMED))

    @asynccontextmanager
    async def progress_writer(self) -> AsyncIterator[ProgressWriter]:
        """Yield a writer; its connection is closed afterwards."""
        async with self._driver_connection() as connection:
            yield ProgressWriter(await connection.prepare(_WRITE_PROGRESS))

    @asynccontextmanager
    async def _driver_connection(self) -> AsyncIterator[asyncpg.Connection]:
        connection = await self._database.driver_connection()
        try:
            yield connection
        finally:
            with suppress(OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
                await connection.close(timeout=2.0)


_PAYLOAD = itemgetter(6)
_LARGE_ONES_COME_TOGETHER = 20  # pages that are read with sums at once after one that had to be read again

_READ_SMALL = """
    SELECT c.bucket, e.position, e.event_id, e.topic, e.key, e.event_type,
           CASE WHEN octet_length(e.payload) <= $4 THEN e.payload END, CAST(e.headers AS text), e.created_at
    FROM unnest($1::text::smallint[], $2::text::bigint[]) AS c (bucket, position)
    CROSS JOIN LATERAL (
        SELECT * FROM outbox_event
        WHERE outbox_event.bucket = c.bucket AND outbox_event.position > c.position
        ORDER BY outbox_event.position
        LIMIT $3
    ) AS e
    LIMIT $5
"""

_READ_SUMMED = """
    SELECT c.bucket, e.position, e.event_id, e.topic, e.key, e.event_type, e.payload, CAST(e.headers AS text),
           e.created_at
    FROM unnest($1::text::smallint[], $2::text::bigint[]) AS c (bucket, position)
    CROSS JOIN LATERAL (
        SELECT *, sum(octet_length(r.payload)) OVER (ORDER BY r.position) - octet_length(r.payload) AS bytes_before
        FROM (
            SELECT * FROM outbox_event
            WHERE outbox_event.bucket = c.bucket AND outbox_event.position > c.position
            ORDER BY outbox_event.position
            LIMIT $3
        ) AS r
    ) AS e
    WHERE e.bytes_before < $4
    LIMIT $5
"""

_WRITE_PROGRESS = """
    WITH published AS (
        SELECT * FROM unnest($1::text::smallint[], $2::text::bigint[], $3::text::bigint[])
                      AS p (bucket, epoch, position)
    ), owned AS (
        SELECT b.bucket FROM outbox_bucket b JOIN published p ON p.bucket = b.bucket
        WHERE b.lease_owner = $4 AND b.lease_epoch = p.epoch
        ORDER BY b.bucket FOR SHARE OF b
    ), written AS (
        INSERT INTO outbox_progress (bucket, position)
        SELECT p.bucket, p.position FROM published p JOIN owned USING (bucket)
        ON CONFLICT (bucket, position) DO NOTHING
    )
    SELECT bucket FROM owned
"""
