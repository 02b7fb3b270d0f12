"""The consumer against a real PostgreSQL and a real Kafka: what is in the topic is handled once, whatever fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import asyncpg
import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import CommitFailedError, IllegalStateError
from prometheus_client import REGISTRY
from sqlalchemy import text

from chargeonce.stack import KafkaBroker
from shared.errors import KafkaFailure
from shared.inbox.window import WindowCheck
from shared.kafka.consumer import GroupConsumer
from shared.kafka.settings import KafkaSettings
from shared.kafka.topics import DAY_MILLISECONDS, TopicRetention, topic_retention
from shared.lifecycle import READY, State, running
from shared.unit_of_work import UnitOfWork
from tests.support.inbox import PARTITIONS, InboxUnderTest, inbox_under_test, payload
from tests.support.outbox import until


@pytest.fixture
async def inbox(database_url: str, kafka: KafkaBroker, unique_name: str) -> AsyncIterator[InboxUnderTest]:
    async with inbox_under_test(database_url, kafka.bootstrap_servers, unique_name) as made:
        yield made


def client_of(consumer: Any) -> GroupConsumer:
    """The membership a running consumer holds now."""
    client = consumer._client
    assert isinstance(client, GroupConsumer)
    return client


def epoch_of(consumer: Any) -> int:
    """How many assignments the consumer has had since it joined."""
    return consumer._client.epoch if consumer._client else 0


def assigned_to(consumer: Any) -> int:
    """How many partitions the consumer has."""
    return len(consumer._client._consumer.assignment()) if consumer._client else 0


async def committed(inbox: InboxUnderTest) -> int:
    """Sum of the group's committed offsets, as the broker tells another client."""
    from aiokafka.admin import AIOKafkaAdminClient

    admin = AIOKafkaAdminClient(bootstrap_servers=inbox.kafka.bootstrap_servers)
    await admin.start()
    try:
        offsets = await admin.list_consumer_group_offsets(inbox.group)
        return sum(offset.offset for offset in offsets.values())
    finally:
        await admin.close()


async def kill_backends(inbox: InboxUnderTest) -> None:
    connection = await asyncpg.connect(inbox.database.dsn)
    try:
        await connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
    finally:
        await connection.close()


async def test_every_event_is_handled_once_and_the_offsets_are_committed_behind_them(inbox: InboxUnderTest) -> None:
    await inbox.produce(*(payload(number) for number in range(500)))
    async with inbox.consuming(max_batch_records=100) as consumer:
        await until(lambda: consumer._client is not None)
        commits = 0
        real = client_of(consumer)._consumer.commit

        async def count(offsets: object) -> None:
            nonlocal commits
            commits += 1
            await real(offsets)

        client_of(consumer)._consumer.commit = count
        await inbox.settled(500)
        await until(lambda: consumer.ready() == READY)
    assert await inbox.numbers() == list(range(500))
    assert await committed(inbox) == 500
    assert commits == len(inbox.handler.batches) <= 10, "one offset commit a batch"


async def test_a_topic_that_is_read_again_from_its_beginning_changes_nothing(inbox: InboxUnderTest) -> None:
    await inbox.produce(*(payload(number) for number in range(200)), b"garbage", None)
    async with inbox.consuming():
        await inbox.settled(202)
    before = await inbox.letters()
    await inbox.forget_offsets()
    async with inbox.consuming():
        summary = await inbox.settled(404)
    assert await inbox.numbers() == list(range(200))
    assert (summary.handled, summary.duplicates_absorbed, summary.dead) == (200, 202, 2)
    assert await inbox.letters() == before == {"not_json": 1, "tombstone": 1}


async def test_f45_a_handler_bug_takes_only_its_own_events(inbox: InboxUnderTest) -> None:
    guilty = {0, 77, 78, 199}
    inbox.handler.fails_on = lambda message: KeyError("bug") if message.number in guilty else None
    await inbox.produce(*(payload(number) for number in range(200)))
    async with inbox.consuming() as consumer:
        summary = await inbox.settled(200)
        await until(lambda: consumer.ready() == READY)
    assert await inbox.numbers() == sorted(set(range(200)) - guilty)
    assert summary.dead_letters_open == {"handler_failed": 4}
    assert await inbox.marks() == {"done": 196, "dead": 4}
    assert await committed(inbox) == 200
    errors = await inbox.rows("SELECT DISTINCT error FROM dead_letter")
    assert errors == [("KeyError: 'bug'",)]


