"""A limit on what waits in the outbox, with a relay that is down, comes back and goes through a proxy."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from sqlalchemy import text

from chargeonce.stack import KafkaBroker
from order_service.bootstrap import build
from order_service.settings import OrderServiceSettings, owned_topics
from order_service.tables import metadata
from shared.cli import make_topics, migrate_database
from shared.database import Database
from shared.errors import Refused
from shared.inbox.upkeep import InboxUpkeep
from shared.outbox.backlog import measure_backlog
from shared.outbox.log import OutboxLog, relay_database
from tests.support.outbox import database_settings, scalar
from tests.support.pooling_proxy import pooling_proxy
from tests.support.serving import serving
from tests.support.sessions import IGNORED, give_settings_to_the_role

ORDER = {"customer_id": 7, "currency": "EUR", "items": [{"sku": "BOOK-1", "quantity": 2, "unit_price": "19.99"}]}


@pytest.fixture
async def settings(database_url: str, kafka: KafkaBroker) -> OrderServiceSettings:
    made = OrderServiceSettings(database_url=database_url, kafka_bootstrap_servers=kafka.bootstrap_servers)
    await make_topics(made.kafka("test"), owned_topics(made), 30)
    await migrate_database("order_service", made.direct_database("test"), metadata, owned_topics(made), 30, 10)
    return made


async def post(client: aiohttp.ClientSession) -> int:
    async with client.post("/orders", json=ORDER) as response:
        return response.status


async def waiting(database: Database) -> int:
    async with OutboxLog(database).connect() as connection:
        return (await measure_backlog(connection)).events


async def test_orders_are_refused_past_the_limit_and_taken_again_when_a_relay_is_back(
    settings: OrderServiceSettings,
) -> None:
    limited = settings.model_copy(update={"max_unpublished_events": 20})
    database = relay_database(database_settings(settings.direct_database("test").url), 10.0)
    async with serving(build(limited, ["api"])) as client:
        accepted = 0
        async with asyncio.timeout(30):
            while (status := await post(client)) == 201:
                accepted += 1
                await asyncio.sleep(0.05)
        assert status == 503
        assert 20 < accepted < 20 + 4 * 0.5 / 0.05, "no more than a few intervals of the measurement let in"
        async with client.get("/readyz") as ready:
            assert ready.status == 200, "it still reads"
            assert "refused with 503" in await ready.text()
        async with client.get("/metrics") as metrics:
            assert "outbox_backpressure 1.0" in await metrics.text()
        assert [await post(client) for _ in range(5)] == [503] * 5
        stored = [await scalar(database, f"SELECT count(*) FROM {table}") for table in ("orders", "outbox_event")]  # noqa: S608
        assert stored == [accepted, accepted], "nothing is half stored"
        async with serving(build(settings, ["relay"])), asyncio.timeout(60):
            while await post(client) != 201:
                await asyncio.sleep(0.1)
            while await waiting(database):
                await asyncio.sleep(0.1)
        assert await scalar(database, "SELECT count(*) FROM orders") == accepted + 1
    await database.close()


async def test_f10_the_service_works_behind_a_transaction_pooling_proxy(settings: OrderServiceSettings) -> None:
    direct = settings.direct_database("test").url
    database = relay_database(database_settings(direct), 10.0)
    await give_settings_to_the_role(direct)
    async with pooling_proxy(direct, ignored=IGNORED, size=6) as proxy:
        proxied = settings.model_validate(
            {**settings.model_dump(), "database_url": proxy.url, "listen_database_url": direct}
        )
        app = build(proxied, ["api", "relay", "consumer"])
        [upkeep] = [service for service in app.state.services if isinstance(service, InboxUpkeep)]
        async with serving(app) as client:
            async with asyncio.timeout(60):
                statuses = await asyncio.gather(*(post(client) for _ in range(40)))
                assert set(statuses) == {201}
                while await waiting(database):
                    await asyncio.sleep(0.05)
            await upkeep.do()
            await upkeep.do()
            # Keys of two numbers (objsubid 2) are those of work that ends. The consumer's lock on its life (caution.py)
            # is one big number, and is held by a session of its own past the proxy.
            held = (
                "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 2 "
                "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
            )
            assert await scalar(database, held) == 0
        assert proxy.moves > 20
    await database.close()


async def test_a_service_whose_settings_a_proxy_drops_is_down_and_says_what_to_do(
    settings: OrderServiceSettings,
) -> None:
    direct = settings.direct_database("test").url
    async with pooling_proxy(direct, ignored=IGNORED) as proxy:
        proxied = settings.model_validate(
            {**settings.model_dump(), "database_url": proxy.url, "listen_database_url": direct}
        )
        async with serving(build(proxied, ["api"])) as client, client.get("/readyz") as ready:
            assert ready.status == 503
            assert "ALTER ROLE" in await ready.text()
        with pytest.raises(Refused):
            await migrate_database("order_service", proxied.database("x"), metadata, owned_topics(proxied), 30, 1)
        await migrate_database("order_service", proxied.direct_database("x"), metadata, owned_topics(proxied), 30, 1)


async def test_the_measurement_is_bounded_and_reads_only_the_index_of_a_great_backlog(
    settings: OrderServiceSettings,
) -> None:
    database = relay_database(database_settings(settings.direct_database("test").url), 10.0)
    async with database.engine.begin() as connection:
        await connection.execute(text("ANALYZE outbox_event, outbox_progress, outbox_parked"))
        await connection.execute(text("ALTER TABLE outbox_event DISABLE TRIGGER outbox_event_draw_position"))
        await connection.execute(_MANY_EVENTS)
    async with OutboxLog(database).connect() as connection:
        counted = await measure_backlog(connection, most=1001)
        assert (counted.events, counted.at_least) == (1001, True)
        await connection.execute(text("SELECT pg_stat_force_next_flush()"))
        before = await scalar(database, _ROWS_READ)
        await measure_backlog(connection, most=1001)
        await connection.execute(text("SELECT pg_stat_force_next_flush()"))
        read = int(str(await scalar(database, _ROWS_READ))) - int(str(before))
    assert 1001 <= read <= 1001 * 2 + 96 * 2, "the rows that it counts, and the oldest of each bucket"
    await database.close()


_MANY_EVENTS = text("""
    INSERT INTO outbox_event (event_id, bucket, position, topic, key, event_type, payload)
    SELECT gen_random_uuid(), n % 96, n, 't', 'k', 'e', 'p' FROM generate_series(1, 50000) AS n
""")
_ROWS_READ = "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_user_tables WHERE relname = 'outbox_event'"
