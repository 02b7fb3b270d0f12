"""An outbox of its own for a test: database, registered topic, writers, relays, and what arrived in Kafka."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import asyncpg
from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Connection, text

from shared.database import Database, DatabaseSettings
from shared.identifiers import new_event_id
from shared.kafka.settings import KafkaSettings
from shared.kafka.topics import TopicSpec, ensure_topics
from shared.lifecycle import running
from shared.outbox.append import EventWriter, OutgoingEvent
from shared.outbox.bootstrap import OutboxSettings, relay_services
from shared.outbox.log import relay_database
from shared.outbox.migrations import upgrade_1, upgrade_2
from shared.outbox.publisher import PublisherSettings
from shared.outbox.relay import Relay, RelaySettings
from shared.outbox.topics import register_topics
from shared.unit_of_work import UnitsOfWork


async def until(condition: Callable[[], object], deadline_seconds: float = 30.0, what: str = "the condition") -> None:
    """Wait for a condition, or fail with its name."""
    async with asyncio.timeout(deadline_seconds):
        while not condition():
            await asyncio.sleep(0.01)
    assert condition(), what


def database_settings(url: str, **changes: object) -> DatabaseSettings:
    """Settings of a test's database."""
    return DatabaseSettings(url=url, application_name="test", **changes)  # type: ignore[arg-type]


@dataclass
class OutboxUnderTest:
    """A migrated outbox with one topic."""

    database: Database
    kafka: KafkaSettings
    topic: str
    partitions: int
    units: UnitsOfWork
    published: int = 0
    _databases: list[Database] = field(default_factory=list)

    @property
    def dsn(self) -> str:
        return self.database.dsn

    def event(self, key: str, number: int, **changes: object) -> OutgoingEvent:
        """An event whose payload tells its key and number."""
        fields: dict[str, object] = {
            "event_id": new_event_id(),
            "topic": self.topic,
            "key": key.encode(),
            "event_type": "test.happened.v1",
            "payload": f"{key}:{number}".encode(),
        }
        return OutgoingEvent(**{**fields, **changes})  # type: ignore[arg-type]

    async def publish(self, *events: OutgoingEvent) -> None:
        """Append events in one transaction."""
        async with self.units.begin() as work:
            for event in events:
                work.publish(event)
        self.published += len(events)

    @asynccontextmanager
    async def relay(
        self, publishing: PublisherSettings | None = None, url: str | None = None, **changes: object
    ) -> AsyncIterator[Relay]:
        """Run a relay in this process; `url` leads it to the database by another way."""
        settings = OutboxSettings(
            **{
                "listen_dsn": self.dsn,
                "channel": "outbox_event",
                "kafka": self.kafka,
                "lease_seconds": 3.0,
                "poll_seconds": 0.1,
                "delivery_deadline_seconds": 45.0,
                "retention_hours": 72.0,
                **changes,
            }  # type: ignore[arg-type]
        )
        way = database_settings(url or self.database.settings.url, pool_size=6)
        pool = relay_database(way, settings.lease_seconds)
        services = relay_services(pool, settings)
        relay = next(service for service in services if isinstance(service, Relay))
        if publishing is not None:
            relay._settings = RelaySettings(publishing)
        try:
            async with running(services):
                yield relay
        finally:
            await pool.close()

    async def unpublished(self) -> int:
        """How many events have no recorded progress."""
        connection = await asyncpg.connect(self.dsn)
        try:
            return int(
                await connection.fetchval(
                    "SELECT count(*) FROM outbox_event e WHERE position > coalesce("
                    "(SELECT max(position) FROM outbox_progress p WHERE p.bucket = e.bucket), 0)"
                )
            )
        finally:
            await connection.close()

    async def drained(self, deadline_seconds: float = 60.0) -> None:
        """Wait until every event is recorded as published."""
        async with asyncio.timeout(deadline_seconds):
            while await self.unpublished():
                await asyncio.sleep(0.05)

    async def arrived(self) -> list[ConsumerRecord]:
        """Everything in the topic, in the order of each partition."""
        return await read_topic(self.kafka.bootstrap_servers, self.topic)

    async def limit_message_bytes(self, most: int) -> None:
        """Let the topic take record batches of at most so many bytes; return when the broker knows it."""
        admin = AIOKafkaAdminClient(bootstrap_servers=self.kafka.bootstrap_servers)
        await admin.start()
        try:
            limit = {"max.message.bytes": str(most)}
            [answer] = await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, self.topic, configs=limit)])
            assert not answer.resources[0][0], answer
            asked = ConfigResource(ConfigResourceType.TOPIC, self.topic)
            async with asyncio.timeout(20):
                while True:
                    [told] = await admin.describe_configs([asked])
                    if any(entry[:2] == ("max.message.bytes", str(most)) for entry in told.resources[0][4]):
                        break
                    await asyncio.sleep(0.02)
        finally:
            await admin.close()

    async def parked(self) -> list[tuple[bytes, bool, str | None]]:
        """What is parked, in order: payload, whether it was refused itself, and its outcome."""
        async with self.database.engine.connect() as connection:
            rows = await connection.execute(
                text("SELECT payload, refused, outcome FROM outbox_parked ORDER BY bucket, position")
            )
            return [(bytes(row.payload), row.refused, row.outcome) for row in rows]

    async def release(self, key: str) -> None:
        """What `outbox parked release` does."""
        async with self.database.engine.begin() as connection:
            await connection.execute(
                text(
                    "UPDATE outbox_parked SET released_at = clock_timestamp(), released_by = 'test' "
                    "WHERE key = :key AND settled_at IS NULL"
                ),
                {"key": key.encode()},
            )

    def check_order(self, records: Sequence[ConsumerRecord]) -> int:
        """Assert that the first copies of each key's events came in order and none is missing; return the copies."""
        seen: dict[bytes, list[int]] = {}
        ids = set()
        for record in records:
            event_id = dict(record.headers)["event_id"]
            if event_id in ids:
                continue
            ids.add(event_id)
            key, _, number = record.value.decode().partition(":")
            assert key.encode() == record.key
            seen.setdefault(record.key, []).append(int(number))
        for key, numbers in seen.items():
            assert numbers == list(range(len(numbers))), f"{key!r}: {numbers}"
        assert len(ids) == self.published
        return len(records) - len(ids)


