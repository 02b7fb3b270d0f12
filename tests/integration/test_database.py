"""Sessions on which the guarantees can stand."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, NotSupportedError

from shared.database import Database
from shared.errors import Refused, is_transient
from tests.support.outbox import database_settings


@pytest.mark.parametrize("level", ["off", "local", "remote_write"])
async def test_a_session_that_may_forget_commits_is_refused_with_what_to_do(database_url: str, level: str) -> None:
    database = Database(database_settings(database_url, session_settings={"synchronous_commit": level}))
    try:
        with pytest.raises(Refused, match=f"synchronous_commit is {level}"):
            await database.ping()
    finally:
        await database.close()


async def test_sessions_are_durable_whatever_the_database_says(database_url: str) -> None:
    admin = await asyncpg.connect(database_url.replace("+asyncpg", ""))
    name = await admin.fetchval("SELECT current_database()")
    await admin.execute(f"ALTER DATABASE {name} SET synchronous_commit = off")
    await admin.close()
    database = Database(database_settings(database_url))
    async with database.engine.connect() as connection:
        assert (await connection.execute(text("SHOW synchronous_commit"))).scalar_one() == "on"
    await database.close()


async def test_a_plan_that_a_migration_made_invalid_is_a_passing_failure(database_url: str) -> None:
    database = Database(database_settings(database_url))
    async with database.engine.begin() as connection:
        await connection.execute(text("CREATE TABLE t (n bigint)"))
    read = text("SELECT n FROM t")
    async with database.engine.connect() as connection:
        await connection.execute(read)
        await connection.rollback()
        admin = await asyncpg.connect(database.dsn)
        await admin.execute("ALTER TABLE t ALTER n TYPE numeric")
        await admin.close()
        with pytest.raises(NotSupportedError) as raised:
            await connection.execute(read)
        await connection.rollback()
        assert is_transient(raised.value)
        await connection.execute(read)
    await database.close()


async def test_f37_a_ping_past_its_deadline_is_not_cut_off_and_answers_the_next_one(database_url: str) -> None:
    database = Database(database_settings(database_url, pool_size=1, pool_timeout_seconds=20.0))
    holder = await database.engine.connect()
    with pytest.raises(TimeoutError):
        await database.ping(deadline_seconds=0.05)
    waiting = database._ping
    await holder.close()
    await database.ping(deadline_seconds=5)
    assert waiting is not None
    assert waiting.done()
    assert not waiting.cancelled()
    await database.close()


async def test_f3_a_transaction_that_hangs_is_ended(database_url: str) -> None:
    database = Database(database_settings(database_url, idle_in_transaction_timeout_seconds=0.2))
    pid = text("SELECT pg_backend_pid()")
    alive = text("SELECT count(*) FROM pg_stat_activity WHERE pid = :pid")
    async with database.engine.connect() as hanging, database.engine.connect() as watching:
        ended = (await hanging.execute(pid)).scalar_one()
        async with asyncio.timeout(10):
            while (await watching.execute(alive, {"pid": ended})).scalar_one():
                await watching.rollback()
        with pytest.raises(DBAPIError) as raised:
            await hanging.execute(pid)
        assert is_transient(raised.value)
    await database.close()


async def test_f38_a_ping_over_a_connection_that_was_cut_asks_again_on_a_new_one(database_url: str) -> None:
    database = Database(database_settings(database_url))
    await database.ping()
    admin = await asyncpg.connect(database.dsn)
    await admin.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    await admin.close()
    await database.ping()
    await database.close()