@pytest.mark.parametrize("events", [5, 600])
async def test_a_handler_that_fails_on_every_event_buries_none_and_goes_on_after_the_rollback(
    inbox: InboxUnderTest, events: int
) -> None:
    await inbox.produce(*(payload(number) for number in range(events)))
    inbox.handler.fails_on = lambda message: KeyError("bug")
    async with inbox.consuming(max_batch_records=100) as consumer:
        await until(lambda: "fails on every event (KeyError); this is our code" in consumer.ready().reason)
        tries = len(inbox.handler.batches)
        await until(lambda: len(inbox.handler.batches) > tries + 20)
        assert consumer.ready().state == State.DEGRADED
        assert await inbox.letters() == {}
        inbox.handler.fails_on = lambda message: None
        await inbox.settled(events)
        await until(lambda: consumer.ready() == READY)
    assert await inbox.numbers() == list(range(events))
    assert await inbox.letters() == {}


async def test_a_decoder_that_fails_on_every_event_buries_none(
    inbox: InboxUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_record: object) -> None:
        raise AttributeError("bug")

    await inbox.produce(*(payload(number) for number in range(10)))
    with monkeypatch.context() as patched:
        patched.setattr(inbox.handler, "decode", broken)
        async with inbox.consuming() as consumer:
            await until(lambda: "fails on every event (AttributeError)" in consumer.ready().reason)
    assert await inbox.letters() == {}
    async with inbox.consuming():
        await inbox.settled(10)
    assert await inbox.numbers() == list(range(10))


async def test_f45_a_poison_that_comes_alone_after_successes_is_buried_at_once(inbox: InboxUnderTest) -> None:
    inbox.handler.fails_on = lambda message: KeyError("bug") if message.number >= 100 else None
    async with inbox.consuming() as consumer:
        for number in range(3):
            await inbox.produce(payload(number))
            await inbox.settled(2 * number + 1)
            await inbox.produce(payload(100 + number))
            await inbox.settled(2 * number + 2)
        await until(lambda: consumer.ready() == READY)
    assert len(inbox.handler.batches) == 6, "no event was tried twice"
    assert await inbox.letters() == {"handler_failed": 3}


async def test_a_poison_alone_in_a_fresh_process_waits_for_a_comparison_or_its_patience(inbox: InboxUnderTest) -> None:
    inbox.handler.fails_on = lambda message: KeyError("bug") if message.number >= 100 else None
    await inbox.produce(payload(100))
    async with inbox.consuming() as consumer:
        await until(lambda: "only event that waits (KeyError)" in consumer.ready().reason)
        assert await inbox.letters() == {}
        await inbox.produce(payload(1))
        await inbox.settled(2)
    await inbox.produce(payload(101))
    async with inbox.consuming(lone_patience_seconds=1.0) as consumer:
        await inbox.settled(3)
        await until(lambda: consumer.ready() == READY)
    assert await inbox.letters() == {"handler_failed": 2}


async def test_poison_in_front_of_healthy_events_is_found_with_batches_of_one(inbox: InboxUnderTest) -> None:
    inbox.handler.fails_on = lambda message: KeyError("bug") if message.number >= 100 else None
    await inbox.produce(*(payload(number) for number in (100, 101, 102, 103, 104, 1, 2)), partition=0)
    async with inbox.consuming(max_batch_records=1):
        await inbox.settled(7)
    assert await inbox.numbers() == [1, 2]
    assert await inbox.letters() == {"handler_failed": 5}


async def test_a_client_that_fails_between_two_parts_is_replaced(inbox: InboxUnderTest) -> None:
    """Its positions may be anywhere: going on with it would pass records over."""
    inbox.handler.fails_on = lambda message: KeyError("bug") if message.number == 7 else None

    async def linger(work: UnitOfWork) -> None:
        await work.session.execute(text("SELECT pg_sleep(0.06)"))

    async with inbox.consuming() as consumer:
        await until(lambda: consumer.ready() == READY)
        first = client_of(consumer)
        failures = 0

        async def fail(_seconds: float) -> None:
            nonlocal failures
            failures += 1
            raise KafkaFailure("the poll failed")

        first.poll_paused = fail  # type: ignore[method-assign, assignment]
        object.__setattr__(consumer._settings, "max_poll_interval_seconds", 0.5)
        inbox.handler.before = linger
        await inbox.produce(*(payload(number) for number in range(64)), partition=0)
        await until(lambda: consumer._client is not first)
        object.__setattr__(consumer._settings, "max_poll_interval_seconds", 60.0)
        await inbox.settled(64)
    assert failures == 1
    assert await inbox.numbers() == [number for number in range(64) if number != 7]


