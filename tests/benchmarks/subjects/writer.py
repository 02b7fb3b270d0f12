"""Commits one event a transaction at a fixed rate, whatever the relay does, and notes when each commit returned.

The times of all transactions are planned beforehand (an open loop), so a slow moment delays nothing but itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AsyncExitStack

import asyncpg

from shared.identifiers import new_event_id
from shared.outbox.calls import call_for
from shared.settings import OUTBOX_CHANNEL
from shared.wakeup import Notifier
from tests.benchmarks.events import BUCKET_OF, EVENT_TYPE, Event, events
from tests.benchmarks.subjects.protocol import Answer, obey

_CONNECTIONS = 8
_AHEAD_SECONDS = 0.1

_INTO_THE_LOG = (
    "INSERT INTO outbox_event (event_id, bucket, topic, key, event_type, payload) VALUES ($1, $2, $3, $4, $5, $6)"
)
_INTO_THE_TABLE = "INSERT INTO outbox (event_id, event_type, key, payload) VALUES ($1, $2, $3, $4)"


async def main(dsn: str, topic: str, naive: bool, rate_per_second: float, seconds: float) -> None:
    """Write for `seconds` from the command `start` on; `committed` waits for the end.

    Into the product's log, signalling after each commit as its API does, or into the naive relay's table.
    """
    committed: dict[str, float] = {}
    count = int(rate_per_second * seconds)
    async with AsyncExitStack() as stack:
        connections = [await asyncpg.connect(dsn) for _ in range(_CONNECTIONS)]
        for connection in connections:
            stack.push_async_callback(connection.close)
        signal: Callable[[Collection[int]], None] = lambda _: None  # noqa: E731
        if not naive:
            notifier = Notifier(dsn, OUTBOX_CHANNEL, text_of=call_for)
            await notifier.start()
            stack.push_async_callback(notifier.stop)
            signal = notifier.signal

        async def write(connection: asyncpg.Connection, due: Iterator[tuple[float, Event]]) -> None:
            insert = await connection.prepare(_INTO_THE_TABLE if naive else _INTO_THE_LOG)
            for at, event in due:
                await asyncio.sleep(at - time.monotonic())
                # A new id, as the product makes it; its payload does not matter here.
                event_id = new_event_id()
                bucket = BUCKET_OF[event.key]
                if naive:
                    await insert.fetch(event_id, EVENT_TYPE, event.key, event.payload)
                else:
                    await insert.fetch(event_id, bucket, topic, event.key, EVENT_TYPE, event.payload)
                committed[str(event_id)] = time.monotonic()
                signal((bucket,))

        writing: list[asyncio.Task[None]] = []

        async def start() -> Answer:
            began = time.monotonic() + _AHEAD_SECONDS
            due = ((began + number / rate_per_second, event) for number, event in enumerate(events(count)))
            writing.extend(asyncio.create_task(write(connection, due)) for connection in connections)
            return {"began": began}

        async def all_committed() -> Answer:
            await asyncio.gather(*writing)
            return {"commits": committed}

        await obey({"start": start, "committed": all_committed})
