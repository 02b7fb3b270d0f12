"""Publishing again: the copies are equal, healthy groups absorb them, and a rebuilt one takes them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from aiokafka import ConsumerRecord
from sqlalchemy import text

from chargeonce.stack import KafkaBroker, free_ports
from shared.errors import KafkaFailure, Refused
from shared.identifiers import new_event_id
from shared.inbox import migrations as inbox_migrations
from shared.inbox.upkeep import ensure_partitions
from shared.kafka.producer import IdempotentProducer
from shared.kafka.settings import KafkaSettings
from shared.outbox.republish import Pace, Selection, plan, republish
from shared.unit_of_work import UnitsOfWork
from tests.support.inbox import EffectHandler, InboxUnderTest, payload
from tests.support.outbox import OutboxUnderTest, migrate_with, outbox_under_test, scalar

REPOSITORY = Path(__file__).parents[2]
LONG_AGO = datetime.now(UTC) - timedelta(days=20)
RETENTION_HOURS = 72.0


@pytest.fixture
async def outbox(database_url: str, kafka: KafkaBroker, unique_name: str) -> AsyncIterator[OutboxUnderTest]:
    async with outbox_under_test(database_url, kafka.bootstrap_servers, unique_name) as made:
        yield made


async def publish_all(outbox: OutboxUnderTest, keys: int = 20, numbers: int = 15) -> None:
    for number in range(numbers):
        await outbox.publish(*(outbox.event(f"order-{key}", number, headers={"x": "1"}) for key in range(keys)))
    async with outbox.relay():
        await outbox.drained()


def since(
    moment: datetime, until: datetime | None = None, event_type: str | None = None, key: str | None = None
) -> Selection:
    return Selection(moment, until, event_type, key, retention_hours=RETENTION_HOURS)


EVERYTHING = since(LONG_AGO)


async def again(outbox: OutboxUnderTest, selection: Selection = EVERYTHING) -> int:
    return await republish(outbox.database, outbox.kafka, selection, Pace(1e6), lambda events: None)


async def start_command(outbox: OutboxUnderTest, *arguments: str) -> asyncio.subprocess.Process:
    """Start `order-service outbox republish …`."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from order_service.cli import main; main()", "outbox", "republish", *arguments),
        env={
            **os.environ,
            "ORDER_SERVICE_DATABASE_URL": outbox.database.settings.url,
            "ORDER_SERVICE_KAFKA_BOOTSTRAP_SERVERS": outbox.kafka.bootstrap_servers,
        },
        cwd=REPOSITORY,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def command(outbox: OutboxUnderTest, *arguments: str) -> tuple[int | None, str, str]:
    process = await start_command(outbox, *arguments)
    said, complained = await process.communicate()
    return process.returncode, said.decode(), complained.decode()


def content(record: ConsumerRecord) -> tuple[object, ...]:
    """What a copy has of the first one."""
    headers = tuple(header for header in record.headers if header[0] != "republished_at")
    return record.key, record.value, headers, record.partition, record.timestamp


def is_copy(record: ConsumerRecord) -> bool:
    return "republished_at" in dict(record.headers)


async def test_copies_are_equal_and_in_order_of_their_key(outbox: OutboxUnderTest) -> None:
    await publish_all(outbox)
    first = [content(record) for record in await outbox.arrived()]
    assert await again(outbox) == 300
    everything = [content(record) for record in await outbox.arrived()]
    for partition in range(outbox.partitions):
        before = [record for record in first if record[3] == partition]
        copies = [record for record in everything if record[3] == partition][len(before) :]
        assert sorted(copies, key=repr) == sorted(before, key=repr)
        for key in {record[0] for record in before}:
            assert [record for record in copies if record[0] == key] == [r for r in before if r[0] == key]


async def test_a_header_tells_copies_from_first_ones_and_when_they_were_sent(outbox: OutboxUnderTest) -> None:
    await publish_all(outbox, keys=3, numbers=2)
    assert not any(is_copy(record) for record in await outbox.arrived())
    began_at = datetime.now(UTC).replace(microsecond=0)
    await again(outbox)
    copies = [record for record in await outbox.arrived() if is_copy(record)]
    assert len(copies) == 6
    for record in copies:
        [sent_at] = [value.decode() for name, value in record.headers if name == "republished_at"]
        assert began_at <= datetime.fromisoformat(sent_at) <= datetime.now(UTC)