async def test_an_event_that_the_database_refuses_takes_only_itself(inbox: InboxUnderTest) -> None:
    await inbox.rows("ALTER TABLE effect ADD CONSTRAINT small CHECK (number < 1000)")
    await inbox.produce(*(payload(number) for number in range(50)), payload(5000), payload(50))
    async with inbox.consuming():
        await inbox.settled(52)
    assert await inbox.numbers() == list(range(51))
    assert await inbox.letters() == {"handler_failed": 1}


async def test_poison_of_every_kind_stops_nothing(inbox: InboxUnderTest) -> None:
    value = payload(1)
    await inbox.produce(None, b"\xff", payload(2), value, partition=0)
    await inbox.produce(payload(3), headers=[("event_id", b"\xff"), ("event_id", None)], partition=0)
    await inbox.produce(value, headers=[("x\0y", b"\0"), ("x", None)], partition=0)
    await inbox.produce(payload(4), partition=0)
    async with inbox.consuming():
        await inbox.settled(7)
    assert await inbox.numbers() == [1, 2, 4]
    assert await inbox.letters() == {"tombstone": 1, "not_json": 1, "event_id_mismatch": 1}


async def test_f30_records_that_the_client_cannot_decode_stop_nothing(inbox: InboxUnderTest) -> None:
    await inbox.produce(*(payload(number) for number in range(60)))
    await inbox.produce_undecodable(partition=2)
    await inbox.produce(*(payload(number) for number in range(60, 120)))
    await inbox.produce_undecodable(partition=4)
    async with inbox.consuming() as consumer:
        await inbox.settled(126)
        await inbox.produce(payload(200))
        await inbox.settled(127)
        await until(lambda: consumer.ready() == READY)
    assert await inbox.numbers() == [*range(120), 200, 901, 901]
    letters = await inbox.rows("SELECT reason, source_partition, payload FROM dead_letter ORDER BY source_partition")
    assert letters == [("unreadable_record", partition, None) for partition in (2, 2, 4, 4)]
    assert await committed(inbox) == 127


async def test_a_record_larger_than_the_fetch_size_is_handled(inbox: InboxUnderTest) -> None:
    await inbox.produce(payload(1), b"x" * 1_000_000, payload(2), partition=0)
    async with inbox.consuming(max_batch_records=1):
        await inbox.settled(3)
    assert await inbox.numbers() == [1, 2]


async def test_f38_killed_connections_in_the_middle_of_batches_lose_and_repeat_nothing(inbox: InboxUnderTest) -> None:
    async def linger(work: UnitOfWork) -> None:
        await work.session.execute(text("SELECT pg_sleep(0.05)"))

    inbox.handler.before = linger
    await inbox.produce(*(payload(number) for number in range(2000)))
    async with inbox.consuming(max_batch_records=50) as consumer:
        for settled in (100, 500, 900, 1300):
            await inbox.settled(settled)
            await kill_backends(inbox)
        await inbox.settled(2000)
        await until(lambda: consumer.ready() == READY)
    assert await inbox.numbers() == list(range(2000))
    assert await inbox.letters() == {}
    assert REGISTRY.get_sample_value("inbox_batch_retries_total", {"group": inbox.group}), "no kill hit a batch"
    assert inbox.database.engine.pool.checkedout() == 0  # type: ignore[attr-defined]


async def test_batches_that_are_too_much_for_the_time_limits_shrink_until_they_fit(inbox: InboxUnderTest) -> None:
    async def work_for_long(work: UnitOfWork) -> None:
        await work.session.execute(text("SET LOCAL statement_timeout = 400"))
        await work.session.execute(text("SELECT pg_sleep(:s)"), {"s": 0.01 * len(inbox.handler.batches[-1])})

    inbox.handler.before = work_for_long
    await inbox.produce(*(payload(number) for number in range(100)), partition=0)
    async with inbox.consuming():
        await inbox.settled(100)
    assert len(inbox.handler.batches[0]) == 100
    assert await inbox.numbers() == list(range(100))
    assert await inbox.letters() == {}


