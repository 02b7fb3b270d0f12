"""Databases of the measures: templates that are filled once, and copies for each run."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import asyncpg

from billing_service.settings import BillingServiceSettings
from billing_service.tables import metadata as billing_metadata
from chargeonce.stack import PostgresServer
from order_service.settings import OrderServiceSettings
from order_service.tables import metadata
from shared.cli import migrate_database
from tests.benchmarks.events import BUCKET_OF, EVENT_TYPE, PARTITIONS, Event
from tests.benchmarks.processes import BenchmarkError
from tests.benchmarks.topic import TOPIC

# The partial index is what such relays are told to have; id is indexed for the UPDATE. Nothing else slows it down.
_NAIVE_TABLE = """
    CREATE TABLE outbox (
        id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        event_id   uuid NOT NULL,
        event_type text NOT NULL,
        key        bytea NOT NULL,
        payload    bytea NOT NULL,
        created_at timestamptz NOT NULL DEFAULT now(),
        published  timestamptz
    );
    CREATE INDEX outbox_unpublished ON outbox (id) WHERE published IS NULL
"""

# Marks and charges as one would write them down: a key each, and no more indexes than those.
_NAIVE_BILLING = """
    CREATE TABLE processed_event (
        event_id uuid NOT NULL, consumer_group text NOT NULL, processed_at timestamptz NOT NULL DEFAULT now(),
        PRIMARY KEY (event_id, consumer_group)
    );
    CREATE INDEX ON processed_event (processed_at);
    CREATE TABLE charge (
        charge_id uuid PRIMARY KEY DEFAULT uuidv7(), order_id bigint NOT NULL, event_id uuid NOT NULL UNIQUE,
        customer_id bigint NOT NULL, amount numeric(19, 4) NOT NULL, currency text NOT NULL,
        state text NOT NULL DEFAULT 'requested', requested_at timestamptz NOT NULL DEFAULT clock_timestamp()
    )
"""

_POLL_SECONDS = 0.1


class Databases:
    """Makes and fills databases of one server."""

    def __init__(self, server: PostgresServer) -> None:
        self.server = server
        self._made = 0

    async def make_product(self, name: str) -> None:
        """Make an empty database of the order service, by its own migrations."""
        await self.server.create_database(name)
        settings = OrderServiceSettings(database_url=self.server.dsn(name))
        topics = [settings.topic(TOPIC)]
        if topics[0].partitions != PARTITIONS:
            raise BenchmarkError(f"ORDER_SERVICE_TOPIC_PARTITIONS must be {PARTITIONS} or unset here")
        database = settings.database("benchmark")
        await migrate_database("order_service", database, metadata, topics, settings.dedup_window_days, 30.0)

    async def make_billing(self, name: str) -> None:
        """Make an empty database of the billing service, by its own migrations."""
        await self.server.create_database(name)
        settings = BillingServiceSettings(database_url=self.server.dsn(name))
        database = settings.database("benchmark")
        await migrate_database("billing_service", database, billing_metadata, [], settings.dedup_window_days, 30.0)

    async def make_naive_billing(self, name: str) -> None:
        """Make a database with the naive consumer's empty tables."""
        await self.server.create_database(name)
        async with self.connected(name) as connection:
            await connection.execute(_NAIVE_BILLING)

    async def make_naive(self, name: str) -> None:
        """Make a database with the naive relay's empty table."""
        await self.server.create_database(name)
        async with self.connected(name) as connection:
            await connection.execute(_NAIVE_TABLE)

    async def settle(self, name: str) -> None:
        """Leave no work behind that would fall to whoever is measured first: statistics, hint bits, dirty pages."""
        async with self.connected(name) as connection:
            await connection.execute("VACUUM (ANALYZE)")
        await self.flush()

    async def flush(self) -> None:
        """Write out what earlier work left in the memory of the server and of the kernel."""
        async with self.connected("postgres") as connection:
            await connection.execute("CHECKPOINT")
        await asyncio.to_thread(os.sync)

    @asynccontextmanager
    async def copy(self, template: str) -> AsyncIterator[str]:
        """Yield the name of a copy of a database, flushed; it is dropped afterwards."""
        self._made += 1
        name = f"{template}_{self._made}"
        async with self.connected("postgres") as connection:
            await connection.execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY")
        try:
            await self.flush()
            yield name
        finally:
            await self.server.drop_database(name)

    @asynccontextmanager
    async def connected(self, name: str) -> AsyncIterator[asyncpg.Connection]:
        """Yield a connection without the limits that the product sets for its own sessions."""
        connection = await asyncpg.connect(self.server.dsn(name))
        try:
            yield connection
        finally:
            await connection.close()


async def append(connection: asyncpg.Connection, events: Iterable[Event]) -> None:
    """Append to the product's log by COPY; its trigger locks the buckets and draws the positions as always."""
    await connection.copy_records_to_table(
        "outbox_event",
        records=((e.event_id, BUCKET_OF[e.key], TOPIC, e.key, EVENT_TYPE, e.payload) for e in events),
        columns=["event_id", "bucket", "topic", "key", "event_type", "payload"],
    )


async def append_naive(connection: asyncpg.Connection, events: Iterable[Event]) -> None:
    """Insert into the naive relay's table by COPY."""
    await connection.copy_records_to_table(
        "outbox",
        records=((e.event_id, EVENT_TYPE, e.key, e.payload) for e in events),
        columns=["event_id", "event_type", "key", "payload"],
    )


async def until_drained(connection: asyncpg.Connection, deadline_seconds: float = 300.0) -> float:
    """Wait until every event of the product's log is recorded as published; return when the last record was made.

    The time is the database's, in seconds since 1970; this process and the subjects have the same clock.
    """
    deadline = time.monotonic() + deadline_seconds
    while not await connection.fetchval(_DRAINED):
        if time.monotonic() > deadline:
            raise BenchmarkError(f"the relay had not published everything after {deadline_seconds:g} s")
        await asyncio.sleep(_POLL_SECONDS)
    at: float = await connection.fetchval("SELECT extract(epoch FROM max(published_at))::float8 FROM outbox_progress")
    return at


_DRAINED = """
    SELECT bool_and(coalesce(published.position, 0) >= coalesce(stored.position, 0))
    FROM outbox_bucket b
    CROSS JOIN LATERAL (SELECT max(position) AS position FROM outbox_progress WHERE bucket = b.bucket) AS published
    CROSS JOIN LATERAL (SELECT max(position) AS position FROM outbox_event WHERE bucket = b.bucket) AS stored
"""