async def test_what_a_relay_publishes_meanwhile_is_not_sent_twice_and_keeps_its_order(outbox: OutboxUnderTest) -> None:
    await publish_all(outbox, keys=10, numbers=10)
    begun = asyncio.Event()

    async def go_on_publishing() -> None:
        await begun.wait()
        async with outbox.relay():
            for number in range(10, 20):
                await outbox.publish(*(outbox.event(f"order-{key}", number) for key in range(10)))
                await asyncio.sleep(0.02)
            await outbox.drained()

    publishing = asyncio.create_task(go_on_publishing())
    sent = await republish(outbox.database, outbox.kafka, EVERYTHING, Pace(50), lambda events: begun.set())
    await publishing
    assert sent == 100
    records = await outbox.arrived()
    assert outbox.check_order(records) == 100
    assert {int(record.value.decode().partition(":")[2]) for record in records if is_copy(record)} == set(range(10))


async def test_f18_nothing_is_sent_to_a_topic_with_another_partition_count_than_registered(
    outbox: OutboxUnderTest,
) -> None:
    await publish_all(outbox, keys=4, numbers=1)
    await scalar(outbox.database, "UPDATE outbox_topic SET partitions = 6 RETURNING 1", commit=True)
    with pytest.raises(Refused, match="has 12 partitions and was registered with 6"):
        await again(outbox)
    assert len(await outbox.arrived()) == 4


async def test_only_what_was_selected_published_and_is_not_parked_is_sent(outbox: OutboxUnderTest) -> None:
    await publish_all(outbox, keys=4, numbers=3)
    await outbox.publish(outbox.event("order-0", 3))
    async with outbox.database.engine.begin() as connection:
        await connection.execute(
            text(
                "INSERT INTO outbox_parked (bucket, position, event_id, topic, key, event_type, payload, headers, "
                "created_at, reason) SELECT bucket, position, event_id, topic, key, event_type, payload, headers, "
                "created_at, 'test' FROM outbox_event WHERE payload = 'order-1:2'"
            )
        )
    assert (await plan(outbox.database, EVERYTHING)).events == 11
    assert await again(outbox) == 11
    assert await again(outbox, since(LONG_AGO, key="order-2")) == 3
    assert await again(outbox, since(LONG_AGO, event_type="other")) == 0
    assert await again(outbox, since(datetime.now(UTC) + timedelta(hours=1))) == 0
    assert await again(outbox, since(LONG_AGO, until=LONG_AGO)) == 0


async def test_what_was_discarded_is_not_sent_even_when_the_keeper_has_forgotten_that_and_not_yet_the_event(
    outbox: OutboxUnderTest,
) -> None:
    async with outbox.database.engine.begin() as connection:
        for number, age in (("discarded", "73 hours"), ("published", "71 hours")):
            await connection.execute(
                text(
                    "INSERT INTO outbox_event (event_id, bucket, topic, key, event_type, payload, created_at) "
                    "VALUES (:id, 0, :topic, 'k', 'test.happened.v1', :payload, now() - CAST(:age AS text)::interval)"
                ),
                {"id": new_event_id(), "topic": outbox.topic, "payload": number.encode(), "age": age},
            )
        await connection.execute(
            text("INSERT INTO outbox_progress (bucket, position) SELECT 0, max(position) FROM outbox_event")
        )
    told = await plan(outbox.database, EVERYTHING)
    assert told.events == 1
    assert told.kept_since is not None
    assert told.kept_since > datetime.now(UTC) - timedelta(hours=72)
    assert await again(outbox) == 1
    assert [record.value for record in await outbox.arrived()] == [b"published"]


async def test_a_batch_that_is_too_large_for_its_topic_is_sent_in_smaller_ones(outbox: OutboxUnderTest) -> None:
    await outbox.limit_message_bytes(20_000)
    for number in range(150):
        await outbox.publish(outbox.event("order-1", number, payload=b"order-1:%d:" % number + b"x" * 1000))
    async with outbox.relay():
        await outbox.drained()
    before = [content(record) for record in await outbox.arrived()]
    assert await again(outbox) == 150
    copies = [content(record) for record in await outbox.arrived()][len(before) :]
    # The relay may have sent some twice while it looked for the size.
    assert copies == list(dict.fromkeys(before))


async def test_the_largest_event_is_sent_again(outbox: OutboxUnderTest) -> None:
    await outbox.publish(outbox.event("order-1", 0, payload=b"x" * 998_000))
    async with outbox.relay():
        await outbox.drained()
    assert await again(outbox) == 1
    assert [len(record.value) for record in await outbox.arrived()] == [998_000, 998_000]


