"""The topic that every measure writes: made anew for each run, and read back to see what arrived."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import for_code

from order_service.events import ORDER_CONFIRMED_TOPIC
from tests.benchmarks.events import PARTITIONS, sequence_of
from tests.benchmarks.processes import BenchmarkError

TOPIC = ORDER_CONFIRMED_TOPIC

_READY_DEADLINE_SECONDS = 30.0
_READ_DEADLINE_SECONDS = 300.0


async def renew_topic(bootstrap_servers: str) -> None:
    """Delete the topic if it is there, and make it empty; return when every partition has a leader."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap_servers)
    await admin.start()
    try:
        async with asyncio.timeout(_READY_DEADLINE_SECONDS):
            if TOPIC in await admin.list_topics():
                await admin.delete_topics([TOPIC])
            while TOPIC in await admin.list_topics():
                await asyncio.sleep(0.05)
            answer = await admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1)])
            for _, code, *rest in answer.topic_errors:
                if code:
                    raise BenchmarkError(f"the topic could not be made: {rest[0] if rest else for_code(code).__name__}")
            while not await _led(admin):
                await asyncio.sleep(0.05)
    finally:
        await admin.close()


async def _led(admin: AIOKafkaAdminClient) -> bool:
    [described] = await admin.describe_topics([TOPIC])
    leaders = [partition["leader"] for partition in described["partitions"]]
    return described["error_code"] == 0 and len(leaders) == PARTITIONS and min(leaders) >= 0


@asynccontextmanager
async def _reader(bootstrap_servers: str) -> AsyncIterator[tuple[AIOKafkaConsumer, dict[TopicPartition, int]]]:
    consumer = AIOKafkaConsumer(
        bootstrap_servers=bootstrap_servers, auto_offset_reset="earliest", max_partition_fetch_bytes=4 * 1024 * 1024
    )
    await consumer.start()
    try:
        places = [TopicPartition(TOPIC, partition) for partition in range(PARTITIONS)]
        consumer.assign(places)
        yield consumer, await consumer.end_offsets(places)
    finally:
        await consumer.stop()


async def record_count(bootstrap_servers: str) -> int:
    """Return how many records the topic holds."""
    async with _reader(bootstrap_servers) as (_, ends):
        return sum(ends.values())


async def check_complete(bootstrap_servers: str, expected: int) -> None:
    """Raise BenchmarkError unless the topic holds exactly this many records."""
    found = await record_count(bootstrap_servers)
    if found != expected:
        raise BenchmarkError(f"{found} records arrived and {expected} events were written")


async def check_order(bootstrap_servers: str, expected: int) -> int:
    """Read everything back; return the number of second copies.

    Raises BenchmarkError unless the first copies of each key's events are complete and in order.
    """
    last: Counter[bytes] = Counter()
    read = copies = 0
    async with _reader(bootstrap_servers) as (consumer, ends), asyncio.timeout(_READ_DEADLINE_SECONDS):
        while read < sum(ends.values()):
            for records in (await consumer.getmany(timeout_ms=500)).values():
                read += len(records)
                for record in records:
                    sequence = sequence_of(record.value)
                    if sequence > last[record.key]:
                        raise BenchmarkError(f"key {record.key!r}: event {sequence} before event {last[record.key]}")
                    if sequence == last[record.key]:
                        last[record.key] += 1
                    else:
                        copies += 1
    if (found := sum(last.values())) != expected:
        raise BenchmarkError(f"{found} different events arrived and {expected} were written")
    return copies


async def event_ids(bootstrap_servers: str) -> dict[int, Sequence[str]]:
    """Return the id of every record, by partition and in the order of the log."""
    ids: dict[int, list[str]] = {partition: [] for partition in range(PARTITIONS)}
    async with _reader(bootstrap_servers) as (consumer, ends), asyncio.timeout(_READ_DEADLINE_SECONDS):
        while sum(map(len, ids.values())) < sum(ends.values()):
            for place, records in (await consumer.getmany(timeout_ms=500)).items():
                ids[place.partition] += [dict(record.headers)["event_id"].decode() for record in records]
    return dict(ids)
