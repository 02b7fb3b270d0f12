"""What a relay must bear when much is parked, when leases move, and when a row is not what the kit writes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from sqlalchemy import text

from chargeonce.stack import KafkaBroker
from shared.outbox.leases import BucketLeases
from shared.outbox.log import OutboxLog, relay_database
from shared.outbox.parking import park_behind, read_aside, read_released, settle_published
from tests.support.outbox import OutboxUnderTest, database_settings, outbox_under_test

EVERY_BUCKET = range(96)
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
                await read_aside(relay, EVERY_BUCKET)
                await read_released(relay, EVERY_BUCKET, MOST_BYTES)
                await settle_published(relay, leases.owner, [(1, epochs[1], 1)])
            await writer.execute(_APPEND_MANY, {"topic": outbox.topic, "keys": keys})
            places = (await writer.execute(text("SELECT bucket, position FROM outbox_event ORDER BY 1, 2"))).all()
            for start in range(0, 20_000, 4_800):
                waiting = [(b, epochs[b], position) for b, position in places[start : min(start + 4_800, 20_000)]]
                await park_behind(relay, leases.owner, waiting, "waits")
            assert len((await read_aside(relay, EVERY_BUCKET)).blocked[0]) == (1 if keys == 1 else 1 + 1999 // 96)
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
