"""What an operator does for the sessions behind a connection proxy: what the services' own messages say."""

from __future__ import annotations

import re

import asyncpg
import pytest

from shared.database import Database
from shared.errors import Refused
from shared.outbox.log import PLANNER_SWITCHES, relay_database
from tests.support.outbox import database_settings
from tests.support.pooling_proxy import pooling_proxy

IGNORED = (
    "jit",
    "synchronous_commit",
    "client_connection_check_interval",
    "lock_timeout",
    "transaction_timeout",
    "idle_in_transaction_session_timeout",
    *PLANNER_SWITCHES,
)


async def follow(remedy: str, url: str) -> None:
    """Run the statements that a message gives."""
    statements = re.findall(r'ALTER ROLE "\w+" IN DATABASE "\w+" SET \w+ = \'\w+\';', remedy)
    assert statements, remedy
    connection = await asyncpg.connect(url.replace("+asyncpg", ""))
    for statement in statements:
        await connection.execute(statement)
    await connection.close()


async def refused(database: Database) -> str:
    with pytest.raises(Refused) as raised:
        await database.ping()
    await database.close()
    return raised.value.detail


async def give_settings_to_the_role(url: str) -> None:
    async with pooling_proxy(url) as strict:
        pool = relay_database(database_settings(strict.url), lease_seconds=3.0)
        await follow(await refused(pool), url)
