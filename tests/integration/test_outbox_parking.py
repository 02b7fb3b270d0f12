"""Parking: a refused event steps aside with the later ones of its key, and comes back in order (F12, F13)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from sqlalchemy import text

from chargeonce.stack import KafkaBroker
from shared.lifecycle import State
from shared.outbox.append import EventWriter, bucket_of
from shared.outbox.leases import BucketLeases
from shared.outbox.log import OutboxLog
from shared.outbox.parked_events import discard
from shared.outbox.parking import RefusedEvent, park_behind, park_refused
from shared.outbox.publisher import PublisherSettings
from shared.outbox.relay import SESSIONS
from shared.unit_of_work import UnitsOfWork
from tests.support.outbox import OutboxUnderTest, outbox_under_test, scalar, until

LIMIT_BYTES = 20_000
TOO_LARGE = b"x" * 30_000


@pytest.fixture
async def outbox(database_url: str, kafka: KafkaBroker, unique_name: str) -> AsyncIterator[OutboxUnderTest]:
    async with outbox_under_test(database_url, kafka.bootstrap_servers, unique_name) as made:
        await made.limit_message_bytes(LIMIT_BYTES)
        yield made


def poison(outbox: OutboxUnderTest, key: str, number: int) -> bytes:
    return f"{key}:{number}:".encode() + TOO_LARGE


async def publish_poison(outbox: OutboxUnderTest, key: str, number: int) -> None:
    await outbox.publish(outbox.event(key, number, payload=poison(outbox, key, number)))


async def payloads_of(outbox: OutboxUnderTest, key: str) -> list[bytes]:
    return [record.value for record in await outbox.arrived() if record.key == key.encode()]


async def settled(outbox: OutboxUnderTest, key: str) -> None:
    async with asyncio.timeout(30):
        while await scalar(
            outbox.database,
            "SELECT count(*) FROM outbox_parked WHERE key = :key AND settled_at IS NULL",
            key=key.encode(),
        ):
            await asyncio.sleep(0.02)


async def test_f12_f13_a_refused_event_is_parked_with_the_later_ones_of_its_key_and_all_others_arrive(
    outbox: OutboxUnderTest,
) -> None:
    await outbox.publish(outbox.event("bad", 0))
    await publish_poison(outbox, "bad", 1)
    for number in range(30):
        await outbox.publish(*(outbox.event(f"order-{key}", number) for key in range(60)))
        await outbox.publish(outbox.event("bad", number + 2))
    before = SESSIONS._value.get()
    async with outbox.relay() as relay:
        await outbox.drained()
        await outbox.publish(outbox.event("bad", 32))
        await outbox.drained()
        assert relay.ready().state is State.READY
    assert SESSIONS._value.get() - before < 20, "found by ever smaller batches, not by one producer an event"
    assert await payloads_of(outbox, "bad") == [b"bad:0"]
    assert await outbox.parked() == [
        (poison(outbox, "bad", 1), True, None),
        *((f"bad:{number}".encode(), False, None) for number in range(2, 33)),
    ]
    outbox.published -= len(await outbox.parked())
    outbox.check_order(await outbox.arrived())


async def test_f13_released_events_go_out_in_order_before_newer_ones_of_their_key(outbox: OutboxUnderTest) -> None:
    await publish_poison(outbox, "bad", 0)
    await outbox.publish(*(outbox.event("bad", number) for number in range(1, 50)))
    async with outbox.relay():
        await outbox.drained()
        await outbox.limit_message_bytes(1_000_000)
        await outbox.publish(outbox.event("bad", 50))
        await outbox.release("bad")
        await outbox.publish(*(outbox.event("bad", number) for number in range(51, 60)))
        await outbox.drained()
        await settled(outbox, "bad")
        await outbox.publish(outbox.event("bad", 60))
        await outbox.drained()
    numbers = [int(payload.split(b":")[1]) for payload in await payloads_of(outbox, "bad")]
    assert sorted(set(numbers)) == list(range(61))
    first_copies = list(dict.fromkeys(numbers))
    assert first_copies == list(range(61))
    assert {outcome for _, _, outcome in await outbox.parked()} == {"published"}


async def test_f13_a_released_event_that_is_refused_again_is_parked_again_and_nothing_passes_it(
    outbox: OutboxUnderTest,
) -> None:
    await publish_poison(outbox, "bad", 0)
    await outbox.publish(outbox.event("bad", 1), outbox.event("other", 0))
    async with outbox.relay():
        await outbox.drained()
        await outbox.release("bad")
        async with asyncio.timeout(20):
            while await scalar(outbox.database, "SELECT count(*) FROM outbox_parked WHERE released_at IS NOT NULL"):
                await asyncio.sleep(0.02)
        await outbox.publish(outbox.event("bad", 2), outbox.event("other", 1))
        await outbox.drained()
    assert await payloads_of(outbox, "bad") == []
    assert await payloads_of(outbox, "other") == [b"other:0", b"other:1"]
    assert [outcome for _, _, outcome in await outbox.parked()] == [None] * 3


async def test_f13_a_relay_that_starts_anew_keeps_a_parked_key_waiting(outbox: OutboxUnderTest) -> None:
    await publish_poison(outbox, "bad", 0)
    async with outbox.relay():
        await outbox.drained()
    await outbox.publish(outbox.event("bad", 1))
    async with outbox.relay():
        await outbox.drained()
    assert await payloads_of(outbox, "bad") == []
    assert [payload[:6] for payload, _, _ in await outbox.parked()] == [b"bad:0:", b"bad:1"]


async def test_f12_a_batch_too_large_for_its_topic_parks_nothing_and_later_ones_are_smaller(
    outbox: OutboxUnderTest,
) -> None:
    for _ in range(2):
        start = outbox.published // 20
        for number in range(start, start + 200):
            await outbox.publish(*(outbox.event(f"order-{key}", number) for key in range(20)))
        async with outbox.relay():
            await outbox.drained()
    assert await outbox.parked() == []
    outbox.check_order(await outbox.arrived())


async def test_f12_each_of_several_refused_events_in_a_large_backlog_is_found(outbox: OutboxUnderTest) -> None:
    bad = ["bad-1", "bad-2", "bad-3"]
    for number in range(100):
        if number in (20, 21, 70):
            await publish_poison(outbox, bad[(20, 21, 70).index(number)], 0)
        await outbox.publish(*(outbox.event(f"order-{key}", number) for key in range(20)))
    async with outbox.relay():
        await outbox.drained()
    assert sorted(payload[:5] for payload, refused, _ in await outbox.parked() if refused) == [
        b"bad-1",
        b"bad-2",
        b"bad-3",
    ]
    outbox.published -= 3
    outbox.check_order(await outbox.arrived())


async def test_f12_past_the_limit_nothing_is_parked_any_more_and_the_relay_says_so(outbox: OutboxUnderTest) -> None:
    [first, second] = [key for key in map("bad-{}".format, range(100)) if bucket_of(key.encode()) % 12 == 0][:2]
    await publish_poison(outbox, first, 0)
    await publish_poison(outbox, second, 0)
    async with outbox.relay(park_limit=1) as relay:
        await until(lambda: "must be at fault" in relay.ready().reason)
        assert relay.ready().state is State.DEGRADED
        assert len(await outbox.parked()) == 1
        assert await outbox.unpublished() >= 1
        await outbox.limit_message_bytes(1_000_000)
        await outbox.release(first)
        await outbox.release(second)
        await outbox.drained()
        await settled(outbox, first)
    assert {record.key for record in await outbox.arrived()} == {first.encode(), second.encode()}


async def test_an_event_discarded_before_its_progress_was_recorded_is_not_sent(
    outbox: OutboxUnderTest,
) -> None:
    await outbox.publish(outbox.event("bad", 0), outbox.event("bad", 1))
    async with outbox.database.engine.begin() as connection:
        await connection.execute(
            text(
                "INSERT INTO outbox_parked (bucket, position, event_id, topic, key, event_type, payload, headers, "
                "created_at, reason, settled_at, outcome) SELECT bucket, position, event_id, topic, key, event_type, "
                "payload, headers, created_at, 'test', now(), 'discarded' FROM outbox_event WHERE payload = 'bad:0'"
            )
        )
    async with outbox.relay():
        await outbox.drained()
    assert await payloads_of(outbox, "bad") == [b"bad:1"]


async def test_f5_a_stale_epoch_parks_nothing(outbox: OutboxUnderTest) -> None:
    await outbox.publish(outbox.event("bad", 0))
    leases = BucketLeases(outbox.database, lease_seconds=10)
    await leases.join()
    lease = leases.held[bucket_of(b"bad")]
    async with OutboxLog(outbox.database).connect() as connection:
        assert not await park_refused(connection, leases.owner, RefusedEvent(lease.bucket, 1, lease.epoch - 1, "test"))
        assert await park_behind(connection, leases.owner, [(lease.bucket, lease.epoch - 1, 1)], "test") == set()
        assert await outbox.parked() == []
        assert await park_refused(connection, leases.owner, RefusedEvent(lease.bucket, 1, lease.epoch, "test"))
    assert await outbox.parked() == [(b"bad:0", True, None)]


async def test_f12_a_refused_event_does_not_slow_the_relay_down_afterwards(outbox: OutboxUnderTest) -> None:
    outbox.units = UnitsOfWork(outbox.database, EventWriter())
    await publish_poison(outbox, "bad", 0)
    async with outbox.relay(publishing=PublisherSettings(poll_seconds=0.05)) as relay:
        await outbox.drained()
        for number in range(50):
            await outbox.publish(*(outbox.event(f"order-{key}", number) for key in range(20)))
        await outbox.drained()
        assert not relay._suspects._suspicions


async def test_f13_when_all_that_is_parked_of_a_key_was_discarded_its_newer_events_go_out(
    outbox: OutboxUnderTest,
) -> None:
    await outbox.limit_message_bytes(20_000)
    bad = outbox.event("order-1", 0, payload=b"order-1:0:" + b"x" * 30_000)
    await outbox.publish(bad)
    async with outbox.relay():
        await outbox.drained()
        await discard(outbox.database, bad.event_id, "ada", "too large", dry_run=False)
        await outbox.publish(outbox.event("order-1", 1))
        await outbox.drained()
    assert [record.value for record in await outbox.arrived()] == [b"order-1:1"]