async def test_an_event_that_only_just_fits_its_topic_is_sent_without_the_mark(outbox: OutboxUnderTest) -> None:
    await outbox.publish(outbox.event("order-1", 0, payload=b"x" * 10_000))
    async with outbox.relay():
        await outbox.drained()
    [first] = await outbox.arrived()
    size = await batch_bytes(outbox, first)
    await outbox.limit_message_bytes(size)
    assert await again(outbox) == 1
    _, copy = await outbox.arrived()
    assert (content(copy), is_copy(copy)) == (content(first), False)
    await outbox.limit_message_bytes(size - 1)
    with pytest.raises(KafkaFailure, match="does not take event"):
        await again(outbox)


async def batch_bytes(outbox: OutboxUnderTest, record: ConsumerRecord) -> int:
    """How large a batch is with this record alone."""
    producer = IdempotentProducer(outbox.kafka, max_batch_bytes=900_000, max_request_bytes=1_000_000)
    try:
        batch = producer.new_batch(record.topic, record.partition)
        assert batch.add(record.timestamp, record.key, record.value, list(record.headers))
        return batch.size_bytes
    finally:
        await producer.abandon()


async def test_large_events_are_not_all_in_memory_at_once(outbox: OutboxUnderTest) -> None:
    for number in range(40):
        await outbox.publish(outbox.event("order-1", number, payload=b"x" * 900_000))
    async with outbox.relay():
        await outbox.drained()
    tracemalloc.start()
    try:
        assert await again(outbox) == 40
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 12_000_000


async def test_an_event_that_its_topic_takes_no_more_ends_the_command_with_what_was_sent_and_what_to_do(
    outbox: OutboxUnderTest,
) -> None:
    for number, size in enumerate((10, 30_000, 10)):
        await outbox.publish(outbox.event("order-1", number, payload=b"x" * size))
    async with outbox.relay():
        await outbox.drained()
    await outbox.limit_message_bytes(20_000)
    status, _, complained = await command(outbox, "--since", "1d")
    assert status == 2
    [line] = [line for line in complained.splitlines() if "then:" in line]
    assert "1 of 3 events were published again" in line
    assert "max.message.bytes" in line
    assert "Traceback" not in complained


async def test_interrupted_it_says_how_far_it_came_and_what_to_do(outbox: OutboxUnderTest) -> None:
    await publish_all(outbox, keys=10, numbers=10)
    process = await start_command(outbox, "--since", "1d", "--rate", "40")
    assert process.stderr is not None
    async with asyncio.timeout(60):
        while not (line := await process.stderr.readline()).strip().endswith(b" of 100"):
            assert line, "it ended without a word on how far it came"
    process.send_signal(signal.SIGINT)
    _, complained = await process.communicate()
    [told] = [line for line in complained.decode().splitlines() if line.startswith("interrupted: ")]
    assert "of 100 events were published again" in told
    assert "run the same command again" in told
    assert "Traceback" not in complained.decode()
    assert process.returncode == 130


async def test_killed_in_the_middle_it_is_run_again_and_sends_everything_in_order(outbox: OutboxUnderTest) -> None:
    await publish_all(outbox, keys=10, numbers=10)
    before = await outbox.arrived()
    process = await start_command(outbox, "--since", "1d", "--rate", "40")
    assert process.stderr is not None
    async with asyncio.timeout(60):
        while not (line := await process.stderr.readline()).strip().endswith(b" of 100"):
            assert line, "it ended without a word on how far it came"
    process.send_signal(signal.SIGKILL)
    await process.communicate()
    partly = await outbox.arrived()
    assert len(before) < len(partly) < 2 * len(before)
    assert (await command(outbox, "--since", "1d", "--rate", "5000"))[0] == 0
    everything = await outbox.arrived()
    assert len(everything) == len(partly) + len(before)
    copies = Counter(dict(record.headers)["event_id"] for record in everything)
    assert len(copies) == 100
    assert set(copies.values()) == {2, 3}
    for key in {record.key for record in before}:
        last_run = [record.value for record in everything if record.key == key][-10:]
        assert last_run == [record.value for record in before if record.key == key]


