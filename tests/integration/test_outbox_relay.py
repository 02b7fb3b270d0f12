"""The relay against a real PostgreSQL and a real Kafka: order, loss, leases, wake-ups."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest
from sqlalchemy import text

from chargeonce.stack import KafkaBroker, free_ports
from shared.kafka.settings import KafkaSettings
from shared.lifecycle import State
from shared.outbox.append import bucket_of
from shared.outbox.publisher import PublisherSettings
from shared.wakeup import Notifier
from tests.support.outbox import OutboxUnderTest, outbox_under_test, scalar, until


@pytest.fixture
async def outbox(database_url: str, kafka: KafkaBroker, unique_name: str) -> AsyncIterator[OutboxUnderTest]:
    async with outbox_under_test(database_url, kafka.bootstrap_servers, unique_name) as made:
        yield made


async def test_every_event_arrives_once_and_in_order_of_its_key(outbox: OutboxUnderTest) -> None:
    for number in range(20):
        await outbox.publish(*(outbox.event(f"order-{key}", number) for key in range(50)))
    async with outbox.relay():
        await outbox.drained()
    assert outbox.check_order(await outbox.arrived()) == 0


async def test_a_record_carries_key_headers_payload_and_lies_where_kafkas_own_partitioner_puts_it(
    outbox: OutboxUnderTest,
) -> None:
    from aiokafka.partitioner import DefaultPartitioner

    event = outbox.event("order-7", 0, headers={"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"})
    await outbox.publish(event)
    async with outbox.relay():
        await outbox.drained()
    [record] = await outbox.arrived()
    assert (record.key, record.value) == (event.key, event.payload)
    assert dict(record.headers) == {
        "event_id": str(event.event_id).encode(),
        "event_type": b"test.happened.v1",
        "traceparent": event.headers["traceparent"].encode(),
    }
    everywhere = list(range(outbox.partitions))
    assert record.partition == DefaultPartitioner()(event.key, everywhere, everywhere)


async def test_events_written_while_the_relay_runs_are_found_by_polling_alone(outbox: OutboxUnderTest) -> None:
    async with outbox.relay(channel="nobody_notifies"):
        for number in range(5):
            await outbox.publish(outbox.event("order-1", number))
            await outbox.drained()
    assert outbox.check_order(await outbox.arrived()) == 0


async def test_f9_a_notify_after_the_commit_wakes_the_relay_long_before_its_poll(outbox: OutboxUnderTest) -> None:
    notifier = Notifier(outbox.dsn, "outbox_event")
    await notifier.start()
    outbox.units._writer.signal = notifier.signal  # type: ignore[union-attr]
    async with outbox.relay(poll_seconds=30.0):
        await until(lambda: notifier.ready().state == "ready")
        await asyncio.sleep(1.5)  # long enough for the poll to have backed off to its 30 s
        await outbox.publish(outbox.event("order-1", 0))
        await outbox.drained(deadline_seconds=5)
    await notifier.stop()
    assert len(await outbox.arrived()) == 1


async def test_f4_relays_that_join_and_leave_share_the_buckets_and_keep_the_order(outbox: OutboxUnderTest) -> None:
    numbers = iter(range(10_000))

    async def write() -> None:
        for _ in range(60):
            number = next(numbers)
            await outbox.publish(*(outbox.event(f"order-{key}", number) for key in range(40)))

    async with outbox.relay() as one:
        first = one._leases
        writing = asyncio.create_task(write())
        async with outbox.relay() as two, outbox.relay() as three:
            second, third = two._leases, three._leases
            await until(lambda: min(len(first.held), len(second.held), len(third.held)) >= 30, what="fair shares")
            assert set(first.held).isdisjoint(second.held)
        await until(lambda: len(first.held) == 96, what="the buckets of those that left")
        await writing
        await outbox.drained()
    outbox.check_order(await outbox.arrived())


async def test_f5_progress_of_a_stale_epoch_is_not_recorded(outbox: OutboxUnderTest) -> None:
    from shared.outbox.log import OutboxLog

    await outbox.publish(outbox.event("order-1", 0))
    async with outbox.relay() as relay:
        leases = relay._leases
        await outbox.drained()
        log = OutboxLog(outbox.database)
        bucket, lease = next(iter(leases.held.items()))
        async with log.progress_writer() as progress:
            assert await progress.write(leases.owner, [(bucket, lease.epoch - 1, 10**9)]) == set()
            assert await progress.write(leases.owner, [(bucket, lease.epoch, 10**9)]) == {bucket}


async def test_f3_a_held_snapshot_and_an_open_writer_elsewhere_delay_no_other_key(outbox: OutboxUnderTest) -> None:
    holder = await asyncpg.connect(outbox.dsn)
    writer = await asyncpg.connect(outbox.dsn)
    try:
        snapshot = holder.transaction(isolation="repeatable_read")
        await snapshot.start()
        await holder.fetchval("SELECT count(*) FROM outbox_event")
        held = writer.transaction()
        await held.start()
        await writer.execute(
            "INSERT INTO outbox_event (event_id, bucket, topic, key, event_type, payload) "
            "VALUES (gen_random_uuid(), 95, $1, 'held', 't', 'held:0')",
            outbox.topic,
        )
        async with outbox.relay():
            others = [key for key in (f"order-{number}" for number in range(60)) if bucket_of(key.encode()) != 95][:30]
            await outbox.publish(*(outbox.event(key, 0) for key in others))
            await outbox.drained(deadline_seconds=10)
            await held.commit()
            outbox.published += 1
            await outbox.drained(deadline_seconds=10)
        await snapshot.rollback()
    finally:
        await holder.close()
        await writer.close()
    arrived = [record for record in await outbox.arrived() if record.key != b"held"]
    assert len(arrived) == 30


async def test_f52_a_sequence_below_the_cursor_is_refused_with_what_to_do(outbox: OutboxUnderTest) -> None:
    from shared.outbox.backlog import refusal
    from shared.outbox.log import OutboxLog

    await outbox.publish(*(outbox.event("order-1", number) for number in range(10)))
    async with outbox.relay():
        await outbox.drained()
    await outbox.publish(*(outbox.event("order-1", number) for number in range(10, 20)))
    log = OutboxLog(outbox.database)
    async with log.connect() as connection:
        assert await refusal(connection) is None
        await connection.exec_driver_sql("SELECT setval('outbox_event_position', 1, false)")  # rows without sequences
        remedy = re.search(r"SELECT setval\('outbox_event_position', 20\)", await refusal(connection) or "")
        assert remedy, "the positions of events that still wait count too"
        await connection.exec_driver_sql(remedy.group())
        assert await refusal(connection) is None
    await outbox.publish(*(outbox.event("order-1", number) for number in range(20, 25)))
    async with outbox.relay():
        await outbox.drained()
    outbox.check_order(await outbox.arrived())


async def test_f52_a_sequence_that_falls_behind_while_the_relay_runs_stops_it(outbox: OutboxUnderTest) -> None:
    await outbox.publish(outbox.event("order-1", 0), outbox.event("order-1", 1))
    async with outbox.relay(publishing=PublisherSettings(check_seconds=0.1, poll_seconds=0.05)) as relay:
        await outbox.drained()
        await scalar(outbox.database, "SELECT setval('outbox_event_position', 1, false)")
        await until(lambda: relay.ready().state is State.DOWN and "setval" in relay.ready().reason)


async def test_f52_rows_without_any_progress_and_a_fresh_sequence_are_refused(outbox: OutboxUnderTest) -> None:
    from shared.outbox.backlog import refusal
    from shared.outbox.log import OutboxLog

    await outbox.publish(outbox.event("order-1", 0))
    async with OutboxLog(outbox.database).connect() as connection:
        await connection.exec_driver_sql("SELECT setval('outbox_event_position', 1, false)")
        assert "setval('outbox_event_position', 1)" in (await refusal(connection) or "")


async def test_a_relay_that_cannot_publish_leaves_the_buckets_to_one_that_can(outbox: OutboxUnderTest) -> None:
    [nobody] = free_ports(1)
    cut_off = KafkaSettings(f"127.0.0.1:{nobody}", client_id="cut-off")
    await outbox.publish(*(outbox.event(f"order-{key}", 0) for key in range(40)))
    async with outbox.relay(kafka=cut_off) as idle:
        await until(lambda: idle.ready().state is State.DEGRADED)
        async with outbox.relay():
            await outbox.drained(deadline_seconds=15)
        assert "none is lost" in idle.ready().reason
    outbox.check_order(await outbox.arrived())


async def test_f15_a_relay_that_lost_its_broker_gives_its_buckets_back(
    database_url: str, stack_directory: Path, unique_name: str
) -> None:
    broker = KafkaBroker(stack_directory / unique_name)
    await broker.start()
    try:
        async with outbox_under_test(database_url, broker.bootstrap_servers, unique_name) as outbox:
            settings = PublisherSettings(poll_seconds=0.05, delivery_deadline_seconds=1.0)
            async with outbox.relay(publishing=settings) as relay:
                await outbox.publish(outbox.event("order-1", 0))
                await outbox.drained()
                await broker.kill()
                await outbox.publish(outbox.event("order-1", 1))
                await until(lambda: relay.ready().state is State.DEGRADED)
                held = "SELECT count(*) FROM outbox_bucket WHERE lease_owner IS NOT NULL"
                async with asyncio.timeout(20):
                    while await scalar(outbox.database, held):
                        await asyncio.sleep(0.05)
                await broker.start()
                await outbox.drained()
                await until(lambda: relay.ready().state is State.READY)
            outbox.check_order(await outbox.arrived())
    finally:
        await broker.kill()


async def test_f18_a_topic_with_another_partition_count_than_registered_is_refused(outbox: OutboxUnderTest) -> None:
    await outbox.publish(outbox.event("order-1", 0))
    await scalar(outbox.database, "UPDATE outbox_topic SET partitions = 6 RETURNING 1", commit=True)
    async with outbox.relay() as relay:
        await until(lambda: "partitions" in relay.ready().reason)
        assert relay.ready().state is State.DOWN
        assert "has 12 partitions and was registered with 6" in relay.ready().reason
        assert not await outbox.arrived()
    assert await outbox.unpublished() == 1


async def test_the_backlog_is_measured_with_the_oldest_of_all_buckets(outbox: OutboxUnderTest) -> None:
    from shared.outbox.backlog import measure_backlog
    from shared.outbox.log import OutboxLog

    await outbox.publish(outbox.event("order-old", 0))
    last, first = 95, 0
    insert = text(
        "INSERT INTO outbox_event (event_id, bucket, topic, key, event_type, payload, created_at) "
        "SELECT gen_random_uuid(), :bucket, 't', 'k', 'e', 'p', now() - make_interval(secs => :age) "
        "FROM generate_series(1, :rows)"
    )
    assert bucket_of(b"order-old") not in (first, last)
    async with OutboxLog(outbox.database).connect() as connection:
        await connection.execute(insert, {"bucket": last, "age": 3600.0, "rows": 1})
        await connection.execute(insert, {"bucket": first, "age": 0.0, "rows": 510})
        exact = await measure_backlog(connection)
        bounded = await measure_backlog(connection, most=100)
    assert (exact.events, exact.at_least) == (512, False)
    assert (bounded.events, bounded.at_least) == (100, True)
    assert min(exact.oldest_age_seconds, bounded.oldest_age_seconds) > 3000


@pytest.mark.parametrize("damage", ["DISABLE TRIGGER outbox_event_draw_position", "DISABLE TRIGGER ALL"])
async def test_f52_a_log_without_its_trigger_is_refused(outbox: OutboxUnderTest, damage: str) -> None:
    from shared.outbox.backlog import refusal
    from shared.outbox.log import OutboxLog

    async with OutboxLog(outbox.database).connect() as connection:
        await connection.exec_driver_sql(f"ALTER TABLE outbox_event {damage}")
        remedy = re.search("ALTER TABLE .* ENABLE TRIGGER outbox_event_draw_position", await refusal(connection) or "")
        assert remedy
        await connection.exec_driver_sql(remedy.group())
        assert await refusal(connection) is None
        await connection.exec_driver_sql("DROP TRIGGER outbox_event_draw_position ON outbox_event")
        assert "missing" in (await refusal(connection) or "")


async def test_f52_a_sequence_with_a_cache_is_refused(outbox: OutboxUnderTest) -> None:
    from shared.outbox.backlog import refusal
    from shared.outbox.log import OutboxLog

    async with OutboxLog(outbox.database).connect() as connection:
        await connection.exec_driver_sql("ALTER SEQUENCE outbox_event_position CACHE 50")
        assert "CACHE 1" in (await refusal(connection) or "")


async def test_an_event_of_an_unregistered_topic_fails_its_transaction(outbox: OutboxUnderTest) -> None:
    from shared.errors import Refused

    with pytest.raises(Refused, match="not registered"):
        await outbox.publish(outbox.event("order-1", 0), outbox.event("order-1", 1, topic="nobody.knows"))
    assert await scalar(outbox.database, "SELECT count(*) FROM outbox_event") == 0
