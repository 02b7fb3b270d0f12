"""Both databases: migrations go up and down, twice at once, and make exactly the schema that is committed.

Autogenerate sees no trigger, function, sequence or check, so the whole schema is compared as pg_dump tells it. After a
change: `CHARGEONCE_WRITE_SCHEMA=1 make test T=tests/integration/test_schema.py`, and read the difference before you
commit it.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, MetaData, text

import billing_service.tables
import order_service.tables
from chargeonce.stack.postgres_places import reachable_binaries
from shared.cli import migrate_database
from shared.database import Database
from shared.migrations import alembic_config, downgrade, scripts_directory, upgrade
from tests.support.outbox import database_settings

SERVICES = [("order_service", order_service.tables.metadata), ("billing_service", billing_service.tables.metadata)]
WRITE = os.environ.get("CHARGEONCE_WRITE_SCHEMA") == "1"

both_services = pytest.mark.parametrize(("service", "metadata"), SERVICES, ids=[name for name, _ in SERVICES])


async def schema_of(database: Database) -> str:
    """What pg_dump tells of a database, without its partitions and what differs from run to run."""
    binaries = await reachable_binaries(None)
    process = await asyncio.create_subprocess_exec(
        str(binaries.bin / "pg_dump"),
        *("--schema-only", "--no-owner", "--no-privileges", "--restrict-key=x"),
        *("--exclude-table=processed_event_p*", "--exclude-table=alembic_version"),
        database.dsn,
        stdout=asyncio.subprocess.PIPE,
    )
    dumped, _ = await process.communicate()
    assert process.returncode == 0
    lines = (line.rstrip() for line in dumped.decode().splitlines())
    kept = (line for line in lines if not re.match(r"--|SET |SELECT pg_catalog|\\|$", line))
    return "\n".join(kept) + "\n"


@both_services
async def test_the_schema_is_the_committed_one(database_url: str, service: str, metadata: MetaData) -> None:
    database = Database(database_settings(database_url))
    await upgrade(alembic_config(service, database_url, metadata))
    found = await schema_of(database)
    await database.close()
    committed = scripts_directory() / service / "schema.sql"
    if WRITE:
        committed.write_text(found)
    assert found == committed.read_text()


@both_services
async def test_the_models_say_what_the_migrations_make(database_url: str, service: str, metadata: MetaData) -> None:
    database = Database(database_settings(database_url))
    await migrate_database(service, database.settings, metadata, [], 30, 10)

    def unpartitioned(item: object, name: str | None, kind: str, reflected: bool, compare_to: object) -> bool:
        return not (kind == "table" and (name or "").startswith("processed_event_p"))

    def differences(connection: Connection) -> list[object]:
        context = MigrationContext.configure(connection, opts={"include_object": unpartitioned})
        return list(compare_metadata(context, metadata))

    async with database.engine.connect() as connection:
        assert await connection.run_sync(differences) == []
    await database.close()


@both_services
async def test_migrate_commands_at_once_wait_for_each_other(
    database_url: str, service: str, metadata: MetaData
) -> None:
    program = f"from {service}.cli import main; main()"
    environment = {**os.environ, f"{service.upper()}_DATABASE_URL": database_url}
    started = [
        await asyncio.create_subprocess_exec(sys.executable, "-c", program, "migrate", env=environment)
        for _ in range(3)
    ]
    assert [await process.wait() for process in started] == [0, 0, 0]


@both_services
async def test_down_to_nothing_and_up_again(database_url: str, service: str, metadata: MetaData) -> None:
    database = Database(database_settings(database_url))
    await migrate_database(service, database.settings, metadata, [], 30, 10)
    config = alembic_config(service, database_url, metadata)
    await downgrade(config, "base")
    left = text("""
        SELECT relname::text FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p', 'S')
        UNION ALL SELECT proname::text FROM pg_proc WHERE pronamespace = 'public'::regnamespace
    """)
    async with database.engine.connect() as connection:
        assert list((await connection.execute(left)).scalars()) == ["alembic_version"]
    await upgrade(config)
    assert await schema_of(database) == (scripts_directory() / service / "schema.sql").read_text()
    await database.close()


@both_services
async def test_alembics_own_command_works_for_each_database(
    database_url: str, service: str, metadata: MetaData
) -> None:
    repository = Path(__file__).parents[2]
    alembic = shutil.which("alembic", path=str(Path(sys.executable).parent))
    assert alembic
    process = await asyncio.create_subprocess_exec(
        alembic,
        *("-n", service, "upgrade", "head"),
        cwd=repository,
        env={**os.environ, f"{service.upper()}_DATABASE_URL": database_url},
    )
    assert await process.wait() == 0
    database = Database(database_settings(database_url))
    assert await schema_of(database) == (scripts_directory() / service / "schema.sql").read_text()
    await database.close()
