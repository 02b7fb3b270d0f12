"""A change-data-capture tool can publish the same table: docs/decisions/0006-change-data-capture.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from aiokafka.partitioner import DefaultPartitioner
from sqlalchemy import text

from chargeonce.stack import KafkaBroker
from tests.support.outbox import outbox_under_test, scalar

DECISION = Path(__file__).parents[2] / "docs/decisions/0006-change-data-capture.md"
ROUTER = "    transforms.outbox."


def router_options() -> dict[str, str]:
    """The options that the decision tells an operator to set."""
    lines = (line.removeprefix(ROUTER) for line in DECISION.read_text().splitlines() if line.startswith(ROUTER))
    return dict(line.split("=", 1) for line in lines)


def routed(row: dict[str, Any], options: dict[str, str]) -> tuple[str, bytes, bytes, dict[str, str]]:
    """Topic, key, value and headers that the Event Router makes of an inserted row."""
    headers = {}
    for placement in options["table.fields.additional.placement"].split(","):
        field, kind, alias = placement.split(":")
        assert kind == "header"
        value = row[field]
        headers[alias] = json.dumps(value) if isinstance(value, dict) else str(value)
    topic = options["route.topic.replacement"].replace("${routedByValue}", row[options["route.by.field"]])
    key, value = row[options["table.field.event.key"]], row[options["table.field.event.payload"]]
    headers["id"] = str(row[options["table.field.event.id"]])
    return topic, bytes(key), bytes(value), headers


async def test_the_rows_carry_what_debeziums_event_router_needs(
    database_url: str, kafka: KafkaBroker, unique_name: str
) -> None:
    options = router_options()
    trace = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    async with outbox_under_test(database_url, kafka.bootstrap_servers, unique_name) as outbox:
        events = [outbox.event(f"order-{key}", 0, headers={"traceparent": trace}) for key in range(30)]
        await outbox.publish(*events)
        async with outbox.database.engine.connect() as connection:
            rows = [dict(row) for row in (await connection.execute(text("SELECT * FROM outbox_event"))).mappings()]
        async with outbox.relay():
            await outbox.drained()
        published = {record.key: record for record in await outbox.arrived()}
        everywhere = list(range(outbox.partitions))
        for topic, key, value, headers in (routed(row, options) for row in rows):
            record = published.pop(key)
            assert (topic, value) == (record.topic, record.value)
            assert DefaultPartitioner()(key, everywhere, everywhere) == record.partition
            sent = {name: content.decode() for name, content in record.headers}
            assert (headers["event_id"], headers["event_type"]) == (sent["event_id"], sent["event_type"])
            assert headers["id"] == sent["event_id"]
            assert json.loads(headers["headers"]) == {"traceparent": sent["traceparent"]} == {"traceparent": trace}
        assert not published
        updates = await scalar(
            outbox.database, "SELECT n_tup_upd FROM pg_stat_user_tables WHERE relname = 'outbox_event'"
        )
        assert updates == 0, "publishing changes no row: an insert is all there is to capture"
