"""Billing without Kafka for a test: a migrated database, a real payment provider process, executors."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import aiohttp
from sqlalchemy import text

from billing_service import repository
from billing_service.breaker import CircuitBreaker
from billing_service.charge import Charge, NewCharge, RetryPolicy
from billing_service.executor import ChargeExecutor, ExecutorSettings
from billing_service.gateway import HttpPaymentGateway, PaymentGateway
from billing_service.settings import BillingServiceSettings, owned_topics
from billing_service.tables import metadata
from shared.database import Database, DatabaseSettings
from shared.identifiers import new_event_id
from shared.migrations import alembic_config, upgrade
from shared.outbox.append import EventWriter
from shared.outbox.topics import register_topics
from shared.unit_of_work import UnitsOfWork

DEADLINE_SECONDS = 30.0
REPOSITORY = Path(__file__).parents[2]
QUICK = RetryPolicy(first_seconds=0.05, most_seconds=0.2)


def new_charge(order_id: int, **changes: Any) -> NewCharge:
    """A charge of 19.99 EUR that an order event asks for."""
    fields: dict[str, Any] = {
        "order_id": order_id,
        "event_id": new_event_id(),
        "customer_id": 7,
        "amount": Decimal("19.99"),
        "currency": "EUR",
    }
    return NewCharge(**{**fields, **changes})


@dataclass
class Provider:
    """A running payment provider: faults on demand, and the ledger that is the witness."""

    process: asyncio.subprocess.Process
    url: str
    session: aiohttp.ClientSession

    async def fail(self, *rules: dict[str, Any]) -> None:
        """Replace the fault rules."""
        async with self.session.put(f"{self.url}/faults", json={"rules": list(rules)}) as response:
            assert response.status == 200, await response.text()

    async def fired(self) -> int:
        """How often the first fault happened."""
        async with self.session.get(f"{self.url}/faults") as response:
            return int((await response.json())["rules"][0]["fired"])

    async def charge(self, key: str, order_id: int, amount: str, currency: str = "EUR") -> int:
        """A payment made by somebody else; returns the status."""
        body = {"order_id": order_id, "amount": amount, "currency": currency}
        async with self.session.post(
            f"{self.url}/payments/charge", json=body, headers={"Idempotency-Key": key}
        ) as response:
            return response.status

    async def payments(self, order_id: int | None = None) -> list[dict[str, Any]]:
        """What the ledger has, all of it or of one order."""
        params = {"limit": "1000"} if order_id is None else {"order_id": str(order_id)}
        async with self.session.get(f"{self.url}/payments", params=params) as response:
            found: list[dict[str, Any]] = (await response.json())["payments"]
            return found

    async def summary(self) -> dict[str, Any]:
        """Sums, attempts and replays."""
        async with self.session.get(f"{self.url}/payments/summary") as response:
            counts: dict[str, Any] = await response.json()
            return counts


@asynccontextmanager
async def running_provider(ledger: Path, port: int = 0) -> AsyncIterator[Provider]:
    """A provider process, on a free port unless one is given."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "payment_provider", f"--port={port}", f"--ledger={ledger}"),
        stdout=asyncio.subprocess.PIPE,
        cwd=REPOSITORY,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            port = await _announced_port(process.stdout)
        drain = asyncio.ensure_future(process.stdout.read())
        async with aiohttp.ClientSession() as session:
            yield Provider(process, f"http://127.0.0.1:{port}", session)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    await drain


async def _announced_port(output: asyncio.StreamReader) -> int:
    while line := await output.readline():
        told = json.loads(line)
        if told.get("event") == "provider.listening":
            return int(told["port"])
    raise AssertionError("the provider ended before it listened")


