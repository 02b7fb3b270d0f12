"""A change-data-capture tool can publish the same table: docs/decisions/0006-change-data-capture.md."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import pytest
from aiokafka.partitioner import DefaultPartitioner

from chargeonce.stack import KafkaBroker, PostgresServer
from tests.support.outbox import OutboxUnderTest, outbox_under_test

DECISION = (Path(__file__).parents[2] / "docs/decisions/0006-change-data-capture.md").read_text()
ROUTER = "transforms.outbox."
Inserted = dict[str, str]
"""A row of the log: each column's value in PostgreSQL's text form."""


def connector_options() -> dict[str, str]:
    """The options that the decision tells an operator to set."""
    return dict(re.findall(r"^    ([a-z.]+)=(.+)$", DECISION, re.MULTILINE))


def statement(beginning: str) -> str:
    """A statement that the decision tells an operator to run."""
    return next(line.strip() for line in DECISION.splitlines() if line.startswith(f"    {beginning}"))


@dataclass(frozen=True)
class Routed:
    """A record as Kafka Connect would send it."""

    topic: str
    key: bytes
    value: bytes
    headers: dict[str, str]


def routed(row: Inserted, options: dict[str, str]) -> Routed:
    """What the Event Router makes of an inserted row, with binary converters for key and value."""
    headers = {"id": row[options[f"{ROUTER}table.field.event.id"]]}
    for placement in options[f"{ROUTER}table.fields.additional.placement"].split(","):
        field, kind, alias = placement.split(":")
        assert kind == "header"
        headers[alias] = row[field]
    route = re.fullmatch(
        options[f"{ROUTER}route.topic.regex"].replace("?<", "?P<"), row[options[f"{ROUTER}route.by.field"]]
    )
    assert route is not None
    return Routed(
        options[f"{ROUTER}route.topic.replacement"].replace("${routedByValue}", route["routedByValue"]),
        as_bytes(row[options[f"{ROUTER}table.field.event.key"]]),
        as_bytes(row[options[f"{ROUTER}table.field.event.payload"]]),
        headers,
    )


def as_bytes(text: str) -> bytes:
    """The bytes of a bytea value in its text form."""
    assert text.startswith("\\x")
    return bytes.fromhex(text[2:])


def text_at(message: bytes, start: int) -> tuple[str, int]:
    end = message.index(b"\0", start)
    return message[start:end].decode(), end + 1


def columns_of(relation: bytes) -> tuple[str, list[str]]:
    """Table and columns of a Relation message (PostgreSQL docs, "Logical Replication Message Formats")."""
    _, at = text_at(relation, 5)
    table, at = text_at(relation, at)
    (count,) = struct.unpack_from("!h", relation, at + 1)
    at += 3
    columns = []
    for _ in range(count):
        column, at = text_at(relation, at + 1)
        at += 8
        columns.append(column)
    return table, columns


def values_of(insert: bytes) -> Iterator[str]:
    """The values of an Insert message's new row."""
    assert insert[5:6] == b"N"
    (count,) = struct.unpack_from("!h", insert, 6)
    at = 8
    for _ in range(count):
        kind, length = struct.unpack_from("!cI", insert, at)
        assert kind == b"t", "no column of an event is null or left out"
        yield insert[at + 5 : at + 5 + length].decode()
        at += 5 + length


async def read_slot(connection: asyncpg.Connection, options: dict[str, str]) -> tuple[list[Inserted], set[str]]:
    """Read the connector's slot to its end: the rows inserted into the outbox, and the kinds of messages."""
    messages = await connection.fetch(
        "SELECT data FROM pg_logical_slot_get_binary_changes($1, NULL, NULL, "
        "'proto_version', '1', 'publication_names', $2)",
        options["slot.name"],
        options["publication.name"],
    )
    rows: list[Inserted] = []
    columns: list[str] = []
    for (message,) in messages:
        if message[:1] == b"R":
            table, columns = columns_of(message)
            assert f"public.{table}" == options["table.include.list"]
        elif message[:1] == b"I":
            rows.append(dict(zip(columns, values_of(message), strict=True)))
    return rows, {message[:1].decode() for (message,) in messages}


