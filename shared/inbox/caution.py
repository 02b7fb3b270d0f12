"""After a process of the group died: a few events at a time, each attempt committed before the handler sees them.

A poison that kills the process (out of memory, a crash in a C library) raises nothing that could be caught, and its
batch comes again to whoever owns the partition next, who would die as well. So a member is on record while it lives,
with a lock of its session that ends with it. Who finds one gone is cautious up to a batch beyond the committed offsets:
chunks at first, and one event at a time where a chunk was not survived. What was not survived `DEATHS` times alone is a
dead letter without being tried again. In the steady state nothing of this is written (field report F35).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from uuid import UUID, uuid4

import asyncpg
import structlog

from shared.database import Database
from shared.kafka.records import ConsumedRecord, Fetched, Partition

log = structlog.get_logger(__name__)

CHUNK_RECORDS = 50
DEATHS = 2
"""How often an event may be in hand alone when the process dies."""

_REMEMBERED_MINUTES = 10  # of a death: everybody has a new assignment by then
_CALL_SECONDS = 20.0
_CLOSE_SECONDS = 2.0


class Caution:
    """What one member of a group knows of those that died, and how far it has to be careful because of them.

    `database` leads to the database itself: the lock of a session means nothing behind a transaction-pooling proxy.
    """

    def __init__(self, database: Database, group: str, batch_records: int) -> None:
        self._database = database
        self._group = group
        self._batch_records = batch_records
        self._member: UUID = uuid4()
        self._connection: asyncpg.Connection | None = None
        self._look_due = True
        self._some_died = False
        self._until: dict[Partition, int] = {}
        self._not_survived: dict[Partition, list[tuple[int, int, int]]] = {}

    def assigned(self) -> None:
        """Note that the group has a new assignment: somebody may have died."""
        self._look_due = True

    @property
    def is_calm(self) -> bool:
        """Whether nothing calls for caution, as far as is known."""
        return not (self._look_due or self._some_died)

    async def chunks(self, fetched: Fetched) -> list[Sequence[ConsumedRecord]]:
        """Return the records in the parts in which they should be settled: all at once, unless caution is due."""
        if self._look_due:
            self._some_died = await self._look()
            self._until.clear()
            self._not_survived.clear()
            self._look_due = False
        if not self._some_died:
            return [fetched.records]
        for partition, first in fetched.first_offsets().items():
            if partition not in self._until:
                self._until[partition] = first + self._batch_records
                self._not_survived[partition] = await self._attempts(partition)
        return self._split(fetched.records)

    def is_due(self, record: ConsumedRecord) -> bool:
        """Tell whether an attempt at this record is to be committed before it is made."""
        return record.offset < self._until.get(record.source, 0)

    async def attempt(self, part: Sequence[ConsumedRecord]) -> int:
        """Commit that these records, of one partition, are in hand now; return how often they were before.

        What lies behind them in their partition is settled, so its attempts are forgotten.
        """
        first, last = part[0], part[-1]
        connection = await self._connected()
        return int(
            await connection.fetchval(
                _ATTEMPT, self._group, first.topic, first.partition, first.offset, last.offset, timeout=_CALL_SECONDS
            )
        )

    async def leave(self) -> None:
        """End in good order: nothing is in hand any more."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        with suppress(OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
            await connection.execute("DELETE FROM inbox_member WHERE member_id = $1", self._member, timeout=5)
        with suppress(OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
            await connection.close(timeout=_CLOSE_SECONDS)

    # ---------------------------------------------------------------------------------------------- internals

    async def _connected(self) -> asyncpg.Connection:
        """Return the session that holds this member's lock; after an outage a new one, on record again."""
        if self._connection is None or self._connection.is_closed():
            connection = await self._database.driver_connection()
            # Under a new name: a lost session may live on at the server for a while, with its lock.
            former, self._member = self._member, uuid4()
            try:
                await connection.execute("DELETE FROM inbox_member WHERE member_id = $1", former, timeout=_CALL_SECONDS)
                await connection.execute(_HOLD, str(self._member), timeout=_CALL_SECONDS)
                await connection.execute(_ENTER, self._member, self._group, timeout=_CALL_SECONDS)
            except BaseException:
                connection.terminate()
                raise
            self._connection = connection
        return self._connection

    async def _look(self) -> bool:
        """Find members that died, and tell whether some did lately."""
        connection = await self._connected()
        died = await connection.fetch(_FIND_DEAD, self._group, self._member, timeout=_CALL_SECONDS)
        if died:
            log.warning("inbox.member_died", group=self._group, members=len(died), meaning="its events are read again")
        await connection.execute(_FORGET, self._group, _REMEMBERED_MINUTES, timeout=_CALL_SECONDS)
        return bool(await connection.fetchval(_SOME_DIED, self._group, timeout=_CALL_SECONDS))

    async def _attempts(self, partition: Partition) -> list[tuple[int, int, int]]:
        connection = await self._connected()
        rows = await connection.fetch(_READ, self._group, partition.topic, partition.partition, timeout=_CALL_SECONDS)
        return [(row[0], row[1], row[2]) for row in rows]

    def _split(self, records: Sequence[ConsumedRecord]) -> list[Sequence[ConsumedRecord]]:
        """Return runs of one partition within the careful part, and the rest at once."""
        parts: list[list[ConsumedRecord]] = []
        rest: list[ConsumedRecord] = []
        chunk: list[ConsumedRecord] = []
        for record in records:
            if not self.is_due(record):
                rest.append(record)
                continue
            alone = self._was_not_survived(record)
            fits = chunk and chunk[-1].source == record.source and len(chunk) < CHUNK_RECORDS
            if alone or not fits:
                if chunk:
                    parts.append(chunk)
                chunk = []
            chunk.append(record)
            if alone:
                parts.append(chunk)
                chunk = []
        if chunk:
            parts.append(chunk)
        return [*parts, rest] if rest else [*parts]

    def _was_not_survived(self, record: ConsumedRecord) -> bool:
        ranges = self._not_survived.get(record.source, ())
        return any(first <= record.offset <= last for first, last, _ in ranges)


_ENTER = """
    INSERT INTO inbox_member (member_id, consumer_group) VALUES ($1, $2)
"""

_HOLD = "SELECT pg_advisory_lock(hashtextextended($1, 1835884898))"

# Whose lock can be had is gone. The lock is given back at once: it belongs to this transaction.
_FIND_DEAD = """
    UPDATE inbox_member SET died_at = clock_timestamp()
    WHERE member_id IN (
        SELECT member_id FROM (
            SELECT member_id FROM inbox_member
            WHERE consumer_group = $1 AND member_id <> $2 AND died_at IS NULL
            OFFSET 0
        ) AS others
        WHERE pg_try_advisory_xact_lock(hashtextextended(member_id::text, 1835884898))
    )
    RETURNING member_id
"""

_FORGET = """
    DELETE FROM inbox_member WHERE consumer_group = $1 AND died_at < clock_timestamp() - make_interval(mins => $2)
"""

_SOME_DIED = "SELECT EXISTS (SELECT FROM inbox_member WHERE consumer_group = $1 AND died_at IS NOT NULL)"

_READ = """
    SELECT first_offset, last_offset, attempts FROM inbox_attempt
    WHERE consumer_group = $1 AND topic = $2 AND partition = $3
"""

_ATTEMPT = """
    WITH settled AS (
        DELETE FROM inbox_attempt WHERE consumer_group = $1 AND topic = $2 AND partition = $3 AND last_offset < $4
    )
    INSERT INTO inbox_attempt (consumer_group, topic, partition, first_offset, last_offset, attempts)
    VALUES ($1, $2, $3, $4, $5, 1)
    ON CONFLICT (consumer_group, topic, partition, first_offset, last_offset)
    DO UPDATE SET attempts = inbox_attempt.attempts + 1, last_attempt_at = clock_timestamp()
    RETURNING attempts - 1
"""