async def test_a_missing_partition_pauses_loudly_and_goes_on_when_it_is_there(inbox: InboxUnderTest) -> None:
    [[today]] = await inbox.rows("SELECT 'processed_event_p' || to_char(now() AT TIME ZONE 'UTC', 'YYYYMMDD')")
    await inbox.rows(f"ALTER TABLE processed_event DETACH PARTITION {today}")
    await inbox.produce(*(payload(number) for number in range(20)))
    async with inbox.consuming() as consumer:
        await until(lambda: "no partition" in consumer.ready().reason)
        assert consumer.ready().state == State.DEGRADED
        await inbox.make_partitions()
        await inbox.settled(20)
        await until(lambda: consumer.ready() == READY)
    assert await inbox.numbers() == list(range(20))
    assert await inbox.letters() == {}


async def test_f47_a_failing_database_keeps_the_membership_and_skips_nothing(inbox: InboxUnderTest) -> None:
    """While batches fail, partitions are paused and polled for longer than the session and poll intervals allow."""
    failing = True

    def fail(_message: object) -> Exception | None:
        return TimeoutError("the database is away") if failing else None

    inbox.handler.fails_on = fail
    await inbox.produce(*(payload(number) for number in range(300)))
    limits = {"batch_deadline_seconds": 0.5, "commit_deadline_seconds": 0.5, "max_poll_interval_seconds": 12.0}
    async with inbox.consuming(max_batch_records=40, **limits) as consumer:
        await until(lambda: epoch_of(consumer) == 1)
        await until(lambda: len(inbox.handler.batches) > 3)
        async with inbox.consuming(max_batch_records=40, **limits):
            await until(lambda: epoch_of(consumer) == 2)  # a rebalance forgets pauses and positions
            tries = len(inbox.handler.batches)
            await until(lambda: len(inbox.handler.batches) > tries + 4)
            failing = False
            await inbox.settled(300)
        await until(lambda: consumer.ready() == READY)
    assert await inbox.numbers() == list(range(300))
    assert await inbox.letters() == {}


async def test_f19_members_that_join_and_leave_under_load_lose_and_repeat_nothing(inbox: InboxUnderTest) -> None:
    async def linger(work: UnitOfWork) -> None:
        await work.session.execute(text("SELECT pg_sleep(0.02)"))

    inbox.handler.before = linger
    await inbox.produce(*(payload(number) for number in range(6000)))
    async with inbox.consuming(max_batch_records=25) as first:
        await inbox.settled(200)
        async with inbox.consuming(max_batch_records=25) as second:
            await until(lambda: 0 < assigned_to(second) < PARTITIONS)
            await inbox.settled(1500)
        async with inbox.consuming(max_batch_records=25):
            await inbox.settled(3000)
            await first.stop()
            await inbox.settled(6000)
    assert await inbox.numbers() == list(range(6000))
    assert await committed(inbox) == 6000
    assert await inbox.letters() == {}


async def test_f37_a_stop_under_load_finishes_the_batch_commits_it_and_leaves(inbox: InboxUnderTest) -> None:
    async def linger(work: UnitOfWork) -> None:
        await work.session.execute(text("SELECT pg_sleep(0.5)"))

    inbox.handler.before = linger
    await inbox.produce(*(payload(number) for number in range(100)))
    consumer = inbox.consumer(max_batch_records=30)
    await consumer.start()
    await until(lambda: inbox.handler.batches)
    began = time.monotonic()
    await consumer.stop()
    assert time.monotonic() - began < 5
    done = await inbox.numbers()
    assert done, "the batch in hand is finished, not rolled back"
    assert await committed(inbox) == len(done)
    assert inbox.database.engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    inbox.handler.before = None
    began = time.monotonic()
    async with inbox.consuming():  # at once, for the first one left the group
        await inbox.settled(100)
    assert time.monotonic() - began < 5
    summary = await inbox.summary()
    assert (summary.handled, summary.duplicates_absorbed) == (100, 0)


