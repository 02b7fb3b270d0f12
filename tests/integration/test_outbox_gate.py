"""The gate: one unacknowledged batch a partition, nothing after a failure, progress over the contiguous prefix only.

The log is real; the broker's answers are the test's, for a real one cannot be told to refuse exactly one batch.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

import pytest
from aiokafka.errors import KafkaError
from sqlalchemy import text

from chargeonce.stack import KafkaBroker
from shared.errors import KafkaFailure
from shared.identifiers import new_event_id
from shared.kafka.producer import IdempotentProducer, RecordBatch
from shared.kafka.topics import TopicSpec
from shared.outbox.append import bucket_of
from shared.outbox.calls import Calls
from shared.outbox.leases import BucketLeases, Lease
from shared.outbox.log import OutboxLog, Page
from shared.outbox.parked_events import discard, release_key_of
from shared.outbox.parking import RefusedEvent, park_refused, read_aside
from shared.outbox.publisher import Publisher, PublisherSettings
from shared.outbox.topics import register_topics
from tests.support.outbox import OutboxUnderTest, outbox_under_test, until


class FewRecords:
    """A batch that is full after a few records."""

    def __init__(self, topic: str, partition: int, room: int) -> None:
        self.topic, self.partition, self.room = topic, partition, room
        self.records: list[tuple[bytes, bytes]] = []
        self.size_bytes = 0

    def add(self, timestamp_ms: int, key: bytes, value: bytes, headers: Sequence[tuple[str, bytes]]) -> bool:
        if len(self.records) == self.room:
            return False
        self.records.append((key, value))
        self.size_bytes += len(value)
        return True

    def __hash__(self) -> int:
        return id(self)


class Broker:
    """Acknowledges what the test lets it, and notes what was handed over when."""

    def __init__(self, answer: Callable[[FewRecords], bool | None], room: int = 2) -> None:
        self.answer = answer
        self.room = room
        self.handed_over: list[FewRecords] = []
        self.in_flight: Counter[tuple[str, int]] = Counter()
        self.most_in_flight = 0
        self.failed = False
        self.after_failure = 0
        self.answering: set[asyncio.Task[None]] = set()

    def new_batch(self, topic: str, partition: int, max_bytes: int | None = None) -> FewRecords:
        return FewRecords(topic, partition, self.room)

    def submit(self, batch: FewRecords) -> asyncio.Future[object]:
        self.after_failure += self.failed
        self.handed_over.append(batch)
        place = (batch.topic, batch.partition)
        self.in_flight[place] += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight[place])
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self.answering.add(asyncio.create_task(self.answer_to(batch, future)))
        return future

    async def answer_to(self, batch: FewRecords, future: asyncio.Future[object]) -> None:
        await asyncio.sleep(0.01)
        try:
            while (verdict := self.answer(batch)) is None:
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            future.cancel()
            return
        self.in_flight[batch.topic, batch.partition] -= 1
        if not verdict:
            self.failed = True
            future.set_exception(KafkaError("refused by the test"))
        else:
            future.set_result(None)

    def known_partition_count(self, topic: str) -> int | None:
        return None


@pytest.fixture
async def outbox(database_url: str, kafka: KafkaBroker, unique_name: str) -> AsyncIterator[OutboxUnderTest]:
    async with outbox_under_test(database_url, kafka.bootstrap_servers, unique_name, partitions=4) as made:
        yield made


class Publishing:
    """A publisher on the test's outbox with the test's broker."""

    def __init__(
        self,
        outbox: OutboxUnderTest,
        broker: Broker,
        partitions: dict[str, int],
        settings: PublisherSettings = PublisherSettings(poll_seconds=0.05),  # noqa: B008 - frozen
    ) -> None:
        self.leases = BucketLeases(outbox.database, lease_seconds=10)
        self.stopping = asyncio.Event()
        self.calls = Calls()
        self.healthy = asyncio.Event()
        producer: IdempotentProducer = broker  # type: ignore[assignment]  # the methods that a publisher uses
        self.publisher = Publisher(
            producer=producer,
            outbox=OutboxLog(outbox.database),
            leases=self.leases,
            partitions=partitions,
            settings=settings,
            stopping=self.stopping,
            calls=self.calls,
            on_healthy=self.healthy.set,
        )

    async def start(self) -> asyncio.Task[None]:
        await self.leases.join()
        return asyncio.create_task(self.publisher.run())

    async def stop(self, running: asyncio.Task[None]) -> None:
        self.stopping.set()
        self.calls.call()
        await running


async def progress(outbox: OutboxUnderTest) -> dict[int, int]:
    async with outbox.database.engine.connect() as connection:
        rows = await connection.execute(
            text("SELECT bucket, max(position) AS position FROM outbox_progress GROUP BY 1")
        )
        return {row.bucket: row.position for row in rows}


async def test_f46_at_most_one_unacknowledged_batch_a_partition_is_with_the_client(outbox: OutboxUnderTest) -> None:
    for number in range(30):
        await outbox.publish(*(outbox.event(f"order-{key}", number) for key in range(8)))
    broker = Broker(lambda _: True)
    publishing = Publishing(outbox, broker, {outbox.topic: 4})
    running = await publishing.start()
    await outbox.drained()
    await publishing.stop(running)
    assert len(broker.handed_over) >= 100, "many batches of every partition were waiting"
    assert broker.most_in_flight == 1
    sent: dict[bytes, list[int]] = {}
    for batch in broker.handed_over:
        for key, value in batch.records:
            sent.setdefault(key, []).append(int(value.split(b":")[1]))
    assert all(numbers == list(range(30)) for numbers in sent.values())


async def test_f4_f5_buckets_that_change_hands_and_come_back_in_mid_page_lose_nothing(outbox: OutboxUnderTest) -> None:
    for number in range(60):
        await outbox.publish(*(outbox.event(f"order-{key}", number) for key in range(30)))
    answers = 0

    def answer(_: FewRecords) -> bool:
        nonlocal answers
        answers += 1
        if answers % 7 == 0 and answers < 100:
            # Every lease was lost and taken again, at the progress that was recorded until then.
            recorded = {number: bucket.recorded_up_to for number, bucket in publisher._buckets.items()}
            held = publishing.leases.held
            publishing.leases.held = {
                number: Lease(number, lease.epoch, recorded.get(number, lease.cursor)) for number, lease in held.items()
            }
        return True

    settings = PublisherSettings(poll_seconds=0.05, rows_per_read=60, least_rows_per_bucket=2)
    broker = Broker(answer, room=5)
    publishing = Publishing(outbox, broker, {outbox.topic: 4}, settings)
    publisher = publishing.publisher
    running = await publishing.start()
    await outbox.drained()
    await publishing.stop(running)
    first_copies: dict[bytes, list[int]] = {}
    for batch in broker.handed_over:
        for key, value in batch.records:
            number = int(value.split(b":")[1])
            if number not in first_copies.setdefault(key, []):
                first_copies[key].append(number)
    assert len(first_copies) == 30
    assert all(numbers == list(range(60)) for numbers in first_copies.values())


async def test_f12_f13_what_is_discarded_while_the_rest_of_its_key_is_released_is_not_sent(
    outbox: OutboxUnderTest,
) -> None:
    """The log still has it ahead of the cursor, and the key is not blocked any more."""
    first, second = outbox.event("order-1", 0), outbox.event("order-1", 1)
    await outbox.publish(first, second, outbox.event("order-2", 0))
    broker = Broker(lambda _: True)
    settings = PublisherSettings(poll_seconds=0.05, released_seconds=0.01, max_buffered_bytes=0)  # nothing is read yet
    publishing = Publishing(outbox, broker, {outbox.topic: 4}, settings)
    await publishing.leases.join()
    await park_all_of(outbox, publishing.leases, b"order-1")
    running = asyncio.create_task(publishing.publisher.run())
    await until(lambda: publishing.publisher._aside.blocked)
    await discard(outbox.database, first.event_id, "ada", "a test order", dry_run=False)
    assert await release_key_of(outbox.database, second.event_id, "ada", "outbox_event", dry_run=False) == 1
    await until(lambda: broker.handed_over and not publishing.publisher._aside.blocked)
    publishing.publisher._settings = replace(settings, max_buffered_bytes=1_000_000)
    publishing.calls.call()
    await outbox.drained()
    await publishing.stop(running)
    sent = [value for batch in broker.handed_over for _, value in batch.records]
    assert sorted(sent) == [b"order-1:1", b"order-2:0"]


async def park_all_of(outbox: OutboxUnderTest, leases: BucketLeases, key: bytes) -> None:
    async with outbox.database.engine.connect() as connection:
        query = text("SELECT bucket, position FROM outbox_event WHERE key = :key ORDER BY position")
        places = (await connection.execute(query, {"key": key})).all()
    async with outbox.database.engine.begin() as connection:
        for bucket, position in places:
            event = RefusedEvent(bucket, position, leases.held[bucket].epoch, "refused by the test")
            assert await park_refused(connection, leases.owner, event)


async def test_f12_what_was_discarded_between_a_leases_cursor_and_the_durable_one_is_not_sent(
    outbox: OutboxUnderTest,
) -> None:
    """A lease's cursor may be older than the durable one: the last owner's write may commit after it was read."""
    await outbox.publish(*(outbox.event("order-1", number) for number in range(3)))
    leases = BucketLeases(outbox.database, lease_seconds=10)
    await leases.join()
    await park_all_of(outbox, leases, b"order-1")
    async with outbox.database.engine.begin() as connection:
        await connection.execute(
            text("UPDATE outbox_parked SET settled_at = now(), outcome = 'discarded', settled_by = 'ada', note = 'x'")
        )
        await connection.execute(
            text(
                "INSERT INTO outbox_progress (bucket, position) "
                "SELECT bucket, max(position) FROM outbox_event GROUP BY bucket"
            )
        )
    async with outbox.database.engine.connect() as connection:
        aside = await read_aside(connection, dict.fromkeys(range(96), 0))
    assert len(aside.settled) == 3


async def test_f15_a_producer_whose_batches_are_not_answered_is_not_called_healthy(outbox: OutboxUnderTest) -> None:
    await outbox.publish(outbox.event("order-1", 0))
    answer: list[bool | None] = [None]
    settings = PublisherSettings(poll_seconds=0.02, healthy_after_seconds=0.1, delivery_deadline_seconds=60.0)
    publishing = Publishing(outbox, Broker(lambda _: answer[0]), {outbox.topic: 4}, settings)
    running = await publishing.start()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(publishing.healthy.wait(), 1.0)
    answer[0] = True
    await asyncio.wait_for(publishing.healthy.wait(), 10.0)
    await publishing.stop(running)


async def test_a_producer_with_nothing_to_send_becomes_healthy(outbox: OutboxUnderTest) -> None:
    settings = PublisherSettings(poll_seconds=0.02, healthy_after_seconds=0.1)
    publishing = Publishing(outbox, Broker(lambda _: True), {outbox.topic: 4}, settings)
    running = await publishing.start()
    await asyncio.wait_for(publishing.healthy.wait(), 10.0)
    await publishing.stop(running)


async def test_f15_f16_f46_after_a_refused_first_batch_nothing_overtakes_it(outbox: OutboxUnderTest) -> None:
    for number in range(20):
        await outbox.publish(*(outbox.event(f"order-{key}", number) for key in range(8)))
    broker = Broker(lambda batch: batch is not broker.handed_over[0])
    publishing = Publishing(outbox, broker, {outbox.topic: 4})
    running = await publishing.start()
    with pytest.raises(KafkaFailure, match="refused by the test"):
        await running
    refused = broker.handed_over[0]
    assert broker.after_failure == 0
    assert sum(batch.partition == refused.partition for batch in broker.handed_over) == 1
    recorded = await progress(outbox)
    assert not [bucket for bucket in recorded if bucket % 4 == refused.partition]


async def test_a_batch_that_the_client_cancels_by_itself_ends_the_publisher_instead_of_its_lane(
    outbox: OutboxUnderTest,
) -> None:
    await outbox.publish(outbox.event("order-1", 0))

    def cancelled(_: FewRecords) -> bool:
        raise asyncio.CancelledError

    running = await Publishing(outbox, Broker(cancelled), {outbox.topic: 4}).start()
    async with asyncio.timeout(10):
        with pytest.raises(KafkaFailure, match="by itself"):
            await running


async def test_f4_progress_covers_only_the_contiguous_prefix_of_a_bucket_over_all_its_topics(
    outbox: OutboxUnderTest, unique_name: str
) -> None:
    other = f"{unique_name}.cancelled"
    await register_topics(outbox.database, [TopicSpec(other, 4, 1, 1)])
    await outbox.publish(outbox.event("order-1", 0))
    await outbox.publish(outbox.event("order-1", 1, topic=other))
    await outbox.publish(outbox.event("order-1", 2))
    let_through = asyncio.Event()
    broker = Broker(lambda batch: True if batch.topic != other or let_through.is_set() else None)
    publishing = Publishing(outbox, broker, {outbox.topic: 4, other: 4})
    running = await publishing.start()
    await until(lambda: {batch.topic for batch in broker.handed_over} == {outbox.topic, other})
    async with asyncio.timeout(10):
        while not (recorded := await progress(outbox)):
            await asyncio.sleep(0.01)
    assert list(recorded.values()) == [1], "the third event is acknowledged, the second is not"
    let_through.set()
    await outbox.drained()
    await publishing.stop(running)
    assert list((await progress(outbox)).values()) == [3]


async def test_stopping_waits_for_what_is_with_the_client_and_records_it(outbox: OutboxUnderTest) -> None:
    await outbox.publish(*(outbox.event("order-1", number) for number in range(6)))
    let_through = asyncio.Event()
    broker = Broker(lambda _: True if let_through.is_set() else None)
    publishing = Publishing(outbox, broker, {outbox.topic: 4})
    running = await publishing.start()
    await until(lambda: len(broker.handed_over) == 1)
    publishing.stopping.set()
    publishing.calls.call()
    let_through.set()
    await running
    assert len(broker.handed_over) == 1, "the batches behind it stay for the next producer"
    assert await outbox.unpublished() == 4


async def test_an_event_bigger_than_a_batch_ends_the_publisher_as_a_permanent_failure(outbox: OutboxUnderTest) -> None:
    await outbox.publish(outbox.event("order-1", 0))
    publishing = Publishing(outbox, Broker(lambda _: True, room=0), {outbox.topic: 4})
    running = await publishing.start()
    with pytest.raises(KafkaFailure) as failure:
        await running
    assert failure.value.permanent
    assert await outbox.unpublished() == 1


async def test_f8_a_burst_into_an_empty_analysed_log_is_read_by_index(outbox: OutboxUnderTest) -> None:
    from shared.outbox.log import relay_database
    from tests.support.outbox import database_settings

    relay = relay_database(database_settings(outbox.dsn), 10.0)
    log = OutboxLog(relay)
    try:
        async with log.connect() as connection, log.reader() as reader:
            await connection.exec_driver_sql("ANALYZE outbox_event")
            for _ in range(8):  # long enough for the server to keep a generic plan
                assert not await reader.read(dict.fromkeys(range(96), 0), Page(9600, 50, 10**6, 1000))
            await connection.exec_driver_sql(
                "INSERT INTO outbox_event (event_id, bucket, topic, key, event_type, payload) "
                "SELECT gen_random_uuid(), n % 96, 't', 'k', 'e', repeat('x', 300)::bytea "
                "FROM generate_series(1, 100000) n"
            )
            cursors = {
                row.bucket: row.position
                for row in await connection.exec_driver_sql(
                    "SELECT bucket, max(position) AS position FROM outbox_event GROUP BY bucket"
                )
            }
            scans = "SELECT seq_scan FROM pg_stat_user_tables WHERE relname = 'outbox_event'"
            await connection.exec_driver_sql("SELECT pg_stat_force_next_flush()")
            before = (await connection.exec_driver_sql(scans)).scalar_one()
            for _ in range(3):
                assert not await reader.read(cursors, Page(9600, 50, 10**6, 1000))
            await connection.exec_driver_sql("SELECT pg_stat_force_next_flush()")
            assert (await connection.exec_driver_sql(scans)).scalar_one() == before
    finally:
        await relay.close()


async def test_large_events_are_bounded_in_bytes_and_small_ones_are_not_summed(outbox: OutboxUnderTest) -> None:
    large, small = outbox.event("order-1", 0, payload=b"x" * 3000), outbox.event("order-2", 0)
    log = OutboxLog(outbox.database)
    everything = dict.fromkeys(range(96), 0)
    page = Page(rows=1000, rows_per_bucket=100, bytes_per_bucket=7000, small_bytes=2000)
    async with log.reader() as reader:
        await outbox.publish(small)
        assert [row[6] for row in await reader.read(everything, page)] == [small.payload]
        await outbox.publish(*(replace(large, event_id=new_event_id()) for _ in range(5)))
        for _ in range(2):  # found out, and known
            read = await reader.read(everything, page)
            assert sorted(len(row[6]) for row in read) == [len(small.payload), 3000, 3000, 3000]
        cursors = dict(everything)
        sizes = []
        while read := await reader.read(cursors, page):
            cursors |= {row[0]: row[1] for row in read}
            sizes += [len(row[6]) for row in read]
        assert sorted(sizes) == [len(small.payload), *[3000] * 5]


async def test_called_for_a_bucket_the_publisher_reads_it_and_soon_all_others(outbox: OutboxUnderTest) -> None:
    """A call is a hint: an event that nobody called for does not wait for the calls to end."""
    broker = Broker(lambda _: True)
    settings = PublisherSettings(poll_seconds=60, first_poll_seconds=60, sweep_seconds=0.05)
    publishing = Publishing(outbox, broker, {outbox.topic: 4}, settings)
    running = await publishing.start()
    called, silent = outbox.event("order-1", 0), outbox.event("order-2", 0)
    await outbox.publish(silent, called)

    def sent() -> set[bytes]:
        return {value for batch in broker.handed_over for _, value in batch.records}

    async with asyncio.timeout(10):
        while sent() != {called.payload, silent.payload}:
            publishing.calls.hear(str(bucket_of(called.key)))
            await asyncio.sleep(0.005)
    await outbox.drained()
    await publishing.stop(running)


def test_batches_are_what_the_kit_sends() -> None:
    """The fake has every method of a record batch that the publisher uses, under the same names."""
    assert all(hasattr(RecordBatch, name) for name in ("add", "size_bytes", "topic", "partition"))
    assert all(hasattr(IdempotentProducer, name) for name in ("new_batch", "submit", "known_partition_count"))
