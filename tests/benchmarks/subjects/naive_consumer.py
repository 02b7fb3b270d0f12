"""The baseline: a consumer as one would write it for speed. No validation, no dead letters, no split, no lease.

getmany, `json.loads`, one transaction of two set-based inserts for each 500 events, then an awaited offset commit.
"""

from __future__ import annotations

import asyncio
import json
import time
from decimal import Decimal
from uuid import UUID

import asyncpg
from aiokafka import AIOKafkaConsumer

from tests.benchmarks.subjects.protocol import Answer, obey

BATCH_RECORDS = 500

_MARKS = """
    INSERT INTO processed_event (event_id, consumer_group) SELECT unnest($1::uuid[]), $2
    ON CONFLICT DO NOTHING RETURNING event_id
"""
_CHARGES = """
    INSERT INTO charge (order_id, event_id, customer_id, amount, currency)
    SELECT * FROM unnest($1::bigint[], $2::uuid[], $3::bigint[], $4::numeric[], $5::text[])
    ON CONFLICT DO NOTHING
"""


async def main(dsn: str, bootstrap_servers: str, topic: str, group: str) -> None:
    """Consume the topic from the command `start` on."""
    connection = await asyncpg.connect(dsn)
    marks, charges = await connection.prepare(_MARKS), await connection.prepare(_CHARGES)
    consuming: list[asyncio.Task[None]] = []

    async def consume(consumer: AIOKafkaConsumer) -> None:
        while True:
            fetched = await consumer.getmany(timeout_ms=200, max_records=BATCH_RECORDS)
            events = {}
            for records in fetched.values():
                for record in records:
                    event = json.loads(record.value)
                    events[UUID(event["event_id"])] = event
            if not events:
                continue
            async with connection.transaction():
                new = [row[0] for row in await marks.fetch(list(events), group)]
                chosen = [events[event_id] for event_id in new]
                await charges.fetch(
                    [event["order_id"] for event in chosen],
                    new,
                    [event["customer_id"] for event in chosen],
                    [Decimal(event["total_amount"]) for event in chosen],
                    [event["currency"] for event in chosen],
                )
            await consumer.commit()

    async def start() -> Answer:
        consumer = AIOKafkaConsumer(
            topic,
            bootstrap_servers=bootstrap_servers,
            group_id=group,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
        )
        await consumer.start()
        consuming.append(asyncio.create_task(consume(consumer)))
        return {"started_at": time.time()}

    await obey({"start": start})
