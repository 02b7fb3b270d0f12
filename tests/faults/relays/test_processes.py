"""Relays that join, leave, die and freeze under load: no event is lost and first copies stay in order (F4, F5)."""

from __future__ import annotations

import asyncio
import signal
import time

import asyncpg
import pytest

from shared.failpoints import POINTS
from tests.faults.relays.fleet import LEASE_SECONDS, eventually
from tests.faults.relays.scenario import Scenario
from tests.support.outbox import scalar

# A relay looks for free buckets three times a lease, so those of a dead one are found a third of a lease late.
FOUND_AFTER_SECONDS = LEASE_SECONDS * 4 / 3
WAITING_FOR_LOCK = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'relay' "
    "AND wait_event_type = 'Lock' AND query LIKE '%UPDATE outbox_bucket%'"
)
MOST_OF_ONE_OWNER = "SELECT bool_or(owned > 48) FROM (SELECT count(*) AS owned FROM outbox_bucket GROUP BY lease_owner)"

# For a machine that also runs the broker, the database, the writers and the consumer on two cores.
MARGIN_SECONDS = 4.0


async def test_f4_relays_that_join_and_leave_let_no_key_wait_for_longer_than_a_lease(scenario: Scenario) -> None:
    fleet = scenario.fleet
    await scenario.write()
    await fleet.start("first")
    await fleet.sharing("first")
    await scenario.load.more(200)
    await fleet.ready("first")
    calm_since = time.time()
    await fleet.start("second", "third")
    await fleet.sharing("first", "second", "third")
    await scenario.load.more(400)
    await fleet.terminate("second")
    await fleet.sharing("first", "third")
    await fleet.terminate("first")
    await fleet.sharing("third")
    await scenario.load.more(200)
    calm_until = time.time()
    told = await scenario.ends_well()
    assert told.duplicates == 0, "whoever leaves records what was acknowledged, and gives back only what is settled"
    delays = scenario.records.first_delays(calm_since, calm_until)
    assert len(delays) > 800
    assert max(delays) < LEASE_SECONDS + MARGIN_SECONDS


async def test_f4_two_relays_are_killed_in_turn_until_none_is_left_and_the_order_is_kept(scenario: Scenario) -> None:
    fleet, names = scenario.fleet, ("one", "two")
    await scenario.write()
    await fleet.start(*names)
    await fleet.sharing(*names)
    await scenario.load.more(200)
    since = time.time()
    await fleet.kill("one")
    await fleet.sharing("two")
    await fleet.start("one")
    await fleet.sharing(*names)
    await fleet.kill("two")
    await fleet.sharing("one")
    until = time.time()
    await fleet.kill("one")
    await scenario.load.more(100)
    await fleet.start("new")
    await fleet.sharing("new")
    await scenario.load.more(200)
    await scenario.ends_well()
    assert max(scenario.records.first_delays(since, until)) < FOUND_AFTER_SECONDS + MARGIN_SECONDS


async def test_f4_of_three_relays_one_is_killed_while_another_comes_back_and_the_order_is_kept(
    scenario: Scenario,
) -> None:
    fleet, names = scenario.fleet, ("one", "two", "three")
    await scenario.write()
    await fleet.start(*names)
    await fleet.sharing(*names)
    await scenario.load.more(200)
    since = time.time()
    await fleet.kill("one")
    await fleet.sharing("two", "three")
    await asyncio.gather(fleet.kill("two"), fleet.start("one"))
    await fleet.sharing("one", "three")
    await asyncio.gather(fleet.kill("three"), fleet.start("two"))
    await fleet.sharing("one", "two")
    until = time.time()
    await scenario.load.more(200)
    await scenario.ends_well()
    assert max(scenario.records.first_delays(since, until)) < FOUND_AFTER_SECONDS + MARGIN_SECONDS


@pytest.mark.parametrize("point", [point for point in POINTS if point.startswith("R")])
async def test_a_relay_killed_at_each_of_its_crash_points_is_succeeded_by_another(
    scenario: Scenario, point: str
) -> None:
    fleet = scenario.fleet
    await scenario.write()
    await asyncio.gather(fleet.start("survivor"), fleet.start("doomed", failpoints=f"{point}@50"))
    assert await fleet.ended("doomed") == -signal.SIGKILL, "the point was not reached"
    await fleet.sharing("survivor")
    await scenario.load.more(200)
    await scenario.ends_well()


