"""One environment for both databases; the ini section (`-n order_service`) names the service whose turn it is."""

from __future__ import annotations

import asyncio
import importlib
import os
from typing import Any

from alembic import context
from sqlalchemy import Connection, MetaData, text

from shared.database import Database, DatabaseSettings

# Two migrate jobs at once wait for each other. 0x4D494752 is "MIGR".
_MIGRATION_LOCK = 0x4D494752
_PATIENCE_SECONDS = 3600.0
config = context.config
service = config.config_ini_section


def database_url() -> str:
    """Return the address given by the service's command, or by its environment for alembic's own command."""
    url = config.attributes.get("url") or os.environ.get(f"{service.upper()}_DATABASE_URL")
    if not url:
        raise SystemExit(f"set {service.upper()}_DATABASE_URL, or use the service's own command: migrate")
    return str(url)


def target_metadata() -> MetaData:
    """Return the tables that the models declare."""
    given = config.attributes.get("metadata")
    if isinstance(given, MetaData):
        return given
    declared: MetaData = importlib.import_module(f"{service}.tables").metadata
    return declared


def include_object(item: Any, name: str | None, kind: str, reflected: bool, compare_to: object) -> bool:
    """Leave partitions out of a comparison: they come and go with the days."""
    return not (kind == "table" and reflected and compare_to is None and (name or "").startswith("processed_event_p"))


def migrate(connection: Connection) -> None:
    """Run the migrations in one transaction each, with nobody else migrating."""
    connection.execute(text("SET lock_timeout = 0"))  # another migration may take its time; its locks on tables not
    connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": _MIGRATION_LOCK})
    connection.execute(text("RESET lock_timeout"))
    connection.commit()
    context.configure(
        connection=connection,
        target_metadata=target_metadata(),
        include_object=include_object,
        compare_server_default=False,
        transaction_per_migration=True,
    )
    with context.begin_transaction():
        context.run_migrations()


async def online() -> None:
    """Connect and migrate."""
    unhurried = DatabaseSettings(
        url=database_url(),
        application_name=f"{service} migrate",
        lock_timeout_seconds=10.0,
        transaction_timeout_seconds=_PATIENCE_SECONDS,
        idle_in_transaction_timeout_seconds=_PATIENCE_SECONDS,
        command_timeout_seconds=_PATIENCE_SECONDS,
    )
    database = Database(unhurried)
    try:
        async with database.engine.connect() as connection:
            await connection.run_sync(migrate)
    finally:
        await database.close()


if context.is_offline_mode():
    context.configure(url=database_url(), target_metadata=target_metadata(), literal_binds=True)
    with context.begin_transaction():
        context.run_migrations()
else:
    asyncio.run(online())
