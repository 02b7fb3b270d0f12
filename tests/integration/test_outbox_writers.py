"""Position is commit order inside a bucket, whatever the writers do (field reports F1, F2, F50)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from uuid import uuid4

import asyncpg
import pytest

from chargeonce.stack import KafkaBroker
from tests.support.outbox import OutboxUnderTest, outbox_under_test

INSERT = (
    "INSERT INTO outbox_event (event_id, bucket, topic, key, event_type, payload) "
    "SELECT gen_random_uuid(), unnest($1::smallint[]), $2, 'k', 't', 'p'"
)


@pytest.fixture
async def outbox(database_url: str, kafka: KafkaBroker, unique_name: str) -> AsyncIterator[OutboxUnderTest]:
    async with outbox_under_test(database_url, kafka.bootstrap_servers, unique_name) as made:
        yield made


async def plain(connection: asyncpg.Connection, buckets: list[int]) -> int:
    await connection.execute(INSERT, buckets, "t")
    return len(buckets)


async def slow(connection: asyncpg.Connection, buckets: list[int]) -> int:
    async with connection.transaction():
        await connection.execute(INSERT, buckets, "t")
        await asyncio.sleep(random.random() * 0.02)
    return len(buckets)


async def rolled_back(connection: asyncpg.Connection, buckets: list[int]) -> int:
    transaction = connection.transaction()
    await transaction.start()
    await connection.execute(INSERT, buckets, "t")
    await asyncio.sleep(random.random() * 0.01)
    await transaction.rollback()
    return 0


async def savepoint(connection: asyncpg.Connection, buckets: list[int]) -> int:
    async with connection.transaction():
        inner = connection.transaction()
        await inner.start()
        await connection.execute(INSERT, buckets, "t")
        await inner.rollback()
        await connection.execute(INSERT, buckets, "t")
    return len(buckets)


async def serializable(connection: asyncpg.Connection, buckets: list[int]) -> int:
    try:
        async with connection.transaction(isolation="serializable"):
            await connection.execute(INSERT, buckets, "t")
            await connection.execute("SET LOCAL synchronous_commit = off")
    except asyncpg.SerializationError:
        return 0
    return len(buckets)


async def two_phase(connection: asyncpg.Connection, buckets: list[int]) -> int:
    name = str(uuid4())
    await connection.execute("BEGIN")
    await connection.execute(INSERT, buckets, "t")
    await connection.execute(f"PREPARE TRANSACTION '{name}'")
    await asyncio.sleep(random.random() * 0.02)
    await connection.execute(f"COMMIT PREPARED '{name}'")
    return len(buckets)


async def copied(connection: asyncpg.Connection, buckets: list[int]) -> int:
    columns = ["event_id", "bucket", "topic", "key", "event_type", "payload"]
    rows = [(uuid4(), bucket, "t", b"k", "t", b"p") for bucket in buckets]
    async with connection.transaction():
        await connection.copy_records_to_table("outbox_event", records=rows, columns=columns)
        await asyncio.sleep(random.random() * 0.01)
    return len(buckets)


WRITERS = [plain, slow, rolled_back, savepoint, serializable, two_phase, copied]


async def test_f1_a_cursor_reader_never_skips_a_row_that_commits_late(outbox: OutboxUnderTest) -> None:
    written = 0
    running = True

    async def write(writer_number: int) -> None:
        nonlocal written
        choose = random.Random(writer_number)
        connection = await asyncpg.connect(outbox.dsn)
        try:
            for _ in range(25):
                buckets = sorted(choose.choices(range(6), k=choose.randint(1, 8)))
                rows = await choose.choice(WRITERS)(connection, buckets)
                written += rows
        finally:
            await connection.close()

    async def read() -> list[tuple[int, int]]:
        connection = await asyncpg.connect(outbox.dsn)
        cursors = dict.fromkeys(range(6), 0)
        seen: list[tuple[int, int]] = []
        try:
            while True:
                last_round = not running
                for bucket, cursor in cursors.items():
                    rows = await connection.fetch(
                        "SELECT position FROM outbox_event WHERE bucket = $1 AND position > $2 ORDER BY position",
                        bucket,
                        cursor,
                    )
                    seen += [(bucket, row["position"]) for row in rows]
                    if rows:
                        cursors[bucket] = rows[-1]["position"]
                if last_round:
                    return seen
                await asyncio.sleep(0)
        finally:
            await connection.close()

    readers = [asyncio.create_task(read()) for _ in range(2)]
    async with asyncio.timeout(60):
        await asyncio.gather(*(write(number) for number in range(16)))
    running = False
    for seen in await asyncio.gather(*readers):
        assert len(seen) == len(set(seen)) == written


async def test_rows_of_the_log_cannot_be_changed(outbox: OutboxUnderTest) -> None:
    await outbox.publish(outbox.event("order-1", 0))
    connection = await asyncpg.connect(outbox.dsn)
    try:
        with pytest.raises(asyncpg.RestrictViolationError, match="insert-only"):
            await connection.execute("UPDATE outbox_event SET payload = 'x'")
    finally:
        await connection.close()


async def test_f50_transactions_that_publish_the_same_keys_in_opposite_order_do_not_deadlock(
    outbox: OutboxUnderTest,
) -> None:
    keys = [f"order-{number}" for number in range(30)]

    async def publish(order: list[str], rounds: int) -> None:
        for number in range(rounds):
            await outbox.publish(*(outbox.event(key, number) for key in order))

    async with asyncio.timeout(60):
        await asyncio.gather(*(publish(order, 15) for order in (keys, keys[::-1], sorted(keys, key=hash))))


async def test_f2_events_of_one_aggregate_have_the_order_of_the_commits_that_locked_its_row(
    outbox: OutboxUnderTest,
) -> None:
    connection = await asyncpg.connect(outbox.dsn)
    await connection.execute(
        "CREATE TABLE aggregate (id int PRIMARY KEY, version int); INSERT INTO aggregate VALUES (1, 0)"
    )

    async def change() -> None:
        from sqlalchemy import text

        async with outbox.units.begin() as work:
            bump = text("UPDATE aggregate SET version = version + 1 WHERE id = 1 RETURNING version")
            version = (await work.session.execute(bump)).scalar_one()
            await asyncio.sleep(random.random() * 0.005)
            work.publish(outbox.event("aggregate-1", version))

    await asyncio.gather(*(change() for _ in range(30)))
    rows = await connection.fetch("SELECT payload FROM outbox_event ORDER BY position")
    await connection.close()
    assert [row["payload"] for row in rows] == [f"aggregate-1:{version}".encode() for version in range(1, 31)]


async def test_a_rolled_back_unit_of_work_publishes_nothing_and_signals_nobody(outbox: OutboxUnderTest) -> None:
    signals: list[None] = []
    outbox.units._writer.signal = lambda _: signals.append(None)  # type: ignore[union-attr]

    async def publish_and_fail() -> None:
        async with outbox.units.begin() as work:
            work.publish(outbox.event("order-1", 0))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await publish_and_fail()
    assert (await outbox.unpublished(), signals) == (0, [])
    await outbox.publish(outbox.event("order-1", 0))
    assert (await outbox.unpublished(), len(signals)) == (1, 1)
