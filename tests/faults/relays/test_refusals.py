"""What Kafka refuses, and topics that are not as registered: only what must wait waits, and nothing overtakes."""

from __future__ import annotations

import asyncio
import time

from aiokafka.admin import AIOKafkaAdminClient, NewPartitions
from sqlalchemy import text

from chargeonce.stack import Stack
from shared.kafka.topics import TopicSpec, ensure_topics
from shared.lifecycle import State
from shared.outbox.append import bucket_of
from shared.outbox.relay import SESSIONS
from shared.outbox.topics import register_topics
from tests.faults.relays.fleet import eventually
from tests.faults.relays.scenario import Scenario
from tests.support.load import Load
from tests.support.outbox import OutboxUnderTest, outbox_under_test, until
from tests.support.recording import recording

LIMIT_BYTES = 20_000
LONGEST_SEARCH_SECONDS = 2.0
REFUSED = 'outbox_publish_failures_total{kind="refused"}'


async def publish_oversize(load: Load, outbox: OutboxUnderTest, key: str, number: int, size_bytes: int) -> None:
    """Commit an event of this size, and count it as committed."""
    event = outbox.event(key, number, payload=f"{key}:{number}:".encode().ljust(size_bytes, b"x"))
    await outbox.publish(event)
    load.committed[event.event_id] = key, number


async def publish(load: Load, outbox: OutboxUnderTest, key: str, *numbers: int) -> None:
    """Commit events, and count them as committed."""
    for number in numbers:
        event = outbox.event(key, number)
        await outbox.publish(event)
        load.committed[event.event_id] = key, number


async def test_f12_f13_refused_events_step_aside_under_load_and_come_back_in_order(scenario: Scenario) -> None:
    fleet, outbox = scenario.fleet, scenario.outbox
    bad = ["bad-1", "bad-2", "bad-3"]
    await outbox.limit_message_bytes(LIMIT_BYTES)
    load = await scenario.write()
    await fleet.start("one", "two")
    await fleet.sharing("one", "two")
    await load.more(200)
    since = time.time()
    for key in bad:
        await publish(load, outbox, key, 0)
        await publish_oversize(load, outbox, key, 1, 30_000)
        await publish(load, outbox, key, 2, 3)
        await load.more(100)

    async def refused_are_parked() -> bool:
        return sum(refused for _, refused, _ in await outbox.parked()) == len(bad)

    await eventually(refused_are_parked, what="the refused events are parked")
    others = {event_id: told for event_id, told in load.committed.items() if told[0] not in bad or told[1] == 0}
    await scenario.complete(others)
    assert len(await outbox.parked()) == 3 * len(bad)
    await fleet.ready("one", "two")
    for key in bad:
        await publish(load, outbox, key, 4)
    await eventually(lambda: _parked(outbox, 4 * len(bad)), what="newer events are parked behind")
    assert {arrival.number for arrival in scenario.records.arrivals if arrival.key in bad} == {0}

    await outbox.limit_message_bytes(1_000_000)
    for key in bad:
        await publish(load, outbox, key, 5)
        await outbox.release(key)
        await publish(load, outbox, key, 6)
    await load.more(200)
    until_then = time.time()
    await scenario.ends_well()
    assert {outcome for _, _, outcome in await outbox.parked()} == {"published"}
    delays = scenario.records.first_delays(since, until_then, without=bad)
    assert max(delays) < LONGEST_SEARCH_SECONDS, "others hardly wait while the refused one is looked for"


async def _parked(outbox: OutboxUnderTest, count: int) -> bool:
    return len(await outbox.parked()) == count


async def test_f13_a_relay_killed_while_it_publishes_what_was_released_leaves_it_in_order(scenario: Scenario) -> None:
    fleet, outbox = scenario.fleet, scenario.outbox
    await outbox.limit_message_bytes(LIMIT_BYTES)
    load = await scenario.write()
    await fleet.start("one")
    await fleet.sharing("one")
    keys = [f"bad-{number}" for number in range(4)]
    for key in keys:
        await publish_oversize(load, outbox, key, 0, 30_000)
        await publish(load, outbox, key, *range(1, 30))
    await eventually(lambda: _parked(outbox, 30 * len(keys)), what="all of the keys is parked")
    await outbox.limit_message_bytes(1_000_000)
    await fleet.start("two")
    await fleet.sharing("one", "two")
    for key in keys:
        await outbox.release(key)
    async with asyncio.timeout(20):
        while not any(arrival.key in keys for arrival in scenario.records.arrivals):
            await asyncio.sleep(0.001)
    await fleet.kill("one")
    for key in keys:
        await publish(load, outbox, key, 30)
    await fleet.sharing("two")
    await load.more(100)
    await scenario.ends_well()
    assert {outcome for _, _, outcome in await outbox.parked()} == {"published"}


