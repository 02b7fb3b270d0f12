"""Everything works behind a transaction-pooling proxy; what a proxy takes away is missed at once, with the remedy."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import pytest
from sqlalchemy import text

from chargeonce.stack import KafkaBroker
from shared.database import Database
from shared.errors import is_transient
from shared.lifecycle import State, running
from shared.outbox.append import EventWriter
from shared.outbox.log import PLANNER_SWITCHES, relay_database
from shared.unit_of_work import UnitsOfWork
from shared.wakeup import Listener, Notifier
from tests.support.outbox import OutboxUnderTest, database_settings, outbox_under_test, scalar, until
from tests.support.pooling_proxy import PoolingProxy, pooling_proxy
from tests.support.sessions import IGNORED, follow, give_settings_to_the_role, refused

OPERATIONS = Path(__file__).parents[2] / "docs/operations.md"


async def failed(work: Coroutine[object, object, None]) -> Exception | None:
    try:
        await work
    except Exception as error:
        return error
    return None


@asynccontextmanager
async def behind_a_proxy(outbox: OutboxUnderTest, proxy: PoolingProxy) -> AsyncIterator[tuple[UnitsOfWork, Notifier]]:
    """Writers that go through the proxy, and wake relays over a direct connection."""
    database = Database(database_settings(proxy.url, pool_size=8))
    notifier = Notifier(outbox.dsn, "outbox_event")
    try:
        async with running([notifier]):
            yield UnitsOfWork(database, EventWriter(signal=notifier.signal)), notifier
    finally:
        await database.close()


async def write(outbox: OutboxUnderTest, units: UnitsOfWork, writer: int, rounds: int) -> None:
    for number in range(rounds):
        async with units.begin() as work:
            for key in range(3):
                work.publish(outbox.event(f"order-{writer}-{key}", number))
        outbox.published += 3


async def test_the_proxy_moves_a_session_between_transactions_and_never_within_one(database_url: str) -> None:
    async with pooling_proxy(database_url, ignored=["lock_timeout"]) as proxy:
        connection = await asyncpg.connect(proxy.url.replace("+asyncpg", ""), server_settings={"lock_timeout": "1234"})
        prepared = await connection.prepare("SELECT pg_backend_pid(), current_setting('lock_timeout')")
        found = [tuple(await prepared.fetchrow() or ()) for _ in range(12)]
        assert {timeout for _, timeout in found} == {"0"}
        assert len({pid for pid, _ in found}) == 4
        async with connection.transaction():
            assert len({await connection.fetchval("SELECT pg_backend_pid()") for _ in range(8)}) == 1
        with pytest.raises(asyncpg.DivisionByZeroError):
            await connection.fetchval("SELECT 1 / $1::int", 0)
        assert await connection.fetchval("SELECT 1 / $1::int", 1) == 1
        await connection.close()


async def test_f10_settings_that_a_proxy_refuses_are_named_with_what_to_do(database_url: str) -> None:
    async with pooling_proxy(database_url) as strict:
        problem = await refused(Database(database_settings(strict.url)))
    assert "unsupported startup parameter" in problem
    named = re.search(r"ignore_startup_parameters \(([\w,]+)\)", problem)
    assert named
    async with pooling_proxy(database_url, ignored=named[1].split(",")) as proxy:
        problem = await refused(Database(database_settings(proxy.url)))
    assert "drops settings" in problem
    await follow(problem, database_url)
    async with pooling_proxy(database_url, ignored=named[1].split(",")) as proxy:
        database = Database(database_settings(proxy.url))
        await database.ping()
        assert await scalar(database, "SHOW lock_timeout") == "5s"
        await database.close()


def test_the_documentation_lists_every_setting_that_a_proxy_must_let_pass() -> None:
    documented = re.search(r"ignore_startup_parameters = ([\w,]+)", OPERATIONS.read_text())
    assert documented
    asked = relay_database(database_settings("postgresql://u@h/d"), lease_seconds=10.0).server_settings()
    assert set(documented[1].split(",")) == set(asked) - {"application_name", "timezone"} == set(IGNORED)


async def test_f8_a_relay_whose_planner_switches_a_proxy_drops_is_refused_with_what_to_do(database_url: str) -> None:
    async with pooling_proxy(database_url, ignored=IGNORED) as proxy:
        await follow(await refused(Database(database_settings(proxy.url))), database_url)
    async with pooling_proxy(database_url, ignored=IGNORED) as proxy:
        problem = await refused(relay_database(database_settings(proxy.url), lease_seconds=3.0))
    assert f"{', '.join(PLANNER_SWITCHES)}. Without" in problem, "a limit of another length is a limit"
    await follow(problem, database_url)
    async with pooling_proxy(database_url, ignored=IGNORED) as proxy:
        pool = relay_database(database_settings(proxy.url), lease_seconds=3.0)
        await pool.ping()
        await pool.close()


async def test_f10_behind_a_transaction_pooling_proxy_every_event_arrives_in_order(
    database_url: str, kafka: KafkaBroker, unique_name: str
) -> None:
    async with outbox_under_test(database_url, kafka.bootstrap_servers, unique_name) as outbox:
        await give_settings_to_the_role(database_url)
        async with (
            pooling_proxy(database_url, ignored=IGNORED, size=6) as proxy,
            behind_a_proxy(outbox, proxy) as (units, _),
            outbox.relay(url=proxy.url),
        ):
            async with asyncio.timeout(90):
                await asyncio.gather(*(write(outbox, units, writer, 60) for writer in range(8)))
            await outbox.drained()
            assert proxy.moves > 200, "sessions moved between server connections"
            assert proxy.prepared_again > 0
        assert outbox.check_order(await outbox.arrived()) == 0
        assert outbox.published == 1440


async def test_f10_a_listener_behind_the_proxy_is_deaf_says_so_and_polling_finds_everything(
    database_url: str, kafka: KafkaBroker, unique_name: str
) -> None:
    async with outbox_under_test(database_url, kafka.bootstrap_servers, unique_name) as outbox:
        await give_settings_to_the_role(database_url)
        async with pooling_proxy(database_url, ignored=IGNORED, size=6) as proxy:
            plain = proxy.url.replace("+asyncpg", "")
            listener = Listener(plain, {"deaf": lambda _: None}, call_deadline_seconds=0.3)
            async with running([listener]):
                await until(lambda: listener.ready().state is State.DEGRADED)
                assert not listener.connected
                assert "LISTEN_DATABASE_URL" in listener.ready().reason
            async with (
                behind_a_proxy(outbox, proxy) as (units, _),
                outbox.relay(url=proxy.url, listen_dsn=plain),
            ):
                for number in range(5):
                    await write(outbox, units, number, 4)
                    await outbox.drained(deadline_seconds=20)
        assert outbox.check_order(await outbox.arrived()) == 0


async def test_f38_a_server_that_restarts_behind_the_proxy_is_a_passing_failure(database_url: str) -> None:
    await give_settings_to_the_role(database_url)
    async with pooling_proxy(database_url, ignored=IGNORED, size=2) as proxy:
        database = Database(database_settings(proxy.url))
        await database.ping()
        admin = await asyncpg.connect(database_url.replace("+asyncpg", ""))
        async with database.engine.connect() as connection:
            await connection.execute(text("SELECT 1"))
            await admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            with pytest.raises(Exception) as raised:  # noqa: PT011 - whatever it is, it must count as passing
                await connection.execute(text("SELECT 1"))
            assert is_transient(raised.value)
        await admin.close()
        async with asyncio.timeout(10):
            while (failure := await failed(database.ping())) is not None:
                assert is_transient(failure)
        await database.close()


async def test_f37_a_query_that_is_cancelled_behind_the_proxy_ends_on_the_server(database_url: str) -> None:
    await give_settings_to_the_role(database_url)
    async with pooling_proxy(database_url, ignored=IGNORED, size=2) as proxy:
        connection = await asyncpg.connect(proxy.url.replace("+asyncpg", ""))
        with pytest.raises(TimeoutError):
            await connection.fetchval("SELECT pg_sleep(60)", timeout=0.3)
        sleepers = (
            "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query LIKE '%sleep(60)' AND pid <> $1"
        )
        assert await connection.fetchval(sleepers, await connection.fetchval("SELECT pg_backend_pid()")) == 0
        assert await connection.fetchval("SELECT 42") == 42
        await connection.close()
