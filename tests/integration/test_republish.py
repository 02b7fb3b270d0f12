"""Publishing again: the copies are equal, healthy groups absorb them, and a rebuilt one takes them."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from aiokafka import ConsumerRecord
from sqlalchemy import text

from chargeonce.stack import KafkaBroker, free_ports
from shared.errors import KafkaFailure
from shared.identifiers import new_event_id
from shared.inbox.migrations import upgrade_1 as inbox_upgrade_1
from shared.inbox.upkeep import ensure_partitions
from shared.kafka.settings import KafkaSettings
from shared.outbox.republish import Pace, Selection, plan, republish
from shared.unit_of_work import UnitsOfWork
from tests.support.inbox import EffectHandler, InboxUnderTest, payload
from tests.support.outbox import OutboxUnderTest, migrate_with, outbox_under_test

REPOSITORY = Path(__file__).parents[2]
LONG_AGO = datetime.now(UTC) - timedelta(days=20)


@pytest.fixture
async def outbox(database_url: str, kafka: KafkaBroker, unique_name: str) -> AsyncIterator[OutboxUnderTest]:
    async with outbox_under_test(database_url, kafka.bootstrap_servers, unique_name) as made:
        yield made


async def publish_all(outbox: OutboxUnderTest, keys: int = 20, numbers: int = 15) -> None:
    for number in range(numbers):
        await outbox.publish(*(outbox.event(f"order-{key}", number, headers={"x": "1"}) for key in range(keys)))
    async with outbox.relay():
        await outbox.drained()


async def again(outbox: OutboxUnderTest, selection: Selection | None = None) -> int:
    chosen = selection or Selection(LONG_AGO)
    return await republish(outbox.database, outbox.kafka, chosen, Pace(1e6), lambda events: None)


def content(record: ConsumerRecord) -> tuple[object, ...]:
    return record.key, record.value, tuple(record.headers), record.partition, record.timestamp


async def test_copies_are_equal_and_in_order_of_their_key(outbox: OutboxUnderTest) -> None:
    await publish_all(outbox)
    first = [content(record) for record in await outbox.arrived()]
    assert await again(outbox) == 300
    everything = [content(record) for record in await outbox.arrived()]
    for partition in range(outbox.partitions):
        before = [record for record in first if record[3] == partition]
        copies = [record for record in everything if record[3] == partition][len(before) :]
        assert sorted(copies, key=repr) == sorted(before, key=repr)
        for key in {record[0] for record in before}:
            assert [record for record in copies if record[0] == key] == [r for r in before if r[0] == key]


async def test_only_what_was_selected_published_and_is_not_parked_is_sent(outbox: OutboxUnderTest) -> None:
    await publish_all(outbox, keys=4, numbers=3)
    await outbox.publish(outbox.event("order-0", 3))
    async with outbox.database.engine.begin() as connection:
        await connection.execute(
            text(
                "INSERT INTO outbox_parked (bucket, position, event_id, topic, key, event_type, payload, headers, "
                "created_at, reason) SELECT bucket, position, event_id, topic, key, event_type, payload, headers, "
                "created_at, 'test' FROM outbox_event WHERE payload = 'order-1:2'"
            )
        )
    assert (await plan(outbox.database, Selection(LONG_AGO))).events == 11
    assert await again(outbox) == 11
    assert await again(outbox, Selection(LONG_AGO, key="order-2")) == 3
    assert await again(outbox, Selection(LONG_AGO, event_type="other")) == 0
    assert await again(outbox, Selection(datetime.now(UTC) + timedelta(hours=1))) == 0
    assert await again(outbox, Selection(LONG_AGO, until=LONG_AGO)) == 0


async def test_f34_a_healthy_group_absorbs_the_copies_and_a_rebuilt_one_takes_them(
    outbox: OutboxUnderTest, unique_name: str
) -> None:
    await migrate_with(outbox.database, inbox_upgrade_1)
    await ensure_partitions(outbox.database, window_days=3)
    async with outbox.database.engine.begin() as connection:
        await connection.execute(text("CREATE TABLE effect (event_id uuid, number bigint)"))

    def group(name: str) -> InboxUnderTest:
        handler = EffectHandler(outbox.topic)
        units = UnitsOfWork(outbox.database)
        return InboxUnderTest(outbox.database, outbox.kafka, outbox.topic, f"{unique_name}-{name}", handler, units)

    for number in range(50):
        event_id = new_event_id()
        value = payload(number, event_id)
        await outbox.publish(outbox.event(f"order-{number}", 0, event_id=event_id, payload=value))
    async with outbox.relay():
        await outbox.drained()
    healthy = group("healthy")
    async with healthy.consuming():
        await healthy.settled(50)
        assert await again(outbox) == 50
        summary = await healthy.settled(100)
    assert (summary.handled, summary.duplicates_absorbed) == (50, 50)
    rebuilt = group("rebuilt")
    async with rebuilt.consuming():
        summary = await rebuilt.settled(100)
    assert (summary.handled, summary.duplicates_absorbed, summary.dead) == (50, 50, 0)


async def test_without_a_broker_it_fails_and_the_next_run_sends_everything(outbox: OutboxUnderTest) -> None:
    await publish_all(outbox, keys=5, numbers=2)
    [nobody] = free_ports(1)
    cut_off = KafkaSettings(f"127.0.0.1:{nobody}", client_id="test", request_timeout_seconds=1)
    with pytest.raises(KafkaFailure):
        await republish(outbox.database, cut_off, Selection(LONG_AGO), Pace(1e6), lambda events: None)
    assert await again(outbox) == 10


async def test_the_command_tells_what_it_would_do_and_does_it(outbox: OutboxUnderTest) -> None:
    await publish_all(outbox, keys=5, numbers=2)

    async def command(*arguments: str) -> tuple[int | None, str, str]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", "from order_service.cli import main; main()", "outbox", "republish", *arguments),
            env={
                **os.environ,
                "ORDER_SERVICE_DATABASE_URL": outbox.database.settings.url,
                "ORDER_SERVICE_KAFKA_BOOTSTRAP_SERVERS": outbox.kafka.bootstrap_servers,
            },
            cwd=REPOSITORY,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        said, complained = await process.communicate()
        return process.returncode, said.decode(), complained.decode()

    status, said, _ = await command("--since", "1d", "--dry-run")
    assert status == 0
    assert f"10 of test.happened.v1 on {outbox.topic}" in said
    assert "10 events would be published again. Nothing was sent" in said
    assert len(await outbox.arrived()) == 10
    status, said, _ = await command("--since", "1d", "--key", "order-1")
    assert (status, "2 events were published again" in said) == (0, True)
    assert len(await outbox.arrived()) == 12
    status, said, complained = await command("--since", "60d")
    assert (status, said) == (2, "")
    assert "CONSUMERS_DEDUP_WINDOW_DAYS" in complained
    assert "Traceback" not in complained
