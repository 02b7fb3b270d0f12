"""The whole system, every role a process of its own, for tests that kill its parts."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from chargeonce.audit import Audit, AuditResult
from chargeonce.ledgers import Ledgers
from chargeonce.system import System

BODY = {"customer_id": 7, "currency": "EUR", "items": [{"sku": "BOOK-1", "quantity": 1, "unit_price": "12.50"}]}


@dataclass
class Shop:
    """A running system, its client, and the orders it acknowledged."""

    system: System
    client: aiohttp.ClientSession
    acknowledged: set[int] = field(default_factory=set)

    async def order(self) -> int | None:
        """Create an order; None when the API did not answer or answered 503."""
        try:
            async with self.client.post(f"{self.system.orders_url}/orders", json=BODY) as response:
                if response.status == 503:
                    return None
                assert response.status == 201, await response.text()
                order_id = int((await response.json())["order_id"])
        except aiohttp.ClientConnectionError:
            return None
        self.acknowledged.add(order_id)
        return order_id

    async def orders(self, count: int) -> None:
        """Create orders, some at a time."""
        await asyncio.gather(*(self.order() for _ in range(count)))

    async def order_until(self, ended: asyncio.Task[Any]) -> None:
        """Keep ordering, a few at a time, until something has happened."""
        while not ended.done():
            await self.orders(4)
            await asyncio.sleep(0.02)

    async def faults(self, *rules: dict[str, Any]) -> None:
        """Tell the provider how to misbehave; no rule ends it."""
        async with self.client.put(f"{self.system.provider_url}/faults", json={"rules": list(rules)}) as response:
            assert response.status == 200, await response.text()

    async def json(self, url: str) -> Any:
        """What a GET answers."""
        async with self.client.get(url) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def duplicates(self) -> int:
        """Records that billing's inbox absorbed since its beginning."""
        return int((await self.json(f"{self.system.billing_url}/inbox"))["duplicates_absorbed"])

    async def payments(self) -> int:
        """Payments that the provider captured."""
        currencies = (await self.json(f"{self.system.provider_url}/payments/summary"))["currencies"]
        return sum(int(currency["captured_count"]) for currency in currencies)

    async def settled(self, deadline_seconds: float = 60.0) -> AuditResult:
        """Wait until nothing is on its way any more, then return an audit that takes every open end for a loss."""
        async with self._ledgers() as ledgers:
            async with asyncio.timeout(deadline_seconds):
                while True:
                    found = await Audit(ledgers, recheck_seconds=0.2).run(grace_seconds=0)
                    if found.clean and not found.pending and not found.results_pending:
                        break
                    await asyncio.sleep(0.1)
            return await Audit(ledgers, recheck_seconds=0.2).run(grace_seconds=0, settled=True)

    async def audit_is_clean(self) -> AuditResult:
        """Assert that every order was charged exactly once, none that was acknowledged is missing, and no more."""
        result = await self.settled()
        assert result.clean, result.as_json()
        assert not result.dead_letters
        assert result.payments_captured == result.charges_captured
        assert result.charges_captured + result.charges_declined == result.orders_confirmed
        stored = {int(order["order_id"]) for order in await self._all_orders()}
        assert stored >= self.acknowledged
        assert result.orders_confirmed == len(stored)
        return result

    async def _all_orders(self) -> list[dict[str, Any]]:
        orders: list[dict[str, Any]] = []
        after: int | None = 0
        while after is not None:
            page = await self.json(f"{self.system.orders_url}/orders?after_order_id={after}&limit=1000")
            orders += page["orders"]
            after = page["next"]
        return orders

    def _ledgers(self) -> Ledgers:
        return Ledgers(self.system.orders_url, self.system.billing_url, self.system.provider_url)


@pytest.fixture(scope="module")
async def shop() -> AsyncIterator[Shop]:
    directory = Path(tempfile.mkdtemp(prefix="chargeonce-faults-"))
    directory.chmod(0o711)
    # Short leases and waits: what a killed process held is taken over as soon as its lease has run out.
    system = System(
        directory / "system",
        environment={
            "order-relay": {"ORDER_SERVICE_RELAY_LEASE_SECONDS": "2"},
            "billing-relay": {"BILLING_SERVICE_RELAY_LEASE_SECONDS": "2"},
            "billing-executor": {
                "BILLING_SERVICE_EXECUTOR_LEASE_SECONDS": "6",
                "BILLING_SERVICE_EXECUTOR_CALL_DEADLINE_SECONDS": "1",
                "BILLING_SERVICE_EXECUTOR_RETRY_MOST_SECONDS": "1",
                "BILLING_SERVICE_BREAKER_MOST_PAUSE_SECONDS": "1",
            },
        },
    )
    async with system, aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=15)) as client:
        yield Shop(system, client)
    system.empty()
    await system.stop()
    shutil.rmtree(directory)