async def read_topic(bootstrap_servers: str, topic: str) -> list[ConsumerRecord]:
    """Read a topic from its beginning to its present end."""
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap_servers, auto_offset_reset="earliest")
    await consumer.start()
    try:
        while not (partitions := consumer.partitions_for_topic(topic)):
            await consumer._client.force_metadata_update()
            await consumer.topics()
        places = [TopicPartition(topic, partition) for partition in partitions]
        consumer.assign(places)
        ends = await consumer.end_offsets(places)
        records: list[ConsumerRecord] = []
        while any([await consumer.position(place) < ends[place] for place in places]):
            for batch in (await consumer.getmany(timeout_ms=200)).values():
                records.extend(batch)
        return records
    finally:
        await consumer.stop()


@asynccontextmanager
async def outbox_under_test(
    url: str, bootstrap_servers: str, name: str, partitions: int = 12
) -> AsyncIterator[OutboxUnderTest]:
    """Make the outbox in an empty database, and its topic."""
    database = Database(database_settings(url, pool_size=20))
    try:
        await migrate_with(database, upgrade_1, upgrade_2)
        kafka = KafkaSettings(bootstrap_servers, client_id="test", request_timeout_seconds=10)
        topic = TopicSpec(f"{name}.happened", partitions, 1, 1)
        await ensure_topics(kafka, [topic])
        await register_topics(database, [topic])
        yield OutboxUnderTest(database, kafka, topic.name, partitions, UnitsOfWork(database, EventWriter()))
    finally:
        await database.close()


async def migrate_with(database: Database, *upgrades: Callable[[Operations], None]) -> None:
    """Run frozen DDL functions of the kit in an empty database."""

    def run(connection: Connection) -> None:
        operations = Operations(MigrationContext.configure(connection))
        for upgrade in upgrades:
            upgrade(operations)

    async with database.engine.begin() as connection:
        await connection.run_sync(run)


async def scalar(database: Database, statement: str, *, commit: bool = False, **parameters: object) -> object:
    """Return the single value of a query; commit what it did if asked to."""
    async with database.engine.connect() as connection:
        value = (await connection.execute(text(statement), parameters)).scalar_one()
        if commit:
            await connection.commit()
        return value
