"""The baseline: a relay as most are written. One process, no leases, no order across processes, no fault handled.

SELECT 500 unpublished rows, `send()` each (idempotent, acks=all), await them all, one UPDATE, again; when there is
nothing, look again after 5 ms. Driver and client are used directly, without the layers that the product has.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import asyncpg

from tests.benchmarks.subjects.client import started_producer
from tests.benchmarks.subjects.protocol import Answer, obey

BATCH_ROWS = 500
POLL_SECONDS = 0.005

_SELECT = (
    f"SELECT id, event_id, event_type, key, payload FROM outbox WHERE published IS NULL ORDER BY id LIMIT {BATCH_ROWS}"  # noqa: S608
)
_UPDATE = "UPDATE outbox SET published = now() WHERE id = ANY($1::bigint[])"


async def main(dsn: str, bootstrap_servers: str, topic: str, note: bool) -> None:
    """Relay the table `outbox` from the command `start` on; `note` when each batch was acknowledged."""
    producer = await started_producer(bootstrap_servers, topic)
    connection = await asyncpg.connect(dsn)
    select, update = await connection.prepare(_SELECT), await connection.prepare(_UPDATE)
    acknowledgements: list[tuple[float, list[asyncpg.Record]]] = []
    drained = asyncio.Event()

    async def relay() -> None:
        while True:
            rows = await select.fetch()
            if not rows:
                drained.set()
                await asyncio.sleep(POLL_SECONDS)
                continue
            sent = [
                await producer.send(
                    topic,
                    key=row["key"],
                    value=row["payload"],
                    headers=[("event_id", str(row["event_id"]).encode()), ("event_type", row["event_type"].encode())],
                )
                for row in rows
            ]
            await asyncio.gather(*sent)
            if note:
                acknowledgements.append((time.monotonic(), rows))
            await update.fetch([row["id"] for row in rows])

    relaying: list[asyncio.Task[None]] = []

    async def start() -> Answer:
        relaying.append(asyncio.create_task(relay()))
        return {"started_at": time.time()}

    async def until_drained() -> Answer:
        drained.clear()
        waiting = asyncio.create_task(drained.wait())
        await asyncio.wait({waiting, *relaying}, return_when=asyncio.FIRST_COMPLETED)
        for ended in relaying:
            if ended.done():
                ended.result()
        return {}

    async def acknowledged() -> Answer:
        return {"batches": [(at, [str(row["event_id"]) for row in rows]) for at, rows in acknowledgements]}

    try:
        await obey({"start": start, "drained": until_drained, "acknowledged": acknowledged})
    finally:
        for task in relaying:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await producer.stop()
        await connection.close()
