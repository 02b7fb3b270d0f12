"""The fixtures every other integration test stands on."""

import asyncpg

from chargeonce.stack import Stack


async def test_each_test_gets_an_empty_database(database_url: str, stack: Stack) -> None:
    connection = await asyncpg.connect(database_url.replace("+asyncpg", ""))
    try:
        assert await connection.fetchval("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'") == 0
        assert await connection.fetchval("SHOW fsync") == "on"
        assert await connection.fetchval("SHOW server_encoding") == "UTF8"
        await connection.execute("CREATE TABLE left_behind ()")
    finally:
        await connection.close()