async def test_f34_a_healthy_group_absorbs_the_copies_and_a_rebuilt_one_takes_them(
    outbox: OutboxUnderTest, unique_name: str
) -> None:
    await migrate_with(
        outbox.database, inbox_migrations.upgrade_1, inbox_migrations.upgrade_2, inbox_migrations.upgrade_3
    )
    await ensure_partitions(outbox.database, window_days=3)
    async with outbox.database.engine.begin() as connection:
        await connection.execute(text("CREATE TABLE effect (event_id uuid, number bigint)"))

    def group(name: str) -> InboxUnderTest:
        handler = EffectHandler(outbox.topic)
        units = UnitsOfWork(outbox.database)
        return InboxUnderTest(outbox.database, outbox.kafka, outbox.topic, f"{unique_name}-{name}", handler, units)

    for number in range(50):
        event_id = new_event_id()
        value = payload(number, event_id)
        await outbox.publish(outbox.event(f"order-{number}", 0, event_id=event_id, payload=value))
    async with outbox.relay():
        await outbox.drained()
    healthy = group("healthy")
    async with healthy.consuming():
        await healthy.settled(50)
        assert await again(outbox) == 50
        summary = await healthy.settled(100)
    assert (summary.handled, summary.duplicates_absorbed) == (50, 50)
    rebuilt = group("rebuilt")
    async with rebuilt.consuming():
        summary = await rebuilt.settled(100)
    assert (summary.handled, summary.duplicates_absorbed, summary.dead) == (50, 50, 0)


async def test_without_a_broker_it_fails_and_the_next_run_sends_everything(outbox: OutboxUnderTest) -> None:
    await publish_all(outbox, keys=5, numbers=2)
    [nobody] = free_ports(1)
    cut_off = KafkaSettings(f"127.0.0.1:{nobody}", client_id="test", request_timeout_seconds=1)
    with pytest.raises(KafkaFailure):
        await republish(outbox.database, cut_off, EVERYTHING, Pace(1e6), lambda events: None)
    assert await again(outbox) == 10


async def test_f15_a_killed_broker_ends_the_run_within_its_deadline_and_the_next_one_sends_everything(
    database_url: str, stack_directory: Path, kafka: KafkaBroker, unique_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.outbox.republish._DEADLINE_SECONDS", 3.0)
    broker = KafkaBroker(stack_directory / unique_name)
    await broker.start()
    try:
        async with outbox_under_test(database_url, broker.bootstrap_servers, unique_name) as outbox:
            await publish_all(outbox, keys=10, numbers=10)
            told: list[int] = []

            async def kill_in_the_middle() -> None:
                while not told:
                    await asyncio.sleep(0.01)
                await broker.kill()

            killing = asyncio.create_task(kill_in_the_middle())
            tasks = len(asyncio.all_tasks())
            async with asyncio.timeout(30):
                with pytest.raises(KafkaFailure):
                    await republish(outbox.database, outbox.kafka, EVERYTHING, Pace(20), told.append)
            await killing
            assert len(asyncio.all_tasks()) == tasks - 1, "the producer left a task behind"
            assert 0 < told[-1] < 100
            await broker.start()
            partly = sum(is_copy(record) for record in await outbox.arrived())
            assert told[-1] <= partly < 100
            assert await again(outbox) == 100
            records = await outbox.arrived()
            assert sum(is_copy(record) for record in records) == partly + 100
            outbox.check_order(records)
    finally:
        await broker.stop()
        broker.remove()


async def test_the_command_tells_what_it_would_do_and_does_it(outbox: OutboxUnderTest) -> None:
    await publish_all(outbox, keys=5, numbers=2)
    status, said, _ = await command(outbox, "--since", "1d", "--dry-run")
    assert status == 0
    assert f"10 of test.happened.v1 on {outbox.topic}" in said
    assert "10 events would be published again, in 0:00:00 at this rate. Nothing was sent" in said
    assert len(await outbox.arrived()) == 10
    status, said, _ = await command(outbox, "--since", "1d", "--key", "order-1")
    assert (status, "2 events were published again" in said) == (0, True)
    assert len(await outbox.arrived()) == 12
    status, said, complained = await command(outbox, "--since", "60d")
    assert (status, said) == (2, "")
    assert "CONSUMERS_DEDUP_WINDOW_DAYS" in complained
    assert "Traceback" not in complained


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--since", "2026-11-30T12:00:00"), "has no offset from UTC"),
        (("--since", "1h", "--until", "2h"), "--until is not later than --since"),
        (("--since", "1h", "--rate", "0"), "--rate"),
        ((), "--since"),
    ],
)
async def test_what_cannot_be_done_is_one_readable_line(
    outbox: OutboxUnderTest, arguments: tuple[str, ...], message: str
) -> None:
    status, said, complained = await command(outbox, *arguments)
    assert (status, said) == (2, "")
    assert message in complained
    assert "Traceback" not in complained
