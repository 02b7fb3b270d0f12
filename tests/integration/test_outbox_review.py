"""What a relay must bear when much is parked, when leases move, and when a row is not what the kit writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from uuid import uuid4

import pytest
from sqlalchemy import text

from chargeonce.stack import KafkaBroker
from shared.lifecycle import State, running
from shared.outbox.append import bucket_of
from shared.outbox.bootstrap import OutboxSettings, relay_services
from shared.outbox.gate import BATCHES
from shared.outbox.leases import BucketLeases
from shared.outbox.log import OutboxLog, relay_database
from shared.outbox.parking import park_behind, read_aside, read_released, settle_published
from shared.outbox.relay import SESSIONS, STATE, Relay
from tests.support.outbox import OutboxUnderTest, database_settings, outbox_under_test, scalar, until

EVERY_BUCKET = range(96)
FROM_THE_START = dict.fromkeys(EVERY_BUCKET, 0)
MOST_BYTES = 16_000_000


@pytest.fixture
async def outbox(database_url: str, kafka: KafkaBroker, unique_name: str) -> AsyncIterator[OutboxUnderTest]:
    async with outbox_under_test(database_url, kafka.bootstrap_servers, unique_name) as made:
        yield made


@pytest.mark.parametrize("keys", [1, 2000])
async def test_f8_20k_parked_events_are_parked_released_and_settled_within_the_relays_time_limit(
    outbox: OutboxUnderTest, keys: int
) -> None:
    """The plans are made while the tables are empty and analysed: joins of rows with rows would be quadratic."""
    pool = relay_database(database_settings(outbox.database.settings.url), lease_seconds=10.0)
    leases = BucketLeases(pool, lease_seconds=3600.0)
    await leases.join()
    epochs = {number: lease.epoch for number, lease in leases.held.items()}
    try:
        async with OutboxLog(pool).connect() as relay, OutboxLog(outbox.database).connect() as writer:
            for table in ("outbox_event", "outbox_parked", "outbox_progress", "outbox_bucket"):
                await writer.execute(text(f"VACUUM ANALYZE {table}"))
            for _ in range(6):  # PostgreSQL makes the plan that it keeps
                await park_behind(relay, leases.owner, [(1, epochs[1], 1)], "waits")
                await read_aside(relay, FROM_THE_START)
                await read_released(relay, EVERY_BUCKET, MOST_BYTES)
                await settle_published(relay, leases.owner, [(1, epochs[1], 1)])
            await writer.execute(_APPEND_MANY, {"topic": outbox.topic, "keys": keys})
            places = (await writer.execute(text("SELECT bucket, position FROM outbox_event ORDER BY 1, 2"))).all()
            for start in range(0, 20_000, 4_800):
                waiting = [(b, epochs[b], position) for b, position in places[start : min(start + 4_800, 20_000)]]
                await park_behind(relay, leases.owner, waiting, "waits")
            assert len((await read_aside(relay, FROM_THE_START)).blocked[0]) == (1 if keys == 1 else 1 + 1999 // 96)
            assert not (await read_released(relay, EVERY_BUCKET, MOST_BYTES)).events
            await writer.execute(text("UPDATE outbox_parked SET released_at = now()"))
            released = await read_released(relay, EVERY_BUCKET, MOST_BYTES)
            assert [event[:2] for event in released.events] == places[:20_000]
            assert len(released.whole_keys) == len({(event.bucket, event.key) for event in released.events})
            published = [(event.bucket, epochs[event.bucket], event.position) for event in released.events]
            await settle_published(relay, leases.owner, published)
            assert not (await read_released(relay, EVERY_BUCKET, MOST_BYTES)).events
    finally:
        await pool.close()


_APPEND_MANY = text("""
    INSERT INTO outbox_event (event_id, bucket, topic, key, event_type, payload)
    SELECT gen_random_uuid(), (n % :keys) % 96, :topic, convert_to('key-' || (n % :keys), 'UTF8'), 'test.happened.v1',
           convert_to(repeat('x', 400), 'UTF8')
    FROM generate_series(1, 60000) AS n