async def test_f46_nothing_overtakes_a_refused_first_batch_of_a_fresh_producer(scenario: Scenario) -> None:
    """One page of one partition makes two batches: the first above the topic's limit, the second below it.

    The ninth key lies in both, so its later events would be there first if the second batch left.
    """
    fleet, outbox = scenario.fleet, scenario.outbox
    keys = _keys_of_one_partition(13)
    await outbox.limit_message_bytes(500_000)
    load = await scenario.write(events_per_second=20.0, keys=["elsewhere"])
    await load.stop()
    for key in keys:
        events = [
            outbox.event(key, number, payload=f"{key}:{number}:".encode().ljust(10_000, b"x")) for number in range(10)
        ]
        await outbox.publish(*events)
        load.committed.update({event.event_id: (key, number) for number, event in enumerate(events)})
    await fleet.start("one")
    await scenario.complete(load.committed)
    assert await fleet.metric("one", REFUSED) >= 1, "the first batch was refused"
    await scenario.ends_well()
    assert await outbox.parked() == [], "no event was at fault"


def _keys_of_one_partition(count: int, partition: int = 5) -> list[str]:
    """Return keys of one partition, in the order of their buckets."""
    found = [key for key in (f"big-{number}" for number in range(1000)) if bucket_of(key.encode()) % 12 == partition]
    return sorted(found[:count], key=lambda key: bucket_of(key.encode()))


async def test_f18_a_partition_count_that_changes_while_relays_run_stops_them_and_no_key_moves(
    scenario: Scenario,
) -> None:
    fleet, outbox, names = scenario.fleet, scenario.outbox, ("one", "two")
    load = await scenario.write(events_per_second=200.0)
    await fleet.start(*names, metadata_age_seconds=3.0)
    await fleet.sharing(*names)
    await load.more(100)
    await _set_partitions(outbox, 24)

    async def refuse(name: str) -> bool:
        return "24 partitions and was registered with 12" in await fleet.reasons(name)

    for name in names:
        await eventually(lambda name=name: refuse(name), 60.0, f"{name} notices")  # type: ignore[misc]
        assert "Nothing is lost" in await fleet.reasons(name)
    async with asyncio.timeout(20):
        before = -1
        while before != (before := len(scenario.records.arrivals)):
            await asyncio.sleep(0.2)
    await load.more(200)
    assert len(scenario.records.arrivals) == before, "nothing is published after it was noticed"
    assert scenario.records.partitions_by_kafkas_rule(12)
    assert await outbox.unpublished() >= 200

    # What the message says: consumers have drained the topic; register the new count, restart the relays.
    await scenario.records.partitions_grew(24)
    for name in names:
        await fleet.terminate(name)
    async with outbox.database.engine.begin() as connection:
        await connection.execute(text("UPDATE outbox_topic SET partitions = 24"))
    await fleet.start(*names)
    await fleet.sharing(*names)
    await load.more(100)
    await scenario.ends_well()
    assert max(arrival.partition for arrival in scenario.records.arrivals) > 11


async def _set_partitions(outbox: OutboxUnderTest, count: int) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=outbox.kafka.bootstrap_servers)
    await admin.start()
    try:
        answer = await admin.create_partitions({outbox.topic: NewPartitions(total_count=count)})
        assert not any(error[1] for error in answer.topic_errors), answer
    finally:
        await admin.close()


async def test_a_topic_that_is_made_after_the_relay_started_is_written_without_a_restart(scenario: Scenario) -> None:
    fleet, outbox = scenario.fleet, scenario.outbox
    later = TopicSpec(f"{outbox.topic}.later", outbox.partitions, 1, 1)
    await register_topics(outbox.database, [later])
    outbox.topic = later.name
    load = await scenario.write()
    await fleet.start("one")

    async def says_so() -> bool:
        reasons = await fleet.reasons("one")
        return later.name in reasons and "`topics` command" in reasons

    await eventually(says_so, what="the relay tells what to do")
    assert await outbox.unpublished() > 0
    await ensure_topics(outbox.kafka, [later])
    async with recording(outbox.kafka.bootstrap_servers, later.name) as records:
        scenario.records = records
        await fleet.sharing("one")
        await fleet.ready("one")
        await load.more(200)
        await scenario.ends_well()


async def test_f53_producers_that_a_relay_abandons_leave_no_task_behind(servers: Stack, unique_name: str) -> None:
    await servers.postgres.create_database(unique_name)
    url, kafka = servers.postgres.url(unique_name), servers.kafka.bootstrap_servers
    async with outbox_under_test(url, kafka, unique_name) as outbox:
        await outbox.limit_message_bytes(LIMIT_BYTES)
        before_relay = asyncio.all_tasks()
        async with outbox.relay() as relay:
            await until(lambda: relay.ready().state is State.READY)
            await outbox.publish(outbox.event("good", 0))
            await outbox.drained()
            at_work, sessions = len(asyncio.all_tasks()), SESSIONS._value.get()
            for key in ("bad-1", "bad-2", "bad-3", "bad-4"):
                good = [outbox.event(f"good-{key}", number) for number in range(50)]
                await outbox.publish(*good, outbox.event(key, 0, payload=b"x" * 30_000))
                await outbox.drained()
            assert SESSIONS._value.get() - sessions >= 4, "each refused event ended a producer"
            await until(lambda: len(asyncio.all_tasks()) <= at_work, what="as many tasks as with the first producer")
        await until(lambda: not asyncio.all_tasks() - before_relay, what="no task of the relay's is left")
    await servers.postgres.drop_database(unique_name)
