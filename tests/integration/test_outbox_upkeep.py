"""The outbox's keeper: what it removes, what it never removes, and that two of them do not disturb each other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace

import asyncpg
import pytest
from prometheus_client import REGISTRY
from sqlalchemy import text

from chargeonce.stack import KafkaBroker
from shared.errors import Unavailable
from shared.lifecycle import State
from shared.outbox import upkeep
from shared.outbox.admission import Admission, BacklogLimits
from shared.outbox.append import bucket_of
from shared.outbox.log import relay_database
from shared.outbox.upkeep import BacklogMonitor, OutboxKeeper
from tests.support.outbox import OutboxUnderTest, database_settings, outbox_under_test, scalar

AT_ONCE = 1e-9
"""A retention, in hours, that is over as soon as a row is there."""


@pytest.fixture
async def outbox(database_url: str, kafka: KafkaBroker, unique_name: str) -> AsyncIterator[OutboxUnderTest]:
    async with outbox_under_test(database_url, kafka.bootstrap_servers, unique_name) as made:
        yield made


async def mark_published(outbox: OutboxUnderTest) -> None:
    """What a relay records when everything was acknowledged."""
    async with outbox.database.engine.begin() as connection:
        await connection.execute(
            text("INSERT INTO outbox_progress SELECT bucket, max(position) FROM outbox_event GROUP BY 1")
        )


async def park(outbox: OutboxUnderTest, key: str, outcome: str | None) -> None:
    async with outbox.database.engine.begin() as connection:
        await connection.execute(
            text(
                "INSERT INTO outbox_parked (bucket, position, event_id, topic, key, event_type, payload, headers, "
                "created_at, reason, settled_at, outcome) SELECT bucket, position, event_id, topic, key, event_type, "
                "payload, headers, created_at, 'test', CASE WHEN CAST(:outcome AS text) IS NOT NULL THEN now() END, "
                ":outcome FROM outbox_event WHERE key = :key"
            ),
            {"key": key.encode(), "outcome": outcome},
        )


async def events(outbox: OutboxUnderTest) -> object:
    return await scalar(outbox.database, "SELECT count(*) FROM outbox_event")


async def test_f7_published_rows_past_the_retention_are_deleted_and_the_cursor_stays(outbox: OutboxUnderTest) -> None:
    await outbox.publish(*(outbox.event(f"order-{key}", 0) for key in range(40)))
    async with outbox.relay():
        await outbox.drained()
    await outbox.publish(outbox.event("order-1", 1))
    cursor = await scalar(outbox.database, "SELECT max(position) FROM outbox_progress")
    await OutboxKeeper(outbox.database, AT_ONCE).do()
    assert await events(outbox) == 1, "the unpublished event stays"
    assert await scalar(outbox.database, "SELECT max(position) FROM outbox_progress") == cursor


async def test_f7_rows_within_the_retention_stay(outbox: OutboxUnderTest) -> None:
    await outbox.publish(*(outbox.event(f"order-{key}", 0) for key in range(40)))
    await mark_published(outbox)
    await OutboxKeeper(outbox.database, 1.0).do()
    assert await events(outbox) == 40


async def test_f7_a_parked_event_stays_until_it_is_settled_and_holds_up_no_other_row(outbox: OutboxUnderTest) -> None:
    await outbox.publish(*(outbox.event("bad", number) for number in range(70)))
    other = next(key for key in map("order-{}".format, range(10_000)) if bucket_of(key.encode()) == bucket_of(b"bad"))
    await outbox.publish(*(outbox.event(other, number) for number in range(70)))
    await mark_published(outbox)
    await park(outbox, "bad", None)
    await OutboxKeeper(outbox.database, AT_ONCE).do()
    assert await events(outbox) == 70
    async with outbox.database.engine.begin() as connection:
        await connection.execute(text("UPDATE outbox_parked SET settled_at = now(), outcome = 'discarded'"))
    await OutboxKeeper(outbox.database, AT_ONCE).do()
    assert await events(outbox) == 0
    assert await outbox.parked() == []


async def test_f7_a_settled_event_that_the_cursor_has_not_passed_is_kept_aside(outbox: OutboxUnderTest) -> None:
    await outbox.publish(outbox.event("bad", 0))
    await park(outbox, "bad", "discarded")
    await OutboxKeeper(outbox.database, AT_ONCE).do()
    assert len(await outbox.parked()) == 1


async def test_f7_an_event_that_commits_during_the_cleaning_is_published(outbox: OutboxUnderTest) -> None:
    writer = await asyncpg.connect(outbox.dsn)
    try:
        async with outbox.relay():
            await outbox.publish(*(outbox.event("order-1", number) for number in range(20)))
            await outbox.drained()
            held = writer.transaction()
            await held.start()
            await writer.execute(
                "INSERT INTO outbox_event (event_id, bucket, topic, key, event_type, payload) "
                "VALUES (gen_random_uuid(), $1, $2, 'order-1', 't', 'order-1:20')",
                bucket_of(b"order-1"),
                outbox.topic,
            )
            keeper = OutboxKeeper(outbox.database, AT_ONCE)
            await keeper.do()
            await held.commit()
            await keeper.do()
            assert await events(outbox) == 1
            await outbox.drained()
    finally:
        await writer.close()
    assert (await outbox.arrived())[-1].value == b"order-1:20"


async def test_f7_two_keepers_at_once_do_not_disturb_each_other(outbox: OutboxUnderTest) -> None:
    for _ in range(10):
        await outbox.publish(*(outbox.event(f"order-{key}", 0) for key in range(400)))
    await mark_published(outbox)
    await asyncio.gather(*(OutboxKeeper(outbox.database, AT_ONCE).do() for _ in range(4)))
    await OutboxKeeper(outbox.database, AT_ONCE).do()
    assert await events(outbox) == 0


async def test_the_keepers_lag_tells_how_long_rows_are_kept_too_long(outbox: OutboxUnderTest) -> None:
    await outbox.publish(outbox.event("order-1", 0), outbox.event("order-2", 0))
    await mark_published(outbox)
    async with outbox.database.engine.begin() as connection:
        await connection.execute(text("ALTER TABLE outbox_event DISABLE TRIGGER outbox_event_refuse_update"))
        await connection.execute(text("UPDATE outbox_event SET created_at = now() - interval '3 hours'"))
        await connection.execute(text("SELECT pg_advisory_xact_lock(1262830928)"))  # another keeper hangs
        await OutboxKeeper(outbox.database, retention_hours=1.0).do()
        lag = REGISTRY.get_sample_value("outbox_keeper_lag_seconds") or 0.0
        assert lag == 0.0, "the rows are not that old before this transaction commits"
    async with outbox.database.engine.begin() as connection:
        await connection.execute(text("SELECT pg_advisory_xact_lock(1262830928)"))
        await OutboxKeeper(outbox.database, retention_hours=1.0).do()
        assert 7000 < (REGISTRY.get_sample_value("outbox_keeper_lag_seconds") or 0.0) < 7400
    await OutboxKeeper(outbox.database, retention_hours=1.0).do()
    assert REGISTRY.get_sample_value("outbox_keeper_lag_seconds") == 0.0
    assert await events(outbox) == 0


async def test_parked_events_are_a_metric_and_make_the_process_degraded(outbox: OutboxUnderTest) -> None:
    await outbox.publish(outbox.event("bad", 0))
    await outbox.publish(outbox.event("bad", 1))
    await park(outbox, "bad", None)
    async with outbox.database.engine.begin() as connection:
        await connection.execute(text("UPDATE outbox_parked SET refused = (payload = 'bad:0')"))
    await mark_published(outbox)
    monitor = BacklogMonitor(outbox.database, degraded_after_seconds=30)
    await monitor.do()
    assert REGISTRY.get_sample_value("outbox_parked_events") == 2
    assert REGISTRY.get_sample_value("outbox_parked_heads") == 1
    assert monitor.ready().state is State.DEGRADED
    assert "outbox parked list" in monitor.ready().reason


@pytest.mark.parametrize("limits", [BacklogLimits(events=2), BacklogLimits(age_seconds=0.001)])
async def test_past_a_limit_the_process_is_degraded_and_says_that_it_refuses(
    outbox: OutboxUnderTest, limits: BacklogLimits
) -> None:
    monitor = BacklogMonitor(outbox.database, 30, limits)
    await outbox.publish(*(outbox.event("order-1", number) for number in range(3)))
    await asyncio.sleep(0.002)  # the events' age is what is measured
    await monitor.do()
    assert monitor.ready().state is State.DEGRADED
    assert "refused with 503" in monitor.ready().reason
    assert REGISTRY.get_sample_value("outbox_backpressure") == 1
    with pytest.raises(Unavailable):
        Admission(limits, monitor.latest).check()
    await mark_published(outbox)
    await monitor.do()
    assert monitor.ready().state is State.READY
    assert REGISTRY.get_sample_value("outbox_backpressure") == 0
    Admission(limits, monitor.latest).check()


async def test_a_measurement_that_is_too_old_refuses_nothing(
    outbox: OutboxUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = BacklogLimits(events=1)
    monitor = BacklogMonitor(outbox.database, 30, limits)
    await outbox.publish(*(outbox.event("order-1", number) for number in range(3)))
    await monitor.do()
    with pytest.raises(Unavailable):
        Admission(limits, monitor.latest).check()
    later = time.monotonic() + 60
    monkeypatch.setattr("shared.outbox.upkeep.time", SimpleNamespace(monotonic=lambda: later))
    Admission(limits, monitor.latest).check()


async def test_f7_f8_cleaning_100k_rows_walks_the_index_in_bounded_chunks_whatever_the_statistics_say(
    outbox: OutboxUnderTest,
) -> None:
    pool = relay_database(database_settings(outbox.dsn, pool_size=2), lease_seconds=10.0)
    rows = 100_000
    try:
        async with outbox.database.engine.begin() as connection:
            await connection.execute(text("ANALYZE outbox_event, outbox_progress, outbox_parked"))
            await connection.execute(text("ALTER TABLE outbox_event DISABLE TRIGGER outbox_event_draw_position"))
            await connection.execute(_MANY_EVENTS, {"rows": rows, "topic": outbox.topic})
            await connection.execute(text("ALTER TABLE outbox_event ENABLE TRIGGER outbox_event_draw_position"))
        await mark_published(outbox)
        async with pool.engine.begin() as connection:
            explained = await connection.execute(text(f"EXPLAIN {upkeep._CLEAN_EVENTS}"), {"hours": AT_ONCE})
            plan = "\n".join(line for (line,) in explained)
        assert "Seq Scan on outbox_event" not in plan, plan
        assert "Sort" not in plan, plan
        keeper = OutboxKeeper(pool, AT_ONCE)
        async with pool.engine.begin() as connection:
            assert 0 < await keeper._clean_chunk(connection) <= 96 * 50 * 2 + 1000
        async with asyncio.timeout(60):
            await keeper.do()
        assert await events(outbox) == 0
    finally:
        await pool.close()


_MANY_EVENTS = text("""
    INSERT INTO outbox_event (event_id, bucket, position, topic, key, event_type, payload)
    SELECT gen_random_uuid(), n % 96, n, :topic, 'k', 'e', 'p' FROM generate_series(1, :rows) AS n
""")