""")


def keys_of(buckets: range, partition: int) -> list[str]:
    """Return keys of buckets that lie in this partition of a topic with twelve."""
    keys = (f"order-{number}" for number in range(2000))
    return [key for key in keys if bucket_of(key.encode()) in buckets and bucket_of(key.encode()) % 12 == partition]


async def test_f12_a_refused_event_whose_followers_are_parked_slows_its_partition_down_no_longer(
    outbox: OutboxUnderTest,
) -> None:
    await outbox.limit_message_bytes(20_000)
    poisoned = keys_of(range(12), 0)[0]
    payload = f"{poisoned}:0:".encode() + b"x" * 30_000
    await outbox.publish(outbox.event(poisoned, 0, payload=payload), outbox.event(poisoned, 1))
    async with outbox.relay():
        await outbox.drained()
        before = BATCHES._value.get()
        await outbox.publish(*(outbox.event(key, 0) for key in keys_of(range(12, 96), 0)[:100]))
        await outbox.drained()
        await until(lambda: BATCHES._value.get() > before)
    assert len(await outbox.parked()) == 2
    assert BATCHES._value.get() - before < 20


async def test_f12_what_a_topic_takes_is_learned_however_little_it_is(outbox: OutboxUnderTest) -> None:
    await outbox.limit_message_bytes(4_000)
    sessions = []
    async with outbox.relay():
        for number in range(3):
            sessions.append(SESSIONS._value.get())
            await outbox.publish(*(outbox.event(key, number) for key in keys_of(range(96), 0)[:150]))
            await outbox.drained()
    assert SESSIONS._value.get() == sessions[-1], "in the end nothing is refused"
    assert await outbox.parked() == []
    outbox.check_order(await outbox.arrived())


async def test_f12_a_suspicion_ends_with_the_lease_of_its_bucket(outbox: OutboxUnderTest) -> None:
    """Between two producers a bucket may go to another relay, and what was suspected of it goes with it."""
    pool = relay_database(database_settings(outbox.database.settings.url), lease_seconds=3.0)
    services = relay_services(pool, settings_of(outbox))
    [relay] = [service for service in services if isinstance(service, Relay)]
    place = (outbox.topic, 0)
    relay._suspects.refused(place, {0: 1_000_000}, 3, 5_000)
    async with outbox.database.engine.begin() as connection:
        await connection.execute(
            text(
                "UPDATE outbox_bucket SET lease_owner = :owner, lease_epoch = 1, lease_expires_at = now() + '1 hour' "
                "WHERE bucket = 0"
            ),
            {"owner": uuid4()},
        )
    try:
        async with running(services):
            await outbox.publish(outbox.event(keys_of(range(12, 13), 0)[0], 0))
            await outbox.drained()
            assert relay._suspects.most_records(place) is None
    finally:
        await pool.close()


def settings_of(outbox: OutboxUnderTest) -> OutboxSettings:
    return OutboxSettings(
        listen_dsn=outbox.dsn,
        channel="outbox_event",
        kafka=outbox.kafka,
        lease_seconds=3.0,
        poll_seconds=0.1,
        delivery_deadline_seconds=45.0,
        retention_hours=72.0,
    )


async def test_f12_f13_past_the_limit_a_released_event_that_is_refused_again_is_parked_again(
    outbox: OutboxUnderTest,
) -> None:
    """Or nobody could discard it, for it is released, and nothing else of its partition would leave."""
    await outbox.limit_message_bytes(20_000)
    await outbox.publish(outbox.event("bad", 0, payload=b"bad:0:" + b"x" * 30_000))
    async with outbox.relay(park_limit=1):
        await outbox.drained()
        await outbox.release("bad")
        async with asyncio.timeout(20):
            while await scalar(outbox.database, "SELECT count(*) FROM outbox_parked WHERE released_at IS NOT NULL"):
                await asyncio.sleep(0.02)
        await outbox.publish(outbox.event("other", 0))
        await outbox.drained()


async def test_f12_headers_that_are_no_strings_stop_nobody(outbox: OutboxUnderTest) -> None:
    await insert_headers(outbox, '{"attempt": 3, "nothing": null, "text": "as it is"}')
    async with outbox.relay():
        await outbox.drained()
    [record] = await outbox.arrived()
    assert record.headers[2:] == (("text", b"as it is"), ("attempt", b"3"), ("nothing", b"null"))


@pytest.mark.parametrize("headers", ["[]", "3", '"x"'])
async def test_f12_a_row_of_which_no_record_can_be_made_steps_aside_alone(
    outbox: OutboxUnderTest, headers: str
) -> None:
    await insert_headers(outbox, headers)  # no kit writes that
    await outbox.publish(*(outbox.event(f"order-{key}", 0) for key in range(20)))
    async with outbox.relay():
        await outbox.drained()
    assert len(await outbox.arrived()) == 20
    [(payload, refused, _)] = await outbox.parked()
    assert (payload, refused) == (b"k:0", True)


async def test_f38_a_failure_that_comes_back_with_each_producer_is_met_with_growing_pauses_and_told(
    outbox: OutboxUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr("shared.outbox.log.LogReader.read", fail)
    before = SESSIONS._value.get()
    async with outbox.relay() as relay:
        await until(lambda: SESSIONS._value.get() > before + 2)
        readiness, told = set(), set()
        for _ in range(300):
            readiness.add(relay.ready().state)
            told.add(STATE._states[STATE._value])
            await asyncio.sleep(0.01)
        assert State.READY not in readiness
        assert "waiting" in told
    assert SESSIONS._value.get() - before < 9


async def insert_headers(outbox: OutboxUnderTest, headers: str) -> None:
    """Write an event past the kit."""
    async with outbox.database.engine.begin() as connection:
        await connection.execute(
            text(
                "INSERT INTO outbox_event (event_id, bucket, topic, key, event_type, payload, headers) "
                "VALUES (gen_random_uuid(), 7, :topic, 'k', 'test.happened.v1', 'k:0', CAST(:headers AS jsonb))"
            ),
            {"topic": outbox.topic, "headers": headers},
        )


async def test_f38_a_relay_that_cannot_reach_its_database_leaves_its_leases_to_expire(outbox: OutboxUnderTest) -> None:
    """The driver's own errors when it connects are not SQLAlchemy's."""
    settings = outbox.database.settings
    nowhere = relay_database(replace(settings, url=settings.url + "_gone"), lease_seconds=3.0)
    [relay] = [service for service in relay_services(nowhere, settings_of(outbox)) if isinstance(service, Relay)]
    await relay._leave()


async def test_f5_a_relay_that_gives_up_what_another_took_meanwhile_counts_it_as_lost(outbox: OutboxUnderTest) -> None:
    pool = relay_database(database_settings(outbox.database.settings.url), lease_seconds=30.0)
    leases = BucketLeases(pool, 30.0)
    try:
        await leases.join()
        async with outbox.database.engine.begin() as connection:
            await connection.execute(
                text("UPDATE outbox_bucket SET lease_owner = :owner, lease_epoch = 9 WHERE bucket IN (3, 4, 5)"),
                {"owner": uuid4()},
            )
        assert await leases.release([2, 3]) == {3}
        assert await leases.leave() == {4, 5}
        assert await leases.leave() == set()
    finally:
        await pool.close()