@pytest.fixture(scope="module")
async def logical_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PostgresServer]:
    """A server that writes what logical decoding needs."""
    server = PostgresServer(tmp_path_factory.mktemp("logical"), settings={"wal_level": "logical"})
    await server.start()
    yield server
    await server.stop()
    server.remove()


@pytest.fixture
async def captured(
    logical_server: PostgresServer, kafka: KafkaBroker, unique_name: str
) -> AsyncIterator[tuple[OutboxUnderTest, asyncpg.Connection]]:
    """An outbox with the decision's publication and slot, and a connection to its database."""
    await logical_server.create_database(unique_name)
    async with outbox_under_test(logical_server.url(unique_name), kafka.bootstrap_servers, unique_name) as outbox:
        connection = await asyncpg.connect(outbox.dsn)
        options = connector_options()
        await connection.execute(statement("CREATE PUBLICATION"))
        await connection.fetch(
            "SELECT pg_create_logical_replication_slot($1, $2)", options["slot.name"], options["plugin.name"]
        )
        yield outbox, connection
        await connection.fetch("SELECT pg_drop_replication_slot($1)", options["slot.name"])
        await connection.close()


async def roll_back(outbox: OutboxUnderTest) -> None:
    """Append an event in a transaction that fails."""
    async with outbox.units.begin() as work:
        work.publish(outbox.event("order-0", 99))
        work.before_commit.append(fail)


def fail() -> None:
    raise RuntimeError("on purpose")


async def test_the_write_ahead_log_carries_what_debeziums_event_router_needs(
    captured: tuple[OutboxUnderTest, asyncpg.Connection],
) -> None:
    outbox, connection = captured
    options = connector_options()
    trace = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    for number in range(3):
        await outbox.publish(
            *(outbox.event(f"order-{key}", number, headers={"traceparent": trace}) for key in range(20))
        )
    await outbox.publish(outbox.event("schlüssel", 0, payload="schlüssel:0".encode(), event_type="größer.v1"))
    with pytest.raises(RuntimeError, match="on purpose"):
        await roll_back(outbox)
    async with outbox.relay():
        await outbox.drained()
    published = {dict(record.headers)["event_id"].decode(): record for record in await outbox.arrived()}

    rows, kinds = await read_slot(connection, options)
    assert kinds == {"B", "R", "I", "C"}, "the log of the outbox has inserts and nothing else"
    assert len(rows) == outbox.published
    everywhere = list(range(outbox.partitions))
    order: dict[bytes, list[int]] = {}
    for record in (routed(row, options) for row in rows):
        sent = published.pop(record.headers["event_id"])
        assert (record.topic, record.key, record.value) == (sent.topic, sent.key, sent.value)
        assert DefaultPartitioner()(record.key, everywhere, everywhere) == sent.partition
        sent_headers = {name: content.decode() for name, content in sent.headers}
        assert record.headers["id"] == sent_headers.pop("event_id")
        assert record.headers["event_type"] == sent_headers.pop("event_type")
        assert json.loads(record.headers["headers"]) == sent_headers
        order.setdefault(record.key, []).append(int(record.value.decode().partition(":")[2]))
    assert not published
    assert all(numbers == sorted(numbers) for numbers in order.values())


async def test_rows_may_be_removed_before_the_connector_read_them_and_it_sees_no_removal(
    captured: tuple[OutboxUnderTest, asyncpg.Connection],
) -> None:
    outbox, connection = captured
    await outbox.publish(*(outbox.event(f"order-{key}", 0) for key in range(10)))
    removal = statement("DELETE FROM outbox_event").replace("72 hours", "0 hours")
    assert await connection.execute(removal) == "DELETE 10"
    rows, kinds = await read_slot(connection, connector_options())
    assert len(rows) == 10
    assert "D" not in kinds
