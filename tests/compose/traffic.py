"""Orders that flow while things break, and the three APIs read back."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.compose.project import ComposeProject

BODY = {"customer_id": 7, "currency": "EUR", "items": [{"sku": "BOOK-1", "quantity": 2, "unit_price": "19.99"}]}
_CLIENTS = 4
_PAUSE_SECONDS = 0.2
_AWAY_SECONDS = 30.0


@dataclass
class Shop:
    """The orders that were acknowledged, and how often the API was away."""

    project: ComposeProject
    client: aiohttp.ClientSession
    acknowledged: set[int] = field(default_factory=set)
    refused: int = 0
    _more: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def order(self) -> int | None:
        """Create an order; None when the API was away or said 503. Any other answer than 201 is a failure."""
        try:
            async with self.client.post(f"{self.project.orders_url}/orders", json=BODY) as response:
                assert response.status in (201, 503), await response.text()
                if response.status == 503:
                    assert response.headers["Retry-After"]
                    self.refused += 1
                    return None
                order_id = int((await response.json())["order_id"])
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError):
            self.refused += 1
            return None
        async with self._more:
            self.acknowledged.add(order_id)
            self._more.notify_all()
        return order_id

    async def more(self, count: int, deadline_seconds: float = 60.0) -> None:
        """Wait until so many more orders have been acknowledged."""
        wanted = len(self.acknowledged) + count
        async with asyncio.timeout(deadline_seconds), self._more:
            await self._more.wait_for(lambda: len(self.acknowledged) >= wanted)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Take orders from a few clients at once, about 20 a second, until the end of the block."""
        closing = asyncio.Event()

        async def orders() -> None:
            while not closing.is_set():
                await self.order()
                try:
                    async with asyncio.timeout(_PAUSE_SECONDS):
                        await closing.wait()
                except TimeoutError:
                    continue

        async with asyncio.TaskGroup() as clients:
            for _ in range(_CLIENTS):
                clients.create_task(orders())
            try:
                yield
            finally:
                closing.set()

    async def faults(self, *rules: dict[str, Any]) -> None:
        """Tell the provider how to misbehave; no rule ends it."""
        async with self.client.put(f"{self.project.provider_url}/faults", json={"rules": list(rules)}) as response:
            assert response.status == 200, await response.text()

    async def charges_running(self) -> int:
        """Charge requests that the provider has not answered yet."""
        async with self.client.get(f"{self.project.provider_url}/metrics") as response:
            lines = (await response.text()).splitlines()
        return int(
            float(next(line for line in lines if line.startswith("payment_provider_charges_running")).split()[1])
        )

    async def orders(self) -> dict[int, Any]:
        """All orders by id."""
        found: dict[int, Any] = {}
        following: int | None = 0
        while following is not None:
            page = await self.get(f"{self.project.orders_url}/orders", after_order_id=following, limit=1000)
            found |= {order["order_id"]: order for order in page["orders"]}
            following = page["next"]
        return found

    async def charges(self) -> list[Any]:
        """All charges."""
        found: list[Any] = []
        following: int | None = 0
        while following is not None:
            page = await self.get(f"{self.project.billing_url}/charges", after_order_id=following, limit=1000)
            found += page["charges"]
            following = page["next"]
        return found

    async def captured(self) -> dict[int, list[Any]]:
        """The payments whose money moved at the provider, by order id."""
        found: dict[int, list[Any]] = defaultdict(list)
        cursor: dict[str, Any] | None = {}
        while cursor is not None:
            page = await self.get(f"{self.project.provider_url}/payments", **cursor, limit=1000)
            for payment in page["payments"]:
                if payment["status"] == "captured":
                    found[payment["order_id"]].append(payment)
            cursor = page["next"]
        return dict(found)

    async def settled(self, deadline_seconds: float = 120.0) -> dict[int, Any]:
        """Wait until every order knows the result of its payment; return all orders by id."""
        pending: list[int] = []
        try:
            async with asyncio.timeout(deadline_seconds):
                while True:
                    orders = await self.orders()
                    pending = [key for key, order in orders.items() if order["payment_status"] == "pending"]
                    if not pending:
                        return orders
                    await asyncio.sleep(0.5)
        except TimeoutError:
            raise AssertionError(
                f"{len(pending)} orders still pending after {deadline_seconds:g} s: {pending[:20]}"
            ) from None

    async def get(self, url: str, **parameters: str | int) -> Any:
        """What a GET answers, which must be 200.

        A service whose database was restarted answers the first request on each connection that it lost with 503 and
        Retry-After; that is waited for, as a client does.
        """
        async with asyncio.timeout(_AWAY_SECONDS):
            while True:
                async with self.client.get(url, params=parameters) as response:
                    if response.status != 503:
                        assert response.status == 200, await response.text()
                        return await response.json()
                    await asyncio.sleep(float(response.headers["Retry-After"]))
