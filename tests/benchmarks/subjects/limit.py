"""The limit: the same records, built in memory before the clock starts, handed to the client as whole batches.

No database, no reading, no building, no progress: nothing in front of this client can be faster.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

from tests.benchmarks.events import EVENT_TYPE, PARTITION_OF, PARTITIONS, events
from tests.benchmarks.subjects.client import started_producer
from tests.benchmarks.subjects.protocol import Answer, obey


async def main(bootstrap_servers: str, topic: str, count: int, batch_bytes: int) -> None:
    """Send `count` events in batches of up to `batch_bytes` at the command `send`."""
    producer = await started_producer(bootstrap_servers, topic)
    batches: dict[int, list[Any]] = {partition: [] for partition in range(PARTITIONS)}
    for event in events(count):
        of_partition = batches[PARTITION_OF[event.key]]
        if not of_partition or of_partition[-1].size() > batch_bytes:
            of_partition.append(producer.create_batch())
        headers = [("event_id", str(event.event_id).encode()), ("event_type", EVENT_TYPE.encode())]
        if of_partition[-1].append(timestamp=None, key=event.key, value=event.payload, headers=headers) is None:
            raise ValueError(f"batches of {batch_bytes} bytes do not fit into the client's")

    async def send_partition(partition: int, waiting: Iterable[Any]) -> None:
        sent = []
        for batch in waiting:
            batch.close()
            sent.append(await producer.send_batch(batch, topic, partition=partition))
        await asyncio.gather(*sent)

    async def send() -> Answer:
        began = time.perf_counter()
        await asyncio.gather(*(send_partition(partition, waiting) for partition, waiting in batches.items()))
        return {"seconds": time.perf_counter() - began}

    try:
        await obey({"send": send})
    finally:
        await producer.stop()
