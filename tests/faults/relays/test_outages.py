"""Kafka, PostgreSQL and single connections that go away under load: relays wait, come back and lose nothing."""

from __future__ import annotations

import asyncio
import time

import asyncpg

from shared.outbox.append import bucket_of
from tests.faults.relays.fleet import LEASE_SECONDS, eventually
from tests.faults.relays.scenario import Scenario
from tests.support.load import keys_of_every_bucket

OUTAGE_SECONDS = 60.0
LISTENERS = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'chargeonce listener'"
CUT_LISTENERS = (
    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'chargeonce listener'"
)


async def test_f14_f15_the_broker_is_stopped_for_a_minute_under_load(scenario: Scenario) -> None:
    fleet, broker = scenario.fleet, scenario.servers.kafka
    await scenario.write(events_per_second=200.0)
    await fleet.start("one", "two")
    await fleet.sharing("one", "two")
    await scenario.load.more(200)
    stopped_at = time.monotonic()
    await broker.stop()
    written = len(scenario.load.committed)

    async def both_say_so() -> bool:
        return all(["none is lost" in await fleet.reasons(name) for name in ("one", "two")])

    await eventually(both_say_so, OUTAGE_SECONDS, "both relays say that Kafka takes nothing")
    await asyncio.sleep(stopped_at + OUTAGE_SECONDS - time.monotonic())
    assert len(scenario.load.committed) > written + 0.5 * 200 * OUTAGE_SECONDS, "writers do not notice"
    await broker.start()
    await fleet.sharing("one", "two")
    await fleet.ready("one", "two")
    assert await scenario.outbox.parked() == [], "an outage is no event's fault"
    await scenario.load.more(200)
    await scenario.ends_well()


async def test_f15_the_broker_is_killed_under_load_and_comes_back(scenario: Scenario) -> None:
    fleet, broker = scenario.fleet, scenario.servers.kafka
    await scenario.write()
    await fleet.start("one", "two")
    await fleet.sharing("one", "two")
    await scenario.load.more(200)
    await broker.kill()
    await scenario.load.more(200)
    await broker.start()
    await fleet.sharing("one", "two")
    await fleet.ready("one", "two")
    await scenario.load.more(200)
    await scenario.ends_well()


async def test_f38_postgresql_is_restarted_under_load_and_relays_come_back(scenario: Scenario) -> None:
    fleet = scenario.fleet
    await scenario.write()
    await fleet.start("one", "two")
    await fleet.sharing("one", "two")
    await scenario.load.more(200)
    await scenario.servers.postgres.restart()
    await scenario.load.more(200)
    await fleet.sharing("one", "two")
    await fleet.ready("one", "two")
    await scenario.load.more(200)
    assert scenario.load.retries, "the writers noticed"
    await scenario.ends_well()


async def test_f38_postgresql_is_killed_under_load_and_stays_away_for_longer_than_the_leases(
    scenario: Scenario,
) -> None:
    fleet, database = scenario.fleet, scenario.servers.postgres
    await scenario.write()
    await fleet.start("one", "two")
    await fleet.sharing("one", "two")
    await scenario.load.more(200)
    killed_at = time.monotonic()
    await database.kill()

    async def both_say_so() -> bool:
        return all([await fleet.reasons(name) for name in ("one", "two")])

    await eventually(both_say_so, what="both relays say that something is the matter")
    await asyncio.sleep(killed_at + 1.5 * LEASE_SECONDS - time.monotonic())
    await database.start()
    await fleet.sharing("one", "two")
    await fleet.ready("one", "two")
    await scenario.load.more(200)
    assert scenario.load.retries, "the writers noticed"
    await scenario.ends_well()


async def test_f10_a_listener_whose_connection_is_cut_is_back_soon_and_polling_finds_all_meanwhile(
    scenario: Scenario,
) -> None:
    fleet = scenario.fleet
    administrator = await asyncpg.connect(scenario.outbox.dsn)
    try:
        await scenario.write()
        await fleet.start("one", "two", poll_seconds=0.5)
        await fleet.sharing("one", "two")
        await scenario.load.more(200)
        await fleet.ready("one", "two")
        since = time.time()
        assert await administrator.fetchval(CUT_LISTENERS) == 2
        await scenario.load.more(400)

        async def both_listen() -> bool:
            return bool(await administrator.fetchval(LISTENERS) == 2)

        await eventually(both_listen, what="both listen again")
        until = time.time()
        await fleet.ready("one", "two")
        await scenario.ends_well()
        assert max(scenario.records.first_delays(since, until)) < 1.5
    finally:
        await administrator.close()


async def test_f3_an_open_write_transaction_and_a_held_snapshot_delay_nobody_else(scenario: Scenario) -> None:
    fleet, held_key = scenario.fleet, "held"
    holder = await asyncpg.connect(scenario.outbox.dsn)
    writer = await asyncpg.connect(scenario.outbox.dsn)
    try:
        await scenario.write(keys=keys_of_every_bucket(2, without=[bucket_of(held_key.encode())]))
        await fleet.start("one", "two")
        await fleet.sharing("one", "two")
        await scenario.load.more(200)
        snapshot = holder.transaction(isolation="repeatable_read")
        await snapshot.start()
        await holder.fetchval("SELECT count(*) FROM outbox_event")
        held = writer.transaction()
        await held.start()
        event = scenario.outbox.event(held_key, 0)
        await writer.execute(
            "INSERT INTO outbox_event (event_id, bucket, topic, key, event_type, payload) "
            "VALUES ($1, $2, $3, $4, $5, $6)",
            *(event.event_id, bucket_of(event.key), event.topic, event.key, event.event_type, event.payload),
        )
        since = time.time()
        await scenario.load.more(1200)
        until = time.time()
        assert event.event_id not in scenario.records.seen
        await held.commit()
        scenario.load.committed[event.event_id] = held_key, 0
        await scenario.load.more(100)
        await scenario.complete(dict(scenario.load.committed))
        await snapshot.rollback()
        await scenario.ends_well()
        assert max(scenario.records.first_delays(since, until)) < 1.0
    finally:
        await holder.close()
        await writer.close()
