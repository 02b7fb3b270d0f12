"""What the relay costs, in counts that are the same on every machine: statements, commits, bytes on the wire."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import asyncpg
import pytest

from chargeonce.stack import KafkaBroker, PostgresServer
from shared.database import Database
from shared.outbox.publisher import PublisherSettings
from tests.support.outbox import OutboxUnderTest, database_settings, outbox_under_test

RELAY_USER = "counted_relay"

# Nothing but wake-up calls makes the relay read, and no lease is renewed while statements are counted.
UNDISTURBED = PublisherSettings(poll_seconds=60.0, first_poll_seconds=60.0)
LEASE_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Counts:
    """Statements of the relay's sessions, and those among them that wrote: each is a transaction of its own."""

    statements: int
    commits: int


@pytest.fixture(scope="module")
async def counting_postgres(stack_directory: Path) -> AsyncIterator[PostgresServer]:
    """A server that counts the statements of each user."""
    server = PostgresServer(
        stack_directory / "counting-postgres", settings={"shared_preload_libraries": "pg_stat_statements"}
    )
    await server.start()
    yield server
    await server.stop()
    server.remove()


@pytest.fixture
async def outbox(
    counting_postgres: PostgresServer, kafka: KafkaBroker, unique_name: str
) -> AsyncIterator[OutboxUnderTest]:
    """An outbox, in a database that lists the counts."""
    await counting_postgres.create_database(unique_name)
    connection = await asyncpg.connect(counting_postgres.dsn(unique_name))
    await connection.execute("CREATE EXTENSION pg_stat_statements")
    if not await connection.fetchval("SELECT 1 FROM pg_roles WHERE rolname = $1", RELAY_USER):
        await connection.execute(f"CREATE ROLE {RELAY_USER} LOGIN SUPERUSER")
    await connection.close()
    url = counting_postgres.url(unique_name)
    async with outbox_under_test(url, kafka.bootstrap_servers, unique_name) as made:
        yield made


@pytest.fixture
async def relayed_outbox(outbox: OutboxUnderTest) -> AsyncIterator[OutboxUnderTest]:
    """The same outbox as the relay's own user sees it."""
    database = Database(database_settings(outbox.database.settings.url.replace("postgres@", f"{RELAY_USER}@")))
    yield replace(outbox, database=database)
    await database.close()


async def count_from_now(connection: asyncpg.Connection) -> None:
    await connection.execute("SELECT pg_stat_statements_reset()")


async def counted(connection: asyncpg.Connection) -> Counts:
    row = await connection.fetchrow(
        "SELECT coalesce(sum(calls), 0)::int AS statements, "
        "coalesce(sum(calls) FILTER (WHERE wal_records > 0), 0)::int AS commits "
        "FROM pg_stat_statements s JOIN pg_roles r ON r.oid = s.userid WHERE r.rolname = $1",
        RELAY_USER,
    )
    assert row is not None
    return Counts(row["statements"], row["commits"])


async def wake(connection: asyncpg.Connection) -> None:
    await connection.execute("SELECT pg_notify('outbox_event', '')")


async def test_an_event_alone_costs_two_statements_and_one_commit(
    outbox: OutboxUnderTest, relayed_outbox: OutboxUnderTest
) -> None:
    events = 25
    connection = await asyncpg.connect(outbox.dsn)
    async with relayed_outbox.relay(UNDISTURBED, lease_seconds=LEASE_SECONDS):
        await publish_one(outbox, connection, 0)
        await count_from_now(connection)
        for number in range(events):
            await publish_one(outbox, connection, number + 1)
        counts = await counted(connection)
    await connection.close()
    # The listener's ping, every five seconds, is the relay's too.
    assert 2 * events <= counts.statements <= 2 * events + 3
    assert counts.commits == events
    assert outbox.check_order(await outbox.arrived()) == 0


async def publish_one(outbox: OutboxUnderTest, connection: asyncpg.Connection, number: int) -> None:
    """Publish one event of a key and return when it is recorded as published."""
    await outbox.publish(outbox.event("order-1", number))
    await wake(connection)
    await outbox.drained()


async def test_a_backlog_costs_at_most_two_statements_and_one_commit_a_batch(
    outbox: OutboxUnderTest, relayed_outbox: OutboxUnderTest, kafka: KafkaBroker
) -> None:
    connection = await asyncpg.connect(outbox.dsn)
    keys = [f"order-{number}" for number in range(200)]
    async with relayed_outbox.relay(UNDISTURBED, lease_seconds=LEASE_SECONDS):
        await publish_one(outbox, connection, 0)
        await count_from_now(connection)
        for number in range(1, 31):
            await outbox.publish(*(outbox.event(key, number - (key != "order-1")) for key in keys))
        await wake(connection)
        await outbox.drained()
        counts = await counted(connection)
    await connection.close()
    batches = sum(map(count_batches, segments(kafka, outbox.topic)))
    assert counts.statements <= 2 * batches
    assert counts.commits <= batches
    assert outbox.check_order(await outbox.arrived()) == 0


def segments(kafka: KafkaBroker, topic: str) -> list[bytes]:
    """The contents of a topic's log segments: the record batches as they came over the wire."""
    return [path.read_bytes() for path in (kafka.directory / "data").glob(f"{topic}-*/*.log")]


def count_batches(segment: bytes) -> int:
    """How many record batches a segment holds; each begins with its offset (8 bytes) and its length (4)."""
    count = at = 0
    while at < len(segment):
        at += 12 + int.from_bytes(segment[at + 8 : at + 12])
        count += 1
    return count


async def test_an_event_of_400_bytes_takes_at_most_550_on_the_wire(outbox: OutboxUnderTest, kafka: KafkaBroker) -> None:
    events = 2400
    for first in range(0, events, 400):
        await outbox.publish(
            *(
                outbox.event(f"{number % 200:036}", number // 200, payload=f"{number:0400}".encode())
                for number in range(first, first + 400)
            )
        )
    async with outbox.relay():
        await outbox.drained()
    size = sum(map(len, segments(kafka, outbox.topic)))
    assert 450 * events < size <= 550 * events
