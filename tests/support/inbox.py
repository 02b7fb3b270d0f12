"""An inbox of its own for a test: database, topic, group, a handler that can misbehave, and what it did."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.record.util import calc_crc32c as crc32c
from sqlalchemy import event as sqlalchemy_event
from sqlalchemy import text

from shared.database import Database
from shared.errors import MessageRejected, is_transient
from shared.identifiers import new_event_id
from shared.inbox.batch import BatchSettler, Settled, receive
from shared.inbox.consumer import InboxConsumer, InboxSettings
from shared.inbox.messages import EventMessage, Incoming, decode_json
from shared.inbox.migrations import upgrade_1, upgrade_2, upgrade_3
from shared.inbox.summary import InboxSummary, inbox_summary
from shared.inbox.upkeep import ensure_partitions
from shared.kafka.records import ConsumedRecord
from shared.kafka.settings import KafkaSettings
from shared.kafka.topics import TopicSpec, ensure_topics
from shared.lifecycle import running
from shared.unit_of_work import UnitOfWork, UnitsOfWork
from tests.support.outbox import database_settings, migrate_with

PARTITIONS = 6


class Happened(EventMessage):
    """The event of these tests."""

    number: int


class EffectHandler:
    """Inserts a row for each event into `effect`, which has no key: an event handled twice is seen there."""

    def __init__(self, topic: str, *, has_permanent_key: bool = False) -> None:
        self.topics = (topic,)
        self.has_permanent_key = has_permanent_key
        self.fails_on: Callable[[Happened], Exception | None] = lambda message: None
        self.rejects: set[int] = set()
        self.before: Callable[[UnitOfWork], Awaitable[None]] | None = None
        self.batches: list[list[UUID]] = []

    def decode(self, record: ConsumedRecord) -> Happened:
        return decode_json(record, {"test.happened.v1": Happened})

    async def handle(self, work: UnitOfWork, events: Sequence[Incoming[Happened]]) -> Mapping[UUID, MessageRejected]:
        self.batches.append([event.event_id for event in events])
        if self.before is not None:
            await self.before(work)
        for event in events:
            error = self.fails_on(event.message)
            if error is not None:
                raise error
        accepted = [event for event in events if event.message.number not in self.rejects]
        await work.session.execute(
            text(
                "INSERT INTO effect (event_id, number) "
                "SELECT * FROM unnest(CAST(:ids AS uuid[]), CAST(:numbers AS bigint[]))"
            ),
            {"ids": [event.event_id for event in accepted], "numbers": [event.message.number for event in accepted]},
        )
        return {
            event.event_id: MessageRejected("not_wanted", "the test rejects it")
            for event in events
            if event.message.number in self.rejects
        }


def payload(number: int, event_id: UUID | None = None, /, **changes: object) -> bytes:
    """The JSON of an event; a change to None leaves the field out."""
    fields: dict[str, object] = {
        "event_id": str(event_id or new_event_id()),
        "event_type": "test.happened.v1",
        "occurred_at": datetime.now(UTC).isoformat(),
        "number": number,
    }
    return json.dumps({name: value for name, value in {**fields, **changes}.items() if value is not None}).encode()


def record(
    value: bytes | None,
    offset: int,
    headers: Iterable[tuple[str, bytes | None]] = (),
    *,
    partition: int = 0,
    topic: str = "t",
    key: bytes | None = None,
) -> ConsumedRecord:
    """A record as a consumer hands it on."""
    return ConsumedRecord(
        topic, partition, offset, key or f"key-{partition}-{offset}".encode(), value, tuple(headers), 0
    )


@dataclass
class InboxUnderTest:
    """A migrated inbox with one topic and one handler."""

    database: Database
    kafka: KafkaSettings
    topic: str
    group: str
    handler: EffectHandler
    units: UnitsOfWork
    _offset: int = 0
    consumers: list[InboxConsumer[Happened]] = field(default_factory=list)

    # ── without Kafka ──

    async def settle(self, *records: ConsumedRecord) -> Settled:
        """Settle records in one transaction."""
        settler = BatchSettler(group=self.group, units=self.units, handler=self.handler, deadline_seconds=25)
        return await settler.settle([receive(self.handler, one) for one in records])

    def record(
        self, value: bytes | None, headers: Iterable[tuple[str, bytes | None]] = (), key: bytes | None = None
    ) -> ConsumedRecord:
        """The next record of partition 0."""
        self._offset += 1
        return record(value, self._offset, headers, topic=self.topic, key=key)

    # ── with Kafka ──

    async def produce(
        self,
        *values: bytes | None,
        headers: Sequence[tuple[str, bytes | None]] = (),
        partition: int | None = None,
        key: bytes | None = None,
    ) -> None:
        """Write records to the topic, spread over its partitions unless one is named."""
        producer = AIOKafkaProducer(
            bootstrap_servers=self.kafka.bootstrap_servers, acks="all", linger_ms=2, max_batch_size=1 << 19
        )
        await producer.start()
        try:
            sent = [
                await producer.send(
                    self.topic,
                    value,
                    key=key or new_event_id().bytes,
                    headers=list(headers),
                    partition=index % PARTITIONS if partition is None else partition,
                )
                for index, value in enumerate(values)
            ]
            await asyncio.gather(*sent)
        finally:
            await producer.stop()

    async def produce_undecodable(self, partition: int) -> None:
        """Write three records in one batch; a header name of the middle one is not UTF-8."""
        producer = AIOKafkaProducer(bootstrap_servers=self.kafka.bootstrap_servers, acks="all")
        await producer.start()
        try:
            batch = producer.create_batch()
            for value, name in ((payload(901), "good"), (payload(902), "damaged"), (payload(903), "good")):
                batch.append(timestamp=None, key=b"key", value=value, headers=[(name, b"")])
            content = bytearray(batch._build())
            content[content.index(b"damaged")] = 0xFF
            content[17:21] = crc32c(bytes(content[21:])).to_bytes(4, "big")
            batch._buffer = bytes(content)
            await (await producer.send_batch(batch, self.topic, partition=partition))
        finally:
            await producer.stop()

    async def forget_offsets(self) -> None:
        """Let the group begin anew: commit offset 0 everywhere."""
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self.kafka.bootstrap_servers, group_id=self.group, enable_auto_commit=False
        )
        places = [TopicPartition(self.topic, partition) for partition in range(PARTITIONS)]
        consumer.assign(places)
        await consumer.start()
        try:
            await consumer.commit(dict.fromkeys(places, 0))
        finally:
            await consumer.stop()

    async def make_partitions(self) -> None:
        """What the upkeep does."""
        await ensure_partitions(self.database, window_days=3)

    def consumer(self, **changes: object) -> InboxConsumer[Happened]:
        """A consumer of the group, not started."""
        settings = InboxSettings(**{"group": self.group, "session_timeout_seconds": 6.0, **changes})  # type: ignore[arg-type]
        consumer = InboxConsumer(
            settings=settings, kafka=self.kafka, database=self.database, units=self.units, handler=self.handler
        )
        self.consumers.append(consumer)
        return consumer

    @asynccontextmanager
    async def consuming(self, **changes: object) -> AsyncIterator[InboxConsumer[Happened]]:
        """Run a consumer of the group in this process."""
        consumer = self.consumer(**changes)
        async with running([consumer]):
            yield consumer

    # ── what came of it ──

    async def rows(self, statement: str, **parameters: object) -> list[tuple[Any, ...]]:
        async with self.database.engine.begin() as connection:
            result = await connection.execute(text(statement), parameters)
            return [tuple(row) for row in result] if result.returns_rows else []

    async def numbers(self) -> list[int]:
        """The numbers of all effects, sorted; one twice means an event was handled twice."""
        return [int(str(row[0])) for row in await self.rows("SELECT number FROM effect ORDER BY number")]

    async def letters(self) -> dict[str, int]:
        """Dead letters by reason."""
        return dict((await self.summary()).dead_letters_open)

    async def marks(self) -> dict[str, int]:
        """Marks by outcome."""
        rows = await self.rows("SELECT outcome, count(*) FROM processed_event GROUP BY outcome")
        return {str(outcome): int(str(count)) for outcome, count in rows}

    async def summary(self) -> InboxSummary:
        async with self.database.session() as session:
            return await inbox_summary(session, self.group)

    async def settled(self, records: int, deadline_seconds: float = 60.0) -> InboxSummary:
        """Wait until so many records are settled, whatever became of each; an outage of the database is waited out."""
        async with asyncio.timeout(deadline_seconds):
            while True:
                try:
                    summary = await self.summary()
                except Exception as error:
                    if not is_transient(error):
                        raise
                else:
                    total = summary.handled + summary.duplicates_absorbed + summary.dead + summary.outside_window
                    if total >= records:
                        return summary
                await asyncio.sleep(0.05)


@asynccontextmanager
async def counted(inbox: InboxUnderTest) -> AsyncIterator[tuple[list[str], list[str]]]:
    """Collect the statements and commits that the block causes."""
    executed: list[str] = []
    commits: list[str] = []
    engine = inbox.database.engine.sync_engine

    def on_execute(_connection: object, _cursor: object, statement: str, *_rest: object) -> None:
        executed.append(statement)

    def on_commit(_connection: object) -> None:
        commits.append("commit")

    sqlalchemy_event.listen(engine, "before_cursor_execute", on_execute)
    sqlalchemy_event.listen(engine, "commit", on_commit)
    try:
        yield executed, commits
    finally:
        sqlalchemy_event.remove(engine, "before_cursor_execute", on_execute)
        sqlalchemy_event.remove(engine, "commit", on_commit)


@asynccontextmanager
async def inbox_under_test(
    url: str, bootstrap_servers: str, name: str, *, has_permanent_key: bool = False, topic: bool = True
) -> AsyncIterator[InboxUnderTest]:
    """Make the inbox in an empty database, and its topic unless `topic` is False."""
    database = Database(database_settings(url, pool_size=10))
    try:
        await migrate_with(database, upgrade_1, upgrade_2, upgrade_3)
        await ensure_partitions(database, window_days=3)
        async with database.engine.begin() as connection:
            await connection.execute(
                text(
                    "CREATE TABLE effect (event_id uuid NOT NULL, number bigint NOT NULL, "
                    "place bigint GENERATED ALWAYS AS IDENTITY)"
                )
            )
        kafka = KafkaSettings(bootstrap_servers, client_id="test", request_timeout_seconds=10)
        if topic:
            await ensure_topics(kafka, [TopicSpec(f"{name}.happened", PARTITIONS, 1, 1)])
        handler = EffectHandler(f"{name}.happened", has_permanent_key=has_permanent_key)
        yield InboxUnderTest(database, kafka, handler.topics[0], f"{name}-group", handler, UnitsOfWork(database))
    finally:
        await database.close()
