"""The product's consumer: the application that `billing-service run consumer` serves, with everything that role runs.

Only one thing is added: a clock reading when the group has given it its partitions.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Any

from billing_service.bootstrap import build
from billing_service.settings import BillingServiceSettings
from shared.kafka.consumer import GroupConsumer
from tests.benchmarks.subjects.protocol import Answer, obey

_JOIN_DEADLINE_SECONDS = 60.0


async def main(settings: dict[str, Any]) -> None:
    """Run billing's consumer with these settings, from the command `start` on."""
    joined: asyncio.Future[float] = asyncio.get_running_loop().create_future()
    join = GroupConsumer.start

    async def noted(consumer: GroupConsumer) -> None:
        await join(consumer)
        if not joined.done():
            joined.set_result(time.time())

    setattr(GroupConsumer, "start", noted)  # noqa: B010
    application = build(BillingServiceSettings(**settings), ["consumer"])
    async with AsyncExitStack() as running:

        async def start() -> Answer:
            await running.enter_async_context(application.router.lifespan_context(application))
            async with asyncio.timeout(_JOIN_DEADLINE_SECONDS):
                return {"started_at": await joined}

        await obey({"start": start})
