"""The product's relay: the application that `order-service run relay` serves, with everything that role runs.

Only two things are added, one clock reading each: when the leases are joined, and when a batch is acknowledged.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Any

from order_service.bootstrap import build
from order_service.settings import OrderServiceSettings
from shared.kafka.producer import IdempotentProducer, RecordBatch
from shared.outbox.leases import BucketLeases
from tests.benchmarks.subjects.protocol import Answer, obey

_JOIN_DEADLINE_SECONDS = 30.0


async def main(settings: dict[str, Any]) -> None:
    """Run the relay of the order service with these settings, from the command `start` on."""
    joined = _note_when_joined()
    acknowledgements = _note_acknowledgements()
    application = build(OrderServiceSettings(**settings), ["relay"])
    async with AsyncExitStack() as running:

        async def start() -> Answer:
            await running.enter_async_context(application.router.lifespan_context(application))
            async with asyncio.timeout(_JOIN_DEADLINE_SECONDS):
                return {"started_at": await joined}

        async def acknowledged() -> Answer:
            return {"batches": acknowledgements}

        await obey({"start": start, "acknowledged": acknowledged})


def _note_when_joined() -> asyncio.Future[float]:
    """Return the wall-clock time at which the leases are first joined, once they are."""
    joined: asyncio.Future[float] = asyncio.get_running_loop().create_future()
    join = BucketLeases.join

    async def noted(leases: BucketLeases) -> None:
        await join(leases)
        if not joined.done():
            joined.set_result(time.time())

    setattr(BucketLeases, "join", noted)  # noqa: B010
    return joined


def _note_acknowledgements() -> list[tuple[float, int, int]]:
    """Return the list that grows by (monotonic time, partition, records) with each acknowledged batch."""
    batches: list[tuple[float, int, int]] = []
    submit = IdempotentProducer.submit

    def noted_submit(producer: IdempotentProducer, batch: RecordBatch) -> asyncio.Future[object]:
        submitted = submit(producer, batch)
        partition, records = batch.partition, batch.record_count

        def note(answer: asyncio.Future[object]) -> None:
            if not answer.cancelled() and answer.exception() is None:
                batches.append((time.monotonic(), partition, records))

        submitted.add_done_callback(note)
        return submitted

    setattr(IdempotentProducer, "submit", noted_submit)  # noqa: B010
    return batches