@pytest.mark.parametrize("error", [CommitFailedError("rebalanced"), IllegalStateError("revoked"), TimeoutError()])
async def test_f20_a_failed_offset_commit_costs_repetitions_at_most(inbox: InboxUnderTest, error: Exception) -> None:
    async with inbox.consuming() as consumer:
        await until(lambda: consumer.ready() == READY)
        kafka_client = client_of(consumer)._consumer
        real = kafka_client.commit
        failures = 0

        async def refuse(offsets: object) -> None:
            nonlocal failures
            failures += 1
            if failures > 2:
                await real(offsets)
                return
            raise error

        kafka_client.commit = refuse
        for part in range(4):
            await inbox.produce(*(payload(number) for number in range(part * 60, part * 60 + 60)))
            await inbox.settled(part * 60 + 60)
        await until(lambda: failures > 2)
    assert await inbox.numbers() == list(range(240))
    assert await committed(inbox) == 240
    assert REGISTRY.get_sample_value("inbox_commit_failures_total", {"group": inbox.group}) == 2


async def test_f22_a_commit_that_hangs_ends_at_its_deadline(inbox: InboxUnderTest) -> None:
    async with inbox.consuming(commit_deadline_seconds=0.2) as consumer:
        await until(lambda: consumer.ready() == READY)

        async def hang(offsets: object) -> None:
            await asyncio.sleep(3600)

        client_of(consumer)._consumer.commit = hang
        await inbox.produce(payload(1), payload(2))
        await inbox.settled(2)
        began = time.monotonic()
        await consumer.stop()
        assert time.monotonic() - began < 5
    async with inbox.consuming():
        await inbox.settled(4)
    assert await inbox.numbers() == [1, 2]


async def test_a_rebalance_waits_for_the_batch_in_hand(inbox: InboxUnderTest) -> None:
    release = asyncio.Event()

    async def wait(_work: UnitOfWork) -> None:
        await release.wait()

    inbox.handler.before = wait
    await inbox.produce(payload(1))
    async with inbox.consuming() as first:
        await until(lambda: inbox.handler.batches)
        async with inbox.consuming() as second:
            await until(lambda: first._rebalancing)
            assert epoch_of(first) == 1, "the assignment is not given back under a batch"
            release.set()
            await until(lambda: epoch_of(first) == 2)
            await until(lambda: second.ready() == READY)
    assert await inbox.numbers() == [1]
    summary = await inbox.summary()
    assert (summary.handled, summary.duplicates_absorbed) == (1, 0), "its offset was committed before the rebalance"


async def test_f22_a_consumer_starts_and_stops_while_kafka_is_away(inbox: InboxUnderTest) -> None:
    inbox.kafka = KafkaSettings("127.0.0.1:1", client_id="test", request_timeout_seconds=5)
    consumer = inbox.consumer()
    async with running([consumer]):
        await until(lambda: "bootstrap" in consumer.ready().reason)
        assert consumer.ready().state == State.DEGRADED
        began = time.monotonic()
        await consumer.stop()
        assert time.monotonic() - began < 3


async def test_f22_a_consumer_stops_while_it_waits_for_a_topic_that_does_not_exist(inbox: InboxUnderTest) -> None:
    inbox.handler.topics = ("no-such-topic-" + inbox.group,)
    consumer = inbox.consumer(leave_deadline_seconds=1.0)
    await consumer.start()
    await until(lambda: consumer.ready().state == State.DEGRADED)
    began = time.monotonic()
    await consumer.stop()
    assert time.monotonic() - began < 4


async def test_f28_offsets_that_are_gone_before_they_are_read_are_told_loudly(inbox: InboxUnderTest) -> None:
    from aiokafka import TopicPartition
    from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete

    await inbox.produce(*(payload(number) for number in range(5)), partition=0)
    async with inbox.consuming():
        await inbox.settled(5)
    await inbox.produce(*(payload(number) for number in range(5, 12)), partition=0)
    admin = AIOKafkaAdminClient(bootstrap_servers=inbox.kafka.bootstrap_servers)
    await admin.start()
    await admin.delete_records({TopicPartition(inbox.topic, 0): RecordsToDelete(before_offset=9)})
    await admin.close()
    async with inbox.consuming():
        await inbox.settled(8)
    assert await inbox.numbers() == [*range(5), 9, 10, 11]
    assert REGISTRY.get_sample_value("inbox_skipped_offsets_total", {"group": inbox.group}) == 4


