"""Partitions of the dedup marks against a real PostgreSQL: made ahead, dropped behind, recovered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from uuid import UUID

import asyncpg
import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from shared.database import Database, new_metadata
from shared.errors import is_transient
from shared.identifiers import lowest_id_at
from shared.inbox.migrations import downgrade_1, downgrade_2, downgrade_3, upgrade_1, upgrade_2, upgrade_3
from shared.inbox.tables import define_inbox
from shared.inbox.upkeep import InboxUpkeep, drop_expired_partitions, ensure_partitions, fold_tally
from shared.lifecycle import READY, running
from tests.support.inbox import inbox_under_test, payload
from tests.support.outbox import database_settings, migrate_with, until

NOON = datetime(2026, 3, 10, 12, tzinfo=UTC)


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    made = Database(database_settings(database_url))
    await migrate_with(made, upgrade_1, upgrade_2, upgrade_3)
    yield made
    await made.close()


async def fetch(database: Database, statement: str, *parameters: object) -> list[tuple[object, ...]]:
    connection = await asyncpg.connect(database.dsn)
    try:
        return [tuple(row) for row in await connection.fetch(statement, *parameters)]
    finally:
        await connection.close()


async def attached(database: Database) -> list[str]:
    rows = await fetch(
        database,
        "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid "
        "WHERE i.inhparent = 'processed_event'::regclass ORDER BY 1",
    )
    return [str(row[0]) for row in rows]


async def floor(database: Database) -> UUID:
    [[value]] = await fetch(database, "SELECT event_id FROM dedup_floor")
    return UUID(str(value))


async def mark(database: Database, moment: datetime) -> None:
    event_id = UUID(int=lowest_id_at(moment).int + 1)
    await fetch(
        database,
        "INSERT INTO processed_event (event_id, consumer_group, payload_digest, outcome) "
        "VALUES ($1, 'g', sha256('x'), 'done')",
        event_id,
    )


async def test_partitions_reach_from_the_windows_first_day_to_the_days_ahead(database: Database) -> None:
    await ensure_partitions(database, window_days=3, days_ahead=2, now=NOON)
    assert await attached(database) == [f"processed_event_p202603{day:02}" for day in range(7, 13)]
    assert await floor(database) == lowest_id_at(datetime(2026, 3, 7, tzinfo=UTC))
    await mark(database, datetime(2026, 3, 7, tzinfo=UTC))
    await mark(database, datetime(2026, 3, 12, 23, 59, 59, 999000, tzinfo=UTC))
    for outside in (datetime(2026, 3, 6, 23, 59, 59, 999000, tzinfo=UTC), datetime(2026, 3, 13, tzinfo=UTC)):
        with pytest.raises(asyncpg.CheckViolationError, match="no partition"):
            await mark(database, outside)


async def test_making_partitions_again_or_in_several_processes_changes_nothing(database: Database) -> None:
    await asyncio.gather(
        *(ensure_partitions(database, window_days=3, days_ahead=2, now=NOON) for _ in range(4)),
    )
    assert len(await attached(database)) == 6


async def test_a_partition_has_the_parents_key_index_and_checks(database: Database) -> None:
    await ensure_partitions(database, window_days=1, days_ahead=1, now=NOON)
    await mark(database, NOON)
    with pytest.raises(asyncpg.UniqueViolationError):
        await mark(database, NOON)
    indexes = await fetch(
        database,
        "SELECT count(*) FROM pg_inherits WHERE inhparent IN "
        "('pk_processed_event'::regclass, 'ix_processed_event_processed_at'::regclass)",
    )
    assert indexes == [(2 * len(await attached(database)),)]


async def test_days_past_the_window_are_dropped_and_never_made_again(database: Database) -> None:
    await ensure_partitions(database, window_days=3, days_ahead=2, now=NOON)
    await mark(database, NOON - timedelta(days=3))
    later = NOON + timedelta(days=2)
    await ensure_partitions(database, window_days=3, days_ahead=2, now=later)
    assert await drop_expired_partitions(database) == ["processed_event_p20260307", "processed_event_p20260308"]
    assert await attached(database) == [f"processed_event_p202603{day:02}" for day in range(9, 15)]
    assert await fetch(database, "SELECT relname FROM pg_class WHERE relname LIKE 'processed_event_p20260307%'") == []

    raised = await floor(database)
    await ensure_partitions(database, window_days=10, days_ahead=2, now=NOON)
    assert await floor(database) == raised
    assert "processed_event_p20260308" not in await attached(database)
    assert await drop_expired_partitions(database) == []


async def test_the_floor_cannot_be_lowered_or_removed(database: Database) -> None:
    await ensure_partitions(database, window_days=3, days_ahead=2, now=NOON)
    lower = "UPDATE dedup_floor SET event_id = '00000000-0000-0000-0000-000000000000'"
    for statement in (lower, "DELETE FROM dedup_floor"):
        with pytest.raises(asyncpg.RestrictViolationError):
            await fetch(database, statement)


async def test_a_detach_that_was_interrupted_is_finished(database: Database) -> None:
    await ensure_partitions(database, window_days=3, days_ahead=2, now=NOON)
    reader = await asyncpg.connect(database.dsn)
    transaction = reader.transaction()
    await transaction.start()
    await reader.fetch("SELECT * FROM processed_event")
    await ensure_partitions(database, window_days=3, days_ahead=2, now=NOON + timedelta(days=1))
    impatient = Database(database_settings(database.settings.url, lock_timeout_seconds=0.3))
    try:
        with pytest.raises(DBAPIError) as caught:
            await drop_expired_partitions(impatient)
    finally:
        await impatient.close()
    assert is_transient(caught.value)
    assert await fetch(database, "SELECT count(*) FROM pg_inherits WHERE inhdetachpending") == [(1,)]
    await transaction.rollback()
    await reader.close()
    assert await drop_expired_partitions(database) == ["processed_event_p20260307"]
    assert "processed_event_p20260307" not in await attached(database)


async def test_a_detached_partition_is_dropped_below_the_floor_and_attached_again_above_it(database: Database) -> None:
    await ensure_partitions(database, window_days=3, days_ahead=2, now=NOON)
    await mark(database, NOON)
    for day in ("07", "10"):
        await fetch(database, f"ALTER TABLE processed_event DETACH PARTITION processed_event_p202603{day}")
    await ensure_partitions(database, window_days=3, days_ahead=2, now=NOON + timedelta(days=1))
    assert await drop_expired_partitions(database) == ["processed_event_p20260307"]
    assert "processed_event_p20260310" in await attached(database)
    with pytest.raises(asyncpg.UniqueViolationError):
        await mark(database, NOON)


async def test_only_one_keeper_drops_at_a_time(database: Database) -> None:
    await ensure_partitions(database, window_days=3, days_ahead=2, now=NOON)
    await ensure_partitions(database, window_days=3, days_ahead=2, now=NOON + timedelta(days=3))
    dropped = await asyncio.gather(*(drop_expired_partitions(database) for _ in range(3)))
    assert sorted(name for names in dropped for name in names) == [
        f"processed_event_p202603{day:02}" for day in (7, 8, 9)
    ]


async def test_partitions_are_made_and_dropped_under_writers(database_url: str, unique_name: str) -> None:
    async with inbox_under_test(database_url, "127.0.0.1:1", unique_name, topic=False) as inbox:
        written = 0
        stop = asyncio.Event()

        async def write() -> None:
            nonlocal written
            while not stop.is_set():
                await inbox.settle(inbox.record(payload(written)))
                written += 1

        writer = asyncio.create_task(write())
        for days_ahead in range(8, 14):
            await ensure_partitions(inbox.database, window_days=11 - days_ahead + 2, days_ahead=days_ahead)
            await drop_expired_partitions(inbox.database)
        stop.set()
        await writer
        assert written > 5
        assert await inbox.numbers() == list(range(written))
        assert len(await attached(inbox.database)) == 14


async def test_the_upkeep_service_makes_todays_partitions(database: Database) -> None:
    upkeep = InboxUpkeep(database, window_days=2, days_ahead=3)
    async with running([upkeep]):
        await until(lambda: upkeep.ready() == READY)
    names = await attached(database)
    assert f"processed_event_p{datetime.now(UTC):%Y%m%d}" in names
    assert len(names) == 6


async def test_the_ddl_is_what_the_tables_declare_and_can_be_taken_back(
    new_database: Callable[[], Awaitable[str]],
) -> None:
    def shape(connection: Connection) -> list[object]:
        from alembic.autogenerate import compare_metadata

        metadata = new_metadata()
        define_inbox(metadata)
        differences: list[object] = compare_metadata(MigrationContext.configure(connection), metadata)
        return differences

    made = Database(database_settings(await new_database()))
    try:
        await migrate_with(made, upgrade_1, upgrade_2, upgrade_3)
        async with made.engine.connect() as connection:
            assert await connection.run_sync(shape) == []
        await ensure_partitions(made, window_days=1)

        def take_back(connection: Connection) -> None:
            operations = Operations(MigrationContext.configure(connection))
            downgrade_3(operations)
            downgrade_2(operations)
            downgrade_1(operations)

        async with made.engine.begin() as connection:
            await connection.run_sync(take_back)
        assert await fetch(made, "SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace") == []
        assert await fetch(made, "SELECT proname FROM pg_proc WHERE pronamespace = 'public'::regnamespace") == []
    finally:
        await made.close()


async def test_f7_every_keeper_gives_back_the_lock_that_it_took(database: Database) -> None:
    await ensure_partitions(database, window_days=5)
    await drop_expired_partitions(database)
    await fold_tally(database)
    held = "SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database WHERE locktype = 'advisory'"
    assert await fetch(database, held + " AND d.datname = current_database()") == [(0,)]