async def test_f5_a_relay_frozen_while_it_renews_its_leases_is_succeeded_as_soon_as_any_other(
    scenario: Scenario,
) -> None:
    """Its transaction is open then, and holds the locks of the very rows that its successor must take."""
    fleet = scenario.fleet
    holder = await asyncpg.connect(scenario.outbox.dsn)
    try:
        await scenario.write()
        await fleet.start("frozen")
        await fleet.sharing("frozen")
        await scenario.load.more(200)
        transaction = holder.transaction()
        await transaction.start()
        last = await holder.fetchval("SELECT max(bucket) FROM outbox_bucket")
        await holder.execute("SELECT FROM outbox_bucket WHERE bucket = $1 FOR NO KEY UPDATE", last)
        await eventually(
            lambda: scalar(scenario.outbox.database, WAITING_FOR_LOCK), what="the relay waits in mid-renewal"
        )
        since = time.time()
        fleet.signal("frozen", signal.SIGSTOP)
        await transaction.rollback()  # now the server renews, and hears nothing more of this transaction
        await fleet.start("other")
        await fleet.sharing("other")
        until = time.time()
        await scenario.load.more(200)
        fleet.signal("frozen", signal.SIGCONT)
        await fleet.sharing("frozen", "other")
        assert await fleet.metric("frozen", "outbox_leases_lost_total") >= 96
        await scenario.load.more(200)
        await scenario.ends_well()
        assert max(scenario.records.first_delays(since, until)) < FOUND_AFTER_SECONDS + MARGIN_SECONDS
    finally:
        await holder.close()


async def test_f5_a_relay_frozen_past_its_lease_changes_nothing_but_duplicates_and_counts_what_it_lost(
    scenario: Scenario,
) -> None:
    """It wakes up while another takes its buckets over; the test above wakes one long after."""
    fleet = scenario.fleet
    await scenario.write()
    await fleet.start("frozen", "other")
    await fleet.sharing("frozen", "other")
    await scenario.load.more(200)
    before = await fleet.metric("frozen", "outbox_leases_lost_total")
    fleet.signal("frozen", signal.SIGSTOP)
    await eventually(lambda: scalar(scenario.outbox.database, MOST_OF_ONE_OWNER), what="the other begins to take over")
    fleet.signal("frozen", signal.SIGCONT)
    await fleet.sharing("frozen", "other")
    assert await fleet.metric("frozen", "outbox_leases_lost_total") - before >= 48
    await scenario.load.more(400)
    await scenario.ends_well()


async def test_f5_a_clock_that_is_an_hour_off_changes_no_lease(scenario: Scenario) -> None:
    fleet = scenario.fleet
    names = ("right", "fast", "slow")
    await scenario.write()
    await asyncio.gather(
        fleet.start("right"),
        fleet.start("fast", clock_offset_seconds=3600.0),
        fleet.start("slow", clock_offset_seconds=-3600.0),
    )
    await fleet.sharing(*names)
    since = time.time()
    sent = 'outbox_published_events_total{topic="' + scenario.outbox.topic + '"}'

    async def each_published() -> bool:
        return min([await fleet.metric(name, sent) for name in names]) > 300

    await eventually(each_published, what="each relay publishes for longer than a lease")
    async with asyncio.timeout(30):
        while time.time() < since + 2 * LEASE_SECONDS:
            await scenario.load.more(50)
    until = time.time()
    assert [await fleet.metric(name, "outbox_leases_lost_total") for name in names] == [0, 0, 0]
    told_latency = await fleet.metric("fast", "outbox_commit_to_ack_seconds_sum")
    assert told_latency > 3000 * await fleet.metric("fast", sent), "its clock is off indeed"
    await fleet.kill("fast")
    await fleet.sharing("right", "slow")
    killed_until = time.time()
    await scenario.load.more(200)
    await scenario.ends_well()
    assert max(scenario.records.first_delays(since, until)) < LEASE_SECONDS
    assert max(scenario.records.first_delays(until, killed_until)) < FOUND_AFTER_SECONDS + MARGIN_SECONDS
