"""Confirms orders as the API does, on 16 connections: with the outbox append, or the same transaction without it."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from decimal import Decimal
from typing import Any

from order_service import repository
from order_service.events import OrderConfirmedEvent
from order_service.order import NewOrder, OrderItem
from order_service.settings import OrderServiceSettings
from shared.database import Database
from shared.identifiers import new_event_id
from shared.outbox.append import EventWriter
from shared.outbox.calls import call_for
from shared.settings import OUTBOX_CHANNEL
from shared.unit_of_work import UnitsOfWork
from shared.wakeup import Notifier
from tests.benchmarks.subjects.protocol import Answer, obey

_ORDER = NewOrder.of(7, "EUR", [OrderItem("A-1", 1, Decimal("12.50")), OrderItem("B-2", 2, Decimal("3.25"))])


async def main(
    settings: dict[str, Any], publish: bool, connections: int, warm_up_seconds: float, seconds: float
) -> None:
    """Confirm orders for `seconds` after a warm-up, at the command `run`."""
    configured = OrderServiceSettings(**settings)
    async with AsyncExitStack() as stack:
        database = Database(configured.database("benchmark", pool_size=connections))
        stack.push_async_callback(database.close)
        notifier = Notifier(configured.listen_dsn, OUTBOX_CHANNEL, text_of=call_for)
        if publish:
            await notifier.start()
            stack.push_async_callback(notifier.stop)
        units = UnitsOfWork(database, EventWriter(signal=notifier.signal))
        commits = 0

        async def confirm_until(end: float) -> None:
            nonlocal commits
            while time.perf_counter() < end:
                async with units.begin() as work:
                    order = await repository.insert_order(work.session, _ORDER, new_event_id())
                    if publish:
                        work.publish(OrderConfirmedEvent.from_order(order).to_outgoing())
                commits += 1

        async def for_seconds(length: float) -> float:
            nonlocal commits
            commits = 0
            began = time.perf_counter()
            await asyncio.gather(*(confirm_until(began + length) for _ in range(connections)))
            return commits / (time.perf_counter() - began)

        async def measured() -> Answer:
            await for_seconds(warm_up_seconds)
            return {"commits_per_second": await for_seconds(seconds)}

        await obey({"run": measured})
