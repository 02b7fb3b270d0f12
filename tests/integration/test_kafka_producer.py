"""The producer that is used until its first failure: nothing hangs, nothing leaks, nothing overtakes."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from aiokafka.conn import AIOKafkaConnection

from chargeonce.stack import KafkaBroker, free_ports
from shared.errors import KafkaFailure, Refused
from shared.kafka.producer import IdempotentProducer, Record
from shared.kafka.settings import KafkaSettings
from shared.kafka.topics import TopicSpec, ensure_topics


def settings_for(bootstrap_servers: str) -> KafkaSettings:
    return KafkaSettings(bootstrap_servers, client_id="test", request_timeout_seconds=5)


def new_producer(bootstrap_servers: str) -> IdempotentProducer:
    return IdempotentProducer(settings_for(bootstrap_servers), max_batch_bytes=900_000, max_request_bytes=1_048_576)


def record(value: bytes) -> Record:
    return Record(b"key", value, [("event_id", b"1")], datetime.now(UTC))


@pytest.fixture
async def topic(kafka: KafkaBroker, topic_prefix: str) -> str:
    spec = TopicSpec(f"{topic_prefix}sent", 2, 1, 1)
    await ensure_topics(settings_for(kafka.bootstrap_servers), [spec])
    return spec.name


@pytest.fixture
async def frozen_broker(stack_directory: Path, unique_name: str) -> AsyncIterator[KafkaBroker]:
    """A broker of the test's own, which it may freeze."""
    broker = KafkaBroker(stack_directory / unique_name)
    await broker.start()
    yield broker
    await broker.kill()


async def test_f14_starting_without_a_broker_fails_within_its_deadline() -> None:
    [nobody] = free_ports(1)
    producer = new_producer(f"127.0.0.1:{nobody}")
    async with asyncio.timeout(5):
        with pytest.raises(KafkaFailure):
            await producer.start(deadline_seconds=2)
        await producer.abandon()


async def test_f14_f53_a_producer_of_a_frozen_broker_is_abandoned_at_once_and_leaves_no_task(
    frozen_broker: KafkaBroker,
) -> None:
    spec = TopicSpec("t", 1, 1, 1)
    await ensure_topics(settings_for(frozen_broker.bootstrap_servers), [spec])
    before = asyncio.all_tasks()
    producer = new_producer(frozen_broker.bootstrap_servers)
    await producer.start(deadline_seconds=10)
    assert await producer.partition_count("t", deadline_seconds=5) == 1
    os.kill(frozen_broker.pid or 0, signal.SIGSTOP)
    try:
        batch = producer.new_batch("t", 0)
        assert batch.append(record(b"x"))
        handed_over = await producer.hand_over(batch, deadline_seconds=2)
        with pytest.raises(KafkaFailure, match="no acknowledgement"):
            await producer.acknowledged(handed_over, deadline_seconds=0.5)
        async with asyncio.timeout(3):
            await producer.abandon()
    finally:
        os.kill(frozen_broker.pid or 0, signal.SIGCONT)
    await asyncio.sleep(0)
    gc.collect()
    assert not asyncio.all_tasks() - before


async def test_f53_a_start_cancelled_between_two_answers_leaves_no_connection(kafka: KafkaBroker) -> None:
    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = kafka.bootstrap_servers.split(":")
        from_broker, to_broker = await asyncio.open_connection(host, int(port))
        size = await reader.readexactly(4)
        to_broker.write(size + await reader.readexactly(int.from_bytes(size)))
        size = await from_broker.readexactly(4)
        writer.write(size + await from_broker.readexactly(int.from_bytes(size)))
        to_broker.close()
        await reader.read()  # the request for metadata, and the end
        writer.close()

    async with await asyncio.start_server(answer_once, "127.0.0.1", 0) as half_dead:
        port = half_dead.sockets[0].getsockname()[1]
        producer = new_producer(f"127.0.0.1:{port}")
        with pytest.raises(KafkaFailure, match="no producer id"):
            await producer.start(deadline_seconds=1)
        await producer.abandon()
        left = [c for c in gc.get_objects() if isinstance(c, AIOKafkaConnection) and c.port == port and c.connected()]
    assert not left


async def test_f12_a_record_over_the_brokers_limit_is_a_permanent_failure(kafka: KafkaBroker, topic: str) -> None:
    producer = new_producer(kafka.bootstrap_servers)
    await producer.start(deadline_seconds=10)
    try:
        batch = producer.new_batch(topic, 0)
        assert batch.append(record(b"x" * 1_100_000)), "the first record of a batch is always taken"
        handed_over = await producer.hand_over(batch, deadline_seconds=5)
        with pytest.raises(KafkaFailure) as failure:
            await producer.acknowledged(handed_over, deadline_seconds=10)
        assert failure.value.permanent
    finally:
        await producer.abandon()


async def test_a_topic_that_does_not_exist_is_a_failure_within_the_deadline(kafka: KafkaBroker) -> None:
    producer = new_producer(kafka.bootstrap_servers)
    await producer.start(deadline_seconds=10)
    try:
        with pytest.raises(KafkaFailure):
            await producer.partition_count("nobody.made.this", deadline_seconds=1)
    finally:
        await producer.abandon()


async def test_f18_topics_are_made_once_and_another_partition_count_is_refused(
    kafka: KafkaBroker, topic_prefix: str
) -> None:
    name = f"{topic_prefix}made"
    settings = settings_for(kafka.bootstrap_servers)
    await asyncio.gather(*(ensure_topics(settings, [TopicSpec(name, 4, 1, 1)]) for _ in range(3)))
    with pytest.raises(Refused, match="4 partitions and 6 are configured"):
        await ensure_topics(settings, [TopicSpec(name, 6, 1, 1)])


async def test_topics_without_a_broker_fail_within_the_deadline() -> None:
    [nobody] = free_ports(1)
    with pytest.raises(KafkaFailure):
        await ensure_topics(settings_for(f"127.0.0.1:{nobody}"), [TopicSpec("t", 1, 1, 1)], deadline_seconds=2)