@dataclass
class BillingUnderTest:
    """A migrated billing database, and executors on it."""

    database: Database
    units: UnitsOfWork

    async def request(self, *charges: NewCharge) -> None:
        """Store charges as the inbox does."""
        async with self.units.begin() as work:
            assert len(await repository.insert_charges(work.session, charges)) == len(charges)

    async def charge_of(self, order_id: int) -> Charge:
        """The charge of an order."""
        async with self.database.session() as session:
            charge = await repository.find_charge_of_order(session, order_id)
        assert charge is not None
        return charge

    async def settled(self, *order_ids: int, deadline_seconds: float = DEADLINE_SECONDS) -> list[Charge]:
        """The charges of these orders, once none of them is `requested` any more."""
        async with asyncio.timeout(deadline_seconds):
            while True:
                charges = [await self.charge_of(order_id) for order_id in order_ids]
                if all(charge.state != "requested" for charge in charges):
                    return charges
                await asyncio.sleep(0.02)

    async def until(
        self, order_id: int, condition: Callable[[Charge], bool], deadline_seconds: float = DEADLINE_SECONDS
    ) -> Charge:
        """The charge of an order once it fulfils the condition."""
        async with asyncio.timeout(deadline_seconds):
            while not condition(charge := await self.charge_of(order_id)):
                await asyncio.sleep(0.02)
            return charge

    async def events(self) -> list[dict[str, Any]]:
        """The payloads in the outbox, each with key, topic and headers."""
        async with self.database.engine.connect() as connection:
            rows = await connection.execute(
                text("SELECT topic, key, headers, payload FROM outbox_event ORDER BY position")
            )
            return [
                {**json.loads(row.payload), "_topic": row.topic, "_key": row.key.decode(), "_headers": row.headers}
                for row in rows
            ]

    async def execute(self, statement: str, **parameters: Any) -> None:
        """Change the database behind the service's back."""
        async with self.database.engine.begin() as connection:
            await connection.execute(text(statement), parameters)

    def executor(
        self, gateway: PaymentGateway | str, breaker: CircuitBreaker | None = None, **changes: Any
    ) -> ChargeExecutor:
        """An executor with short waits, on a gateway or a provider's address."""
        if isinstance(gateway, str):
            gateway = HttpPaymentGateway(gateway)
        settings = ExecutorSettings(
            **{"call_deadline_seconds": 5.0, "lease_seconds": 10.0, "poll_seconds": 0.05, "retry": QUICK, **changes}
        )
        return ChargeExecutor(self.units, gateway, settings, breaker)


async def migrate(url: str) -> None:
    """Bring an empty database to the newest schema, as `billing-service migrate` does."""
    await upgrade(alembic_config("billing_service", url, metadata))


@asynccontextmanager
async def billing_under_test(url: str) -> AsyncIterator[BillingUnderTest]:
    """A migrated database with its topic registered."""
    await migrate(url)
    database = Database(DatabaseSettings(url=url, application_name="test billing"))
    try:
        await register_topics(database, owned_topics(BillingServiceSettings()))
        yield BillingUnderTest(database, UnitsOfWork(database, EventWriter()))
    finally:
        await database.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@asynccontextmanager
async def billing_process(
    *roles: str, database_url: str, provider_url: str, failpoint: str = "", **settings: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A `billing-service run` process and its address."""
    port = _free_port()
    environment = {
        **os.environ,
        "BILLING_SERVICE_DATABASE_URL": database_url,
        "BILLING_SERVICE_PAYMENT_PROVIDER_URL": provider_url,
        "BILLING_SERVICE_EXECUTOR_CALL_DEADLINE_SECONDS": "1",
        "BILLING_SERVICE_EXECUTOR_LEASE_SECONDS": "6",
        "CHARGEONCE_FAILPOINTS": failpoint,
        **settings,
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from billing_service.cli import main; main()", "run", *roles, f"--port={port}"),
        env=environment,
        cwd=REPOSITORY,
    )
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def get(url: str) -> tuple[int, Any]:
    """An answer of a process that may still be starting."""
    async with asyncio.timeout(DEADLINE_SECONDS), aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(url) as response:
                    return response.status, await response.json()
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.05)
