"""What docs/operations.md tells an operator of a transaction-pooling proxy is enough for every session (F10)."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from billing_service.bootstrap import executor_database
from billing_service.events import PAYMENT_TOPIC
from billing_service.messages import ORDER_CONFIRMED_TOPIC
from billing_service.settings import BillingServiceSettings, owned_topics
from chargeonce.stack import KafkaBroker
from shared.database import Database
from shared.identifiers import new_event_id
from shared.inbox.upkeep import ensure_partitions
from shared.kafka.settings import KafkaSettings
from shared.kafka.topics import TopicSpec, ensure_topics
from shared.outbox.log import relay_database
from tests.support.billing import billing_process, billing_under_test, get, running_provider
from tests.support.pooling_proxy import PoolingProxy, pooling_proxy

OPERATIONS = (Path(__file__).parents[2] / "docs/operations.md").read_text()
PAYMENTS = 20


@pytest.fixture
async def proxy(database_url: str) -> AsyncIterator[PoolingProxy]:
    """A proxy and a database that were set up as the documentation says."""
    [ignored] = re.findall(r"ignore_startup_parameters = ([a-z_,]+)", OPERATIONS)
    settings = re.findall(r"^ +ALTER ROLE \w+ IN DATABASE \w+ (SET \w+ = '\w+';)$", OPERATIONS, re.MULTILINE)
    assert len(settings) == len(ignored.split(","))
    admin = await asyncpg.connect(database_url.replace("+asyncpg", ""))
    database = await admin.fetchval("SELECT current_database()")
    for setting in settings:
        await admin.execute(f"ALTER ROLE CURRENT_USER IN DATABASE {database} {setting}")
    await admin.close()
    async with pooling_proxy(database_url, ignored=ignored.split(","), size=6) as proxy:
        yield proxy


async def test_f10_every_kind_of_session_has_what_it_needs_behind_a_proxy(proxy: PoolingProxy) -> None:
    settings = BillingServiceSettings(database_url=proxy.url)
    for database in (
        Database(settings.database("api")),
        relay_database(settings.database("relay"), settings.relay_lease_seconds),
        executor_database(settings),
    ):
        await database.ping()
        await database.close()


async def test_f10_billing_behind_a_proxy_charges_each_order_once(
    proxy: PoolingProxy, database_url: str, kafka: KafkaBroker, tmp_path: Path, unique_name: str
) -> None:
    first = random.randrange(10**12, 10**15)  # the topic is shared with other tests
    order_ids = range(first, first + PAYMENTS)
    topics = [*owned_topics(BillingServiceSettings()), TopicSpec(ORDER_CONFIRMED_TOPIC, 12, 1, 1)]
    await ensure_topics(KafkaSettings(kafka.bootstrap_servers, "test"), topics)
    async with (
        billing_under_test(database_url) as billing,
        running_provider(tmp_path / "ledger.sqlite3") as provider,
        AIOKafkaProducer(bootstrap_servers=kafka.bootstrap_servers) as producer,
    ):
        await ensure_partitions(billing.database, window_days=30)
        settings = {
            "BILLING_SERVICE_KAFKA_BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
            "BILLING_SERVICE_CONSUMER_GROUP": unique_name,
            "BILLING_SERVICE_LISTEN_DATABASE_URL": database_url,
        }
        async with (
            asyncio.timeout(90),
            billing_process(database_url=proxy.url, provider_url=provider.url, **settings) as (process, url),
        ):
            for order_id in order_ids:
                content, key = json.dumps(confirmed(order_id)).encode(), str(order_id).encode()
                for _ in range(2):
                    await producer.send_and_wait(ORDER_CONFIRMED_TOPIC, content, key=key)
            published = await payment_events(kafka, {str(order_id).encode() for order_id in order_ids})
            status, ready = await get(f"{url}/readyz")
            process.terminate()
            assert await process.wait() == 0
        payments = [await provider.payments(order_id) for order_id in order_ids]
    assert (status, ready["status"]) == (200, "ready")
    assert [len(of_order) for of_order in payments] == [1] * PAYMENTS
    assert sorted(published) == sorted(str(order_id).encode() for order_id in order_ids)
    assert proxy.moves > PAYMENTS


def confirmed(order_id: int) -> dict[str, object]:
    """An order's event."""
    return {
        "event_id": str(new_event_id()),
        "event_type": "order.confirmed.v1",
        "occurred_at": "2025-01-02T03:04:05+00:00",
        "order_id": order_id,
        "customer_id": 7,
        "total_amount": "19.99",
        "currency": "EUR",
        "aggregate_version": 1,
    }


async def payment_events(kafka: KafkaBroker, keys: set[bytes]) -> list[bytes]:
    """The keys of the payment events for these orders, as soon as each has one."""
    found: list[bytes] = []
    async with AIOKafkaConsumer(
        PAYMENT_TOPIC, bootstrap_servers=kafka.bootstrap_servers, auto_offset_reset="earliest"
    ) as consumer:
        async for record in consumer:
            if record.key in keys:
                found.append(record.key)
            if keys <= set(found):
                break
    return found
