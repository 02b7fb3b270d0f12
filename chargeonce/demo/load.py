"""Orders from concurrent HTTP clients, at a pace, as many as each phase releases."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Self

import aiohttp

_CURRENCIES = ("EUR", "EUR", "EUR", "USD", "JPY", "KWD")
_PRICES = {"EUR": "19.99", "USD": "24.50", "JPY": "1980", "KWD": "3.125"}
_POLL_SECONDS = 0.01
_REQUEST_DEADLINE_SECONDS = 15.0


class DemoFailedError(Exception):
    """The demo did not show what it promises; the message says what is missing."""


def order_body(number: int) -> dict[str, Any]:
    """The body of the number-th order: four currencies with 2, 0 and 3 decimals, one to three items."""
    currency = _CURRENCIES[number % len(_CURRENCIES)]
    items = [
        {"sku": f"BOOK-{line + 1}", "quantity": number % 4 + 1, "unit_price": _PRICES[currency]}
        for line in range(number % 3 + 1)
    ]
    return {"customer_id": number % 50 + 1, "currency": currency, "items": items}


class Load:
    """Creates up to `total` orders with `clients` requests at once, at most `rate_per_second`, as they are released.

    A 503 stored nothing and is sent again; any other refusal ends the load, and `check` raises it.
    """

    def __init__(self, orders_url: str, total: int, rate_per_second: float, clients: int = 8) -> None:
        self.total = total
        self.released = 0
        self.accepted = 0
        self.turned_away = 0
        self._url = f"{orders_url}/orders"
        self._interval_seconds = 1 / rate_per_second
        self._next_slot = 0.0
        self._numbers: asyncio.Queue[int] = asyncio.Queue()
        self._clients = clients
        self._tasks: list[asyncio.Task[None]] = []
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        session = self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_REQUEST_DEADLINE_SECONDS))
        self._tasks = [asyncio.create_task(self._create(session)) for _ in range(self._clients)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    @property
    def running(self) -> bool:
        """Whether released orders are still being created."""
        return self.accepted < self.released

    def release(self, count: int) -> int:
        """Let clients create this many more, never more than `total` in all; return how many that are."""
        allowed = max(0, min(count, self.total - self.released))
        for number in range(self.released, self.released + allowed):
            self._numbers.put_nowait(number)
        self.released += allowed
        return allowed

    @property
    def left(self) -> int:
        """How many orders may still be released."""
        return self.total - self.released

    def check(self) -> None:
        """Raises DemoFailedError when a client was refused."""
        for task in self._tasks:
            if task.done() and (error := task.exception()) is not None:
                raise DemoFailedError(f"an order could not be created: {type(error).__name__}: {error}") from error

    async def until(self, accepted: int, deadline_seconds: float) -> None:
        """Return when that many orders have been accepted in all, or all released ones. Raises DemoFailedError."""
        wanted = min(accepted, self.released)
        try:
            async with asyncio.timeout(deadline_seconds):
                while self.accepted < wanted:
                    self.check()
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            raise DemoFailedError(
                f"the order API accepted {self.accepted} of {wanted} orders within {deadline_seconds:g} s"
            ) from None

    async def _create(self, session: aiohttp.ClientSession) -> None:
        loop = asyncio.get_running_loop()
        while True:
            number = await self._numbers.get()
            slot = self._next_slot = max(loop.time(), self._next_slot + self._interval_seconds)
            await asyncio.sleep(slot - loop.time())
            while not await self._post(session, number):
                self.turned_away += 1
                await asyncio.sleep(0.5)
            self.accepted += 1

    async def _post(self, session: aiohttp.ClientSession, number: int) -> bool:
        async with session.post(self._url, json=order_body(number)) as response:
            if response.status == 201:
                return True
            if response.status == 503:
                return False
            raise DemoFailedError(f"the order API answered {response.status}: {(await response.text())[:300]}")
