"""The whole of billing in one process: an order event in Kafka becomes one payment, and a payment event in Kafka."""

import asyncio
import json
import random
from pathlib import Path

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from billing_service.events import PAYMENT_TOPIC
from billing_service.messages import ORDER_CONFIRMED_TOPIC
from billing_service.settings import BillingServiceSettings, owned_topics
from chargeonce.stack import KafkaBroker
from shared.identifiers import new_event_id
from shared.inbox.upkeep import ensure_partitions
from shared.kafka.settings import KafkaSettings
from shared.kafka.topics import TopicSpec, ensure_topics
from tests.support.billing import billing_process, billing_under_test, get, running_provider
from tests.support.outbox import scalar

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_an_order_event_that_comes_three_times_is_one_payment_and_one_payment_event(
    database_url: str, kafka: KafkaBroker, tmp_path: Path, unique_name: str
) -> None:
    order_id = random.randrange(10**12, 10**15)  # the topic is shared with other tests
    event_id = new_event_id()
    payload = {
        "event_id": str(event_id),
        "event_type": "order.confirmed.v1",
        "occurred_at": "2025-01-02T03:04:05+00:00",
        "order_id": order_id,
        "customer_id": 7,
        "total_amount": "19.99",
        "currency": "EUR",
        "aggregate_version": 1,
    }
    topics = [*owned_topics(BillingServiceSettings()), TopicSpec(ORDER_CONFIRMED_TOPIC, 12, 1, 1)]
    await ensure_topics(KafkaSettings(kafka.bootstrap_servers, "test"), topics)
    headers = [("traceparent", TRACEPARENT.encode())]
    async with (
        billing_under_test(database_url) as billing,
        running_provider(tmp_path / "ledger.sqlite3") as provider,
        AIOKafkaProducer(bootstrap_servers=kafka.bootstrap_servers) as producer,
    ):
        await ensure_partitions(billing.database, window_days=30)
        *_, last = [
            await producer.send_and_wait(
                ORDER_CONFIRMED_TOPIC, json.dumps(payload).encode(), key=str(order_id).encode(), headers=headers
            )
            for _ in range(3)
        ]
        settings = {
            "BILLING_SERVICE_KAFKA_BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
            "BILLING_SERVICE_CONSUMER_GROUP": unique_name,
        }
        async with (
            asyncio.timeout(90),
            billing_process(database_url=database_url, provider_url=provider.url, **settings) as (process, url),
            AIOKafkaConsumer(
                PAYMENT_TOPIC, bootstrap_servers=kafka.bootstrap_servers, auto_offset_reset="earliest"
            ) as consumer,
        ):
            async for record in consumer:
                if record.key == str(order_id).encode():
                    break
            await consumed(kafka, unique_name, TopicPartition(last.topic, last.partition), last.offset)
            _, inbox = await get(f"{url}/inbox")
            _, page = await get(f"{url}/charges?order_id={order_id}")
            process.terminate()
            assert await process.wait() == 0
        published = json.loads(record.value)
        [payment] = await provider.payments(order_id)
        events = [event for event in await billing.events() if event["order_id"] == order_id]
        letters = await scalar(
            billing.database, "SELECT count(*) FROM dead_letter WHERE event_id = :event_id", event_id=event_id
        )
    assert published["event_type"] == "payment.captured.v1"
    assert published["order_event_id"] == str(event_id)
    assert payment["idempotency_key"] == str(event_id)
    assert [charge["state"] for charge in page["charges"]] == ["captured"]
    assert len(events) == 1
    assert dict(record.headers)["traceparent"].split(b"-")[1] == TRACEPARENT.encode().split(b"-")[1]
    assert inbox["duplicates_absorbed"] >= 2
    assert letters == 0


async def consumed(kafka: KafkaBroker, group: str, place: TopicPartition, offset: int) -> None:
    """Wait until the group has committed that it is past this record."""
    async with AIOKafkaConsumer(
        bootstrap_servers=kafka.bootstrap_servers, group_id=group, enable_auto_commit=False
    ) as consumer:
        consumer.assign([place])
        while (await consumer.committed(place) or 0) <= offset:
            await asyncio.sleep(0.1)
