"""The consumer while its database or its broker is stopped, frozen or restarted: nothing is lost or handled twice."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import text

from chargeonce.stack import Stack
from shared.lifecycle import READY, State
from shared.unit_of_work import UnitOfWork
from tests.support.inbox import InboxUnderTest, inbox_under_test, payload
from tests.support.outbox import until


@pytest.fixture(scope="module")
async def own_stack(stack_directory: Path, stack: Stack) -> AsyncIterator[Stack]:
    """A stack that these tests may break."""
    own = Stack(stack_directory / "inbox-outages", kafka_settings={"group.min.session.timeout.ms": "1000"})
    async with own:
        yield own
    own.remove()


@pytest.fixture
async def inbox(own_stack: Stack, unique_name: str) -> AsyncIterator[InboxUnderTest]:
    await own_stack.postgres.create_database(unique_name)
    url = own_stack.postgres.url(unique_name)
    async with inbox_under_test(url, own_stack.kafka.bootstrap_servers, unique_name) as made:
        yield made


@contextmanager
def frozen(pid: int | None) -> Iterator[None]:
    """Stop a process from running, as a hung host would."""
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_f38_a_database_restart_in_mid_batch_loses_and_repeats_nothing(
    inbox: InboxUnderTest, own_stack: Stack
) -> None:
    async def linger(work: UnitOfWork) -> None:
        await work.session.execute(text("SELECT pg_sleep(0.1)"))

    inbox.handler.before = linger
    await inbox.produce(*(payload(number) for number in range(1000)))
    async with inbox.consuming(max_batch_records=50) as consumer:
        await inbox.settled(100)
        await own_stack.postgres.stop()
        await until(lambda: consumer.ready().state == State.DEGRADED)
        await own_stack.postgres.start()
        await inbox.settled(400)
        await own_stack.postgres.kill()
        await own_stack.postgres.start()
        await inbox.settled(1000)
        await until(lambda: consumer.ready() == READY)
    assert await inbox.numbers() == list(range(1000))
    assert await inbox.letters() == {}


async def test_readiness_returns_after_a_database_outage_even_without_new_records(
    inbox: InboxUnderTest, own_stack: Stack
) -> None:
    async with inbox.consuming() as consumer:
        await until(lambda: consumer.ready() == READY)
        await own_stack.postgres.stop()
        await inbox.produce(payload(1))
        await until(lambda: consumer.ready().state == State.DEGRADED)
        await own_stack.postgres.start()
        await until(lambda: consumer.ready() == READY)
        await inbox.settled(1)
    assert await inbox.numbers() == [1]


async def test_f38_a_broker_that_stops_and_starts_is_waited_for(inbox: InboxUnderTest, own_stack: Stack) -> None:
    await inbox.produce(*(payload(number) for number in range(100)))
    async with inbox.consuming() as consumer:
        await inbox.settled(100)
        await own_stack.kafka.stop()
        await until(lambda: consumer.ready().state == State.DEGRADED)
        assert "Kafka" in consumer.ready().reason
        await own_stack.kafka.start()
        await inbox.produce(*(payload(number) for number in range(100, 200)))
        await inbox.settled(200)
        await until(lambda: consumer.ready() == READY)
    assert await inbox.numbers() == list(range(200))
    assert (await inbox.summary()).duplicates_absorbed == 0, "it went on from the same position"


async def test_a_consumer_that_starts_without_kafka_finds_it_later(inbox: InboxUnderTest, own_stack: Stack) -> None:
    await inbox.produce(payload(1))
    await own_stack.kafka.stop()
    async with inbox.consuming() as consumer:
        await until(lambda: consumer.ready().state == State.DEGRADED)
        await own_stack.kafka.start()
        await inbox.settled(1)
        await until(lambda: consumer.ready() == READY)


async def test_f22_f53_a_frozen_broker_delays_the_stop_by_its_deadlines_only_and_nothing_is_left_behind(
    inbox: InboxUnderTest, own_stack: Stack
) -> None:
    before = asyncio.all_tasks()
    consumer = inbox.consumer(commit_deadline_seconds=1.0, leave_deadline_seconds=1.0)
    await consumer.start()
    await until(lambda: consumer.ready() == READY)
    with frozen(own_stack.kafka.pid):
        await until(lambda: consumer.ready().state == State.DEGRADED, deadline_seconds=40)
        assert "does not answer" in consumer.ready().reason
        began = time.monotonic()
        await consumer.stop()
        assert time.monotonic() - began < 6
        await until(lambda: asyncio.all_tasks() <= before)


async def test_a_broker_that_was_frozen_for_long_is_joined_anew(inbox: InboxUnderTest, own_stack: Stack) -> None:
    await inbox.produce(payload(1))
    async with inbox.consuming(leave_deadline_seconds=1.0, session_timeout_seconds=2.0) as consumer:
        await inbox.settled(1)
        first = consumer._client
        with frozen(own_stack.kafka.pid):
            await until(lambda: consumer._client is not first, deadline_seconds=40)
        await inbox.produce(payload(2))
        await inbox.settled(2)
        await until(lambda: consumer.ready() == READY)
    assert await inbox.numbers() == [1, 2]
