"""The batch transaction against a real PostgreSQL: marks, effects, dead letters and tally, without Kafka."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from shared.errors import MessageRejected, is_transient
from shared.identifiers import lowest_id_at, new_event_id
from shared.inbox.batch import BatchSettler, is_events_fault, receive
from shared.inbox.dead_letters import failure_text, storable
from shared.inbox.upkeep import fold_tally
from shared.kafka.records import ConsumedRecord
from shared.unit_of_work import UnitOfWork
from tests.support.inbox import InboxUnderTest, counted, inbox_under_test, payload, record


@pytest.fixture
async def inbox(database_url: str, unique_name: str) -> AsyncIterator[InboxUnderTest]:
    async with inbox_under_test(database_url, "127.0.0.1:1", unique_name, topic=False) as made:
        yield made


@pytest.fixture
async def keyed_inbox(database_url: str, unique_name: str) -> AsyncIterator[InboxUnderTest]:
    async with inbox_under_test(database_url, "127.0.0.1:1", unique_name, topic=False, has_permanent_key=True) as made:
        yield made


def id_at(moment: datetime) -> UUID:
    """A valid UUIDv7 that carries the moment."""
    return UUID(int=lowest_id_at(moment).int | (new_event_id().int & ((1 << 80) - 1)))


async def test_a_new_event_leaves_its_mark_its_effect_and_its_count(inbox: InboxUnderTest) -> None:
    value = payload(7)
    await inbox.settle(inbox.record(value))
    [(digest, outcome, group)] = await inbox.rows("SELECT payload_digest, outcome, consumer_group FROM processed_event")
    assert (digest, outcome, group) == (hashlib.sha256(value).digest(), "done", inbox.group)
    assert await inbox.numbers() == [7]
    assert (await inbox.summary()).handled == 1


async def test_f25_one_id_twice_in_a_batch_is_one_event_and_one_duplicate(inbox: InboxUnderTest) -> None:
    value = payload(1)
    settled = await inbox.settle(inbox.record(value), inbox.record(payload(2)), inbox.record(value))
    assert await inbox.numbers() == [1, 2]
    assert (settled.handled, settled.duplicates, settled.dead) == (2, 1, 0)


async def test_an_event_that_comes_again_later_is_absorbed(inbox: InboxUnderTest) -> None:
    value = payload(1)
    await inbox.settle(inbox.record(value))
    await inbox.settle(inbox.record(value), inbox.record(payload(2)))
    assert await inbox.numbers() == [1, 2]
    summary = await inbox.summary()
    assert (summary.handled, summary.duplicates_absorbed) == (2, 1)
    assert len(inbox.handler.batches) == 2


async def test_a_batch_of_duplicates_does_not_reach_the_handler(inbox: InboxUnderTest) -> None:
    value = payload(1)
    await inbox.settle(inbox.record(value))
    await inbox.settle(inbox.record(value), inbox.record(value))
    assert len(inbox.handler.batches) == 1
    assert (await inbox.summary()).duplicates_absorbed == 2


async def test_f27_another_group_handles_the_same_event_for_itself(inbox: InboxUnderTest) -> None:
    one = inbox.record(payload(1))
    await inbox.settle(one)
    other = BatchSettler(group="another", units=inbox.units, handler=inbox.handler, deadline_seconds=25)
    await other.settle([receive(inbox.handler, one)])
    assert await inbox.numbers() == [1, 1]


async def test_events_reach_the_handler_sorted_by_id(inbox: InboxUnderTest) -> None:
    ids = sorted(new_event_id() for _ in range(20))
    await inbox.settle(*(inbox.record(payload(n, event_id)) for n, event_id in enumerate(reversed(ids))))
    assert inbox.handler.batches == [ids]


REASONS: dict[str, Callable[[], tuple[bytes | None, list[tuple[str, bytes | None]]]]] = {
    "tombstone": lambda: (None, []),
    "not_json": lambda: (b"\x00\xff{", []),
    "invalid_message": lambda: (payload(1, number="one"), []),
    "unknown_event_type": lambda: (payload(1, event_type="test.unheard.v1"), []),
    "invalid_event_id": lambda: (payload(1, uuid4()), []),
    "event_id_mismatch": lambda: (payload(1), [("event_id", str(new_event_id()).encode())]),
    "outside_dedup_window": lambda: (payload(1, id_at(datetime.now(UTC) - timedelta(days=40))), []),
    "event_id_in_future": lambda: (payload(1, id_at(datetime.now(UTC) + timedelta(days=2))), []),
    "not_wanted": lambda: (payload(13), []),
}


@pytest.mark.parametrize("reason", REASONS)
async def test_poison_anywhere_in_a_batch_is_dead_lettered_and_its_neighbours_are_handled(
    inbox: InboxUnderTest, reason: str
) -> None:
    inbox.handler.rejects = {13}
    everything: list[ConsumedRecord] = []
    for place in (0, 2, 4):
        value, headers = REASONS[reason]()
        records = [inbox.record(payload(100 + place * 10 + number)) for number in range(4)]
        records.insert(place, inbox.record(value, headers))
        everything += records
        settled = await inbox.settle(*records)
        assert dict(settled.reasons) == {reason: 1}
        [letter] = await inbox.rows(
            "SELECT reason, payload, key, source_topic, status FROM dead_letter WHERE source_offset = :offset",
            offset=records[place].offset,
        )
        assert letter == (reason, value, records[place].key, inbox.topic, "open")
    assert await inbox.numbers() == [100 + place * 10 + number for place in (0, 2, 4) for number in range(4)]
    assert len(inbox.handler.batches) == 3, "poison is sorted out beforehand: it costs no second transaction"

    await inbox.settle(*everything)
    summary = await inbox.summary()
    assert (summary.handled, summary.duplicates_absorbed, summary.dead) == (12, 15, 3)
    assert summary.dead_letters_open == {reason: 3}


async def test_f26_a_rejected_event_has_a_dead_mark_and_a_letter_in_the_same_transaction(
    inbox: InboxUnderTest,
) -> None:
    inbox.handler.rejects = {2}
    await inbox.settle(*(inbox.record(payload(number)) for number in (1, 2, 3)))
    assert await inbox.marks() == {"done": 2, "dead": 1}
    assert (
        await inbox.rows(
            "SELECT event_id FROM processed_event WHERE outcome = 'dead' EXCEPT SELECT event_id FROM dead_letter"
        )
        == []
    )


async def test_the_same_id_with_another_payload_is_dead_lettered_and_never_handled(inbox: InboxUnderTest) -> None:
    event_id = new_event_id()
    await inbox.settle(inbox.record(payload(1, event_id)))
    await inbox.settle(inbox.record(payload(2, event_id)), inbox.record(payload(3)))
    twice = new_event_id()
    await inbox.settle(inbox.record(payload(4, twice)), inbox.record(payload(5, twice)))
    assert await inbox.numbers() == [1, 3, 4]
    assert await inbox.letters() == {"payload_mismatch": 2}
    assert await inbox.marks() == {"done": 3}


async def test_a_corrected_payload_under_a_dead_id_keeps_a_letter_of_its_own(inbox: InboxUnderTest) -> None:
    event_id = new_event_id()
    await inbox.settle(inbox.record(payload(1, event_id, number="one")))
    await inbox.settle(inbox.record(payload(1, event_id)))
    assert await inbox.letters() == {"invalid_message": 1, "payload_mismatch": 1}
    assert await inbox.numbers() == []


async def test_an_event_older_than_the_window_is_given_to_a_handler_with_a_permanent_key(
    keyed_inbox: InboxUnderTest,
) -> None:
    value = payload(1, id_at(datetime.now(UTC) - timedelta(days=400)))
    settled = await keyed_inbox.settle(keyed_inbox.record(value), keyed_inbox.record(value))
    assert await keyed_inbox.numbers() == [1]
    assert (settled.outside_window, settled.duplicates) == (1, 1)
    assert await keyed_inbox.marks() == {}


async def test_a_handler_with_a_permanent_key_can_reject_an_event_older_than_the_window(
    keyed_inbox: InboxUnderTest,
) -> None:
    keyed_inbox.handler.rejects = {1}
    value = payload(1, id_at(datetime.now(UTC) - timedelta(days=400)))
    await keyed_inbox.settle(keyed_inbox.record(value))
    await keyed_inbox.settle(keyed_inbox.record(value))
    summary = await keyed_inbox.summary()
    assert (summary.dead, summary.duplicates_absorbed) == (1, 1)


async def test_f33_an_id_of_the_last_millisecond_is_refused_not_crashed_on(inbox: InboxUnderTest) -> None:
    last = UUID(int=((1 << 48) - 1) << 80 | (7 << 76) | (2 << 62) | 5)
    await inbox.settle(inbox.record(payload(1, last)))
    assert await inbox.letters() == {"event_id_in_future": 1}


async def test_a_missing_partition_is_transient_and_nobodys_fault(inbox: InboxUnderTest) -> None:
    today = f"processed_event_p{datetime.now(UTC):%Y%m%d}"
    await inbox.rows(f"ALTER TABLE processed_event DETACH PARTITION {today}")
    with pytest.raises(DBAPIError) as caught:
        await inbox.settle(inbox.record(payload(1)))
    assert is_transient(caught.value)
    assert not is_events_fault(caught.value)
    assert await inbox.letters() == {}


async def test_a_missing_table_is_the_deployments_fault_not_the_events(inbox: InboxUnderTest) -> None:
    await inbox.rows("DROP TABLE effect")
    with pytest.raises(DBAPIError) as caught:
        await inbox.settle(inbox.record(payload(1)))
    assert not is_events_fault(caught.value)


@pytest.mark.parametrize(
    "ruin",
    [
        "ALTER TABLE effect ALTER COLUMN number TYPE boolean USING true",  # 42804, datatype mismatch
        "ALTER TABLE effect ADD COLUMN more bigint NOT NULL",  # 23502 names a column, not a constraint
        "ALTER TABLE effect RENAME TO e; "
        "CREATE VIEW effect AS SELECT DISTINCT * FROM e",  # 55000, no insert into this view
    ],
)
async def test_what_a_deployment_ruins_is_never_an_events_fault(inbox: InboxUnderTest, ruin: str) -> None:
    for statement in ruin.split(";"):
        await inbox.rows(statement)
    with pytest.raises(DBAPIError) as caught:
        await inbox.settle(inbox.record(payload(1)))
    assert not is_events_fault(caught.value)


async def test_a_value_that_the_database_or_its_driver_refuses_is_the_events_fault(inbox: InboxUnderTest) -> None:
    await inbox.rows("ALTER TABLE effect ADD CONSTRAINT small CHECK (number < 1000)")
    for number in (5000, 2**70):
        with pytest.raises(DBAPIError) as caught:
            await inbox.settle(inbox.record(payload(number)))
        assert is_events_fault(caught.value)

    async def divide(work: UnitOfWork) -> None:
        await work.session.execute(text("SELECT 1 / 0"))

    inbox.handler.before = divide
    with pytest.raises(DBAPIError) as caught:
        await inbox.settle(inbox.record(payload(1)))
    assert is_events_fault(caught.value)


async def test_a_failed_batch_leaves_nothing(inbox: InboxUnderTest) -> None:
    inbox.handler.fails_on = lambda message: ValueError("boom") if message.number == 2 else None
    with pytest.raises(ValueError, match="boom"):
        await inbox.settle(*(inbox.record(payload(number)) for number in (1, 2, 3)), inbox.record(b"garbage"))
    assert await inbox.numbers() == []
    assert await inbox.marks() == {}
    assert (await inbox.summary()).handled == 0
    assert await inbox.letters() == {}


async def test_f50_two_consumers_with_the_same_ids_in_reverse_order_do_not_deadlock(inbox: InboxUnderTest) -> None:
    await inbox.rows("""
        CREATE FUNCTION linger() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN PERFORM pg_sleep(0.005); RETURN NEW; END $$
    """)
    await inbox.rows("CREATE TRIGGER linger BEFORE INSERT ON processed_event FOR EACH ROW EXECUTE FUNCTION linger()")
    for _ in range(3):
        values = [payload(number) for number in range(50)]
        there = [inbox.record(value) for value in values]
        back = [inbox.record(value) for value in reversed(values)]
        await asyncio.gather(inbox.settle(*there), inbox.settle(*back))
    assert len(await inbox.numbers()) == 150
    summary = await inbox.summary()
    assert (summary.handled, summary.duplicates_absorbed) == (150, 150)


NASTY = [
    ("nul\0name", b"\x00"),
    ("binary", bytes(range(256))),
    ("null", None),
    ("twice", b"1"),
    ("twice", b"2"),
    ("", b""),
]


async def test_f51_a_letter_takes_any_bytes_in_headers_key_and_payload(inbox: InboxUnderTest) -> None:
    value = b"\x00garbage" + bytes(range(256)) * 4100  # just over a megabyte
    await inbox.settle(record(value, 1, NASTY, key=b"\x00\xff"))
    [(headers, kept, key)] = await inbox.rows("SELECT headers::text, payload, key FROM dead_letter")
    names = [name for name, _ in json.loads(str(headers))]
    assert names == ["nul�name", "binary", "null", "twice", "twice", ""]
    assert json.loads(str(headers))[2] == ["null", None]
    assert (kept, key) == (value, b"\x00\xff")


async def test_f51_the_same_letter_twice_is_one_letter_and_no_error(inbox: InboxUnderTest) -> None:
    garbage = inbox.record(b"garbage")
    await inbox.settle(garbage, garbage)
    await inbox.settle(garbage)
    summary = await inbox.summary()
    assert (summary.dead, summary.duplicates_absorbed) == (1, 2)


async def test_f51_a_handlers_error_text_with_nul_and_surrogates_can_be_stored(inbox: InboxUnderTest) -> None:
    settler = BatchSettler(group=inbox.group, units=inbox.units, handler=inbox.handler, deadline_seconds=25)
    one = receive(inbox.handler, inbox.record(payload(1)))
    await settler.bury(one, ValueError("nul \0 and \ud800 surrogate " + "x" * 5000 + "\nsecond line"))
    [(reason, error)] = await inbox.rows("SELECT reason, error FROM dead_letter")
    assert reason == "handler_failed"
    assert str(error).startswith("ValueError: nul � and ? surrogate xxx")
    assert len(str(error)) == 500
    assert "second line" not in str(error)
    assert await inbox.marks() == {"dead": 1}


async def test_f51_a_letter_whose_contents_are_refused_is_written_without_them(inbox: InboxUnderTest) -> None:
    await inbox.rows("ALTER TABLE dead_letter ADD CONSTRAINT no_contents CHECK (payload IS NULL)")
    settler = BatchSettler(group=inbox.group, units=inbox.units, handler=inbox.handler, deadline_seconds=25)
    await settler.bury(receive(inbox.handler, inbox.record(payload(1))), ValueError("boom"))
    [letter] = await inbox.rows("SELECT reason, payload, key, source_offset FROM dead_letter")
    assert letter == ("handler_failed", None, None, 1)


def test_an_error_that_cannot_tell_itself_is_still_told() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    assert failure_text(Broken()) == "Broken: "
    assert storable("a\0b") == "a�b"


async def test_a_rejection_that_the_handler_raises_keeps_its_reason(inbox: InboxUnderTest) -> None:
    settler = BatchSettler(group=inbox.group, units=inbox.units, handler=inbox.handler, deadline_seconds=25)
    await settler.bury(receive(inbox.handler, inbox.record(payload(1))), MessageRejected("order_unknown", "no row"))
    assert await inbox.letters() == {"order_unknown": 1}


async def test_a_frozen_database_ends_the_batch_at_its_deadline_and_the_pool_recovers(inbox: InboxUnderTest) -> None:
    async def hang(work: UnitOfWork) -> None:
        await work.session.execute(text("SELECT pg_sleep(3)"))

    inbox.handler.before = hang
    settler = BatchSettler(group=inbox.group, units=inbox.units, handler=inbox.handler, deadline_seconds=0.3)
    one = inbox.record(payload(1))
    async with asyncio.timeout(2):
        with pytest.raises(DBAPIError) as caught:
            await settler.settle([receive(inbox.handler, one)])
    assert is_transient(caught.value)
    inbox.handler.before = None
    await inbox.settle(one)  # waits for the mark that the server still holds, until it finds its client gone
    assert await inbox.numbers() == [1]
    pool = inbox.database.engine.pool
    assert pool.checkedout() == 0  # type: ignore[attr-defined]


async def test_the_letter_without_contents_has_the_deadline_too(inbox: InboxUnderTest) -> None:
    await inbox.rows("ALTER TABLE dead_letter ADD CONSTRAINT no_contents CHECK (payload IS NULL)")
    await inbox.rows("""
        CREATE FUNCTION hang() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN IF NEW.payload IS NULL THEN PERFORM pg_sleep(30); END IF; RETURN NEW; END $$
    """)
    await inbox.rows("CREATE TRIGGER hang BEFORE INSERT ON dead_letter FOR EACH ROW EXECUTE FUNCTION hang()")
    settler = BatchSettler(group=inbox.group, units=inbox.units, handler=inbox.handler, deadline_seconds=0.5)
    async with asyncio.timeout(15):  # the driver's own limit is 40 s
        with pytest.raises(DBAPIError) as caught:
            await settler.bury(receive(inbox.handler, inbox.record(payload(1))), ValueError("boom"))
    assert is_transient(caught.value)


async def test_batches_leave_no_dead_row_of_the_tally_behind_and_folding_keeps_its_sums(inbox: InboxUnderTest) -> None:
    """A held snapshot keeps every dead version, and each batch would have to step over all of them."""
    for number in range(30):
        await inbox.settle(inbox.record(payload(number)), inbox.record(b"garbage"))
    async with inbox.database.engine.begin() as connection:  # dead and live versions alike have a line pointer
        await connection.execute(text("CREATE EXTENSION IF NOT EXISTS pageinspect"))
        versions = await connection.execute(
            text("SELECT count(*) FROM heap_page_items(get_raw_page('inbox_tally', 0)) WHERE t_xmax::text <> '0'")
        )
        assert versions.scalar_one() == 0
    before = await inbox.summary()
    await fold_tally(inbox.database)
    assert await inbox.rows("SELECT count(*) FROM inbox_tally") == [(1,)]
    assert await inbox.summary() == before
    assert (before.handled, before.dead) == (30, 30)


@pytest.mark.parametrize(
    ("records", "statements"),
    [("new", 4), ("duplicates", 4), ("poison", 5)],
)
async def test_a_batch_of_any_size_is_a_fixed_number_of_statements_and_one_commit(
    inbox: InboxUnderTest, records: str, statements: int
) -> None:
    """window, marks, handler, tally; duplicates compare digests and skip the handler; poison adds its letters."""
    for size in (10, 1000):
        batch = [inbox.record(payload(number)) for number in range(size)]
        if records == "duplicates":
            await inbox.settle(*batch)
        if records == "poison":
            batch += [inbox.record(b"garbage") for _ in range(size)]
        async with counted(inbox) as (executed, commits):
            await inbox.settle(*batch)
        assert len(executed) == statements, executed
        assert len(commits) == 1
