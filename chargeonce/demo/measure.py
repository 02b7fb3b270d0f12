"""What the demo knows of the system: counted in its databases, asked from its APIs, never assumed."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp
import asyncpg

from chargeonce.system import System


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Counts at one moment, `at_seconds` after the observation began."""

    at_seconds: float = 0.0
    orders: int = 0
    published: int = 0
    charges: int = 0
    charged: int = 0
    returned: int = 0
    duplicates: int = 0
    dead_letters: int = 0


@dataclass(frozen=True, slots=True)
class InFlight:
    """How much would be lost with a process that dies now, in numbers and in words."""

    count: int
    words: str


class Observer:
    """Reads both databases and the provider of a running system."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._began = time.monotonic()
        self._orders: asyncpg.Pool[Any] | None = None
        self._billing: asyncpg.Pool[Any] | None = None
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._orders = await asyncpg.create_pool(self._system.database_dsn("order_service"), min_size=1, max_size=3)
        self._billing = await asyncpg.create_pool(self._system.database_dsn("billing_service"), min_size=1, max_size=3)
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for pool in (self._orders, self._billing):
            if pool is not None:
                await pool.close()
        if self._http is not None:
            await self._http.close()

    @property
    def now_seconds(self) -> float:
        """Seconds since the observation began."""
        return time.monotonic() - self._began

    async def snapshot(self) -> Snapshot:
        """Count everything that the board and the timeline show."""
        orders, billing = await asyncio.gather(
            self._row(self._orders, _ORDER_COUNTS), self._row(self._billing, _BILLING_COUNTS)
        )
        return Snapshot(
            at_seconds=self.now_seconds,
            orders=orders["orders"],
            # Progress is recorded a little after the acknowledgement; what has a charge has been published.
            published=max(orders["orders"] - orders["unpublished"], billing["charges"]),
            charges=billing["charges"],
            charged=billing["charged"],
            returned=orders["returned"],
            duplicates=billing["duplicates"],
            dead_letters=billing["dead_letters"],
        )

    async def unpublished(self) -> InFlight:
        """Events that are committed with their orders and that no broker has acknowledged."""
        row = await self._row(self._orders, _ORDER_COUNTS)
        return InFlight(row["unpublished"], f"events that are committed and not in Kafka: {row['unpublished']}")

    async def unconsumed(self) -> InFlight:
        """Events that Kafka has and billing has no charge for; 0 unless a batch is half done and not committed."""
        orders = await self._row(self._orders, _ORDER_COUNTS)
        billing = await self._row(self._billing, _BILLING_COUNTS)
        lag = orders["orders"] - orders["unpublished"] - billing["charges"]
        if lag <= 0 or not billing["open_batches"]:
            return InFlight(0, "")
        return InFlight(lag, f"events in Kafka without a charge: {lag}, with a batch half done and not committed")

    async def being_called(self) -> InFlight:
        """Charges that an executor has claimed and not recorded; 0 unless the provider is at work on one of them."""
        row = await self._row(self._billing, _BILLING_COUNTS)
        held = int((await self._system.metrics("payment-provider")).get("payment_provider_charges_running", 0))
        words = f"charges being called: {row['claimed']}, of which the provider is at work on {held}"
        return InFlight(row["claimed"], words) if held else InFlight(0, "")

    async def order_faults(self, *rules: dict[str, Any]) -> None:
        """Replace the provider's faults; none without rules."""
        async with self._session.put(f"{self._system.provider_url}/faults", json={"rules": list(rules)}) as response:
            response.raise_for_status()

    async def fired_faults(self) -> int:
        """How many requests the provider's present faults have hit."""
        async with self._session.get(f"{self._system.provider_url}/faults") as response:
            response.raise_for_status()
            return sum(rule["fired"] for rule in (await response.json())["rules"])

    async def repeated_answers(self) -> int:
        """How many requests the provider answered from its store, because their key had been answered before."""
        async with self._session.get(f"{self._system.provider_url}/payments/summary") as response:
            response.raise_for_status()
            return int((await response.json())["replays"])

    @property
    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            raise RuntimeError("the observer is closed; open it first")
        return self._http

    async def _row(self, pool: asyncpg.Pool[Any] | None, query: str) -> Any:
        if pool is None:
            raise RuntimeError("the observer is closed; open it first")
        return await pool.fetchrow(query)


_ORDER_COUNTS = """
    SELECT (SELECT count(*) FROM orders) AS orders,
           (SELECT count(*) FROM orders WHERE payment_status <> 'pending') AS returned,
           (SELECT count(*) FROM outbox_bucket b
            CROSS JOIN LATERAL (SELECT coalesce(max(position), 0) AS position FROM outbox_progress
                                WHERE bucket = b.bucket) AS cursor
            JOIN outbox_event e ON e.bucket = b.bucket AND e.position > cursor.position) AS unpublished
"""

_BILLING_COUNTS = """
    SELECT (SELECT count(*) FROM charge) AS charges,
           (SELECT count(*) FROM charge WHERE state = 'captured') AS charged,
           (SELECT count(*) FROM charge WHERE state = 'requested' AND lease_expires_at > clock_timestamp()) AS claimed,
           (SELECT coalesce(sum(duplicates), 0)::bigint FROM inbox_tally) AS duplicates,
           (SELECT count(*) FROM dead_letter WHERE status = 'open') AS dead_letters,
           (SELECT count(*) FROM pg_locks WHERE relation = 'processed_event'::regclass AND mode = 'RowExclusiveLock'
            ) AS open_batches
"""