async def test_static_members_keep_their_partitions_over_a_restart(inbox: InboxUnderTest) -> None:
    async with inbox.consuming(instance_id="one") as first:
        async with inbox.consuming(instance_id="two"):
            await until(lambda: assigned_to(first) == PARTITIONS // 2)
            epoch = epoch_of(first)
        async with inbox.consuming(instance_id="two"):
            await inbox.produce(*(payload(number) for number in range(60)))
            await inbox.settled(60)
            assert epoch_of(first) == epoch, "the restart of the other member caused no rebalance"
    assert await inbox.numbers() == list(range(60))


async def test_two_processes_with_one_instance_id_are_reported(inbox: InboxUnderTest) -> None:
    async with inbox.consuming(instance_id="same") as one, inbox.consuming(instance_id="same") as other:
        await until(
            lambda: any("instance id same" in each.ready().reason for each in (one, other)), deadline_seconds=45
        )
        await inbox.produce(*(payload(number) for number in range(60)))
        await inbox.settled(60)
    assert await inbox.numbers() == list(range(60))


async def test_f24_a_consumer_stands_still_while_its_topic_outlasts_the_window(inbox: InboxUnderTest) -> None:
    """No permanent key here: what came again after the window would take effect twice."""
    await set_retention(inbox, days=60)
    window = WindowCheck(
        partial(topic_retention, inbox.kafka, (inbox.topic,)),
        window_days=30,
        permanent_key=False,
        interval_seconds=0.2,
    )
    await inbox.produce(payload(1))
    consumer = inbox.consumer()
    consumer._window = window
    async with running([window]):
        await until(lambda: window.verdict.forbids)
        async with running([consumer]):
            await until(lambda: consumer.ready().state is State.DOWN and "61" in consumer.ready().reason)
            assert "DEDUP_WINDOW_DAYS" in window.ready().reason
            assert await inbox.numbers() == []
            await set_retention(inbox, days=7)
            await inbox.settled(1)
        assert window.ready().state is State.READY
    assert await inbox.numbers() == [1]


async def test_f24_what_nobody_tells_is_degraded_and_looked_at_again(inbox: InboxUnderTest) -> None:
    asked = 0

    async def silent_at_first() -> list[TopicRetention]:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise KafkaFailure("Kafka did not answer within 15 s")
        return await topic_retention(inbox.kafka, [inbox.topic])

    window = WindowCheck(silent_at_first, window_days=30, permanent_key=False)
    async with running([window]):
        await until(lambda: window.ready().state is State.DEGRADED)
        assert "did not answer" in window.ready().reason
        await until(lambda: window.ready().state is State.READY)
    assert not window.verdict.problem


async def set_retention(inbox: InboxUnderTest, *, days: int) -> None:
    """Change how long the topic keeps records, and wait until the broker says so."""
    admin = AIOKafkaAdminClient(bootstrap_servers=inbox.kafka.bootstrap_servers)
    await admin.start()
    try:
        changes = {"retention.ms": str(days * DAY_MILLISECONDS), "segment.ms": str(DAY_MILLISECONDS)}
        await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, inbox.topic, configs=changes)])
    finally:
        await admin.close()
    async with asyncio.timeout(20):
        while (await topic_retention(inbox.kafka, [inbox.topic]))[0].redelivery_seconds != (days + 1) * 86_400:
            await asyncio.sleep(0.05)


async def test_lag_and_age_are_told_in_seconds(inbox: InboxUnderTest) -> None:
    def told(name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(name, labels) or 0.0

    entered = asyncio.Event()
    go_on = asyncio.Event()
    clock = asyncio.get_running_loop().time

    async def wait(work: UnitOfWork) -> None:
        entered.set()
        await go_on.wait()

    before = told("inbox_event_age_seconds_count"), told("inbox_event_age_seconds_sum")
    inbox.handler.before = wait
    await inbox.produce(*(payload(number) for number in range(6)))
    async with inbox.consuming():
        await entered.wait()
        written = clock()
        await until(lambda: clock() > written + 1.1)  # the events get that much older
        go_on.set()
        await inbox.settled(6)
        await until(lambda: told("inbox_event_age_seconds_count") == before[0] + 6)
        assert told("inbox_event_age_seconds_sum") >= before[1] + 6 * 1.1
        await until(lambda: told("inbox_lag_seconds", group=inbox.group) == 0)
