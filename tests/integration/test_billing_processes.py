"""Billing's own processes: killed at each crash point of a charge, stopped, asked over HTTP."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import aiohttp
import pytest

from tests.support.billing import (
    REPOSITORY,
    BillingUnderTest,
    Provider,
    billing_process,
    billing_under_test,
    get,
    new_charge,
    running_provider,
)

DEADLINE_SECONDS = 30.0


@pytest.fixture
async def billing(database_url: str) -> AsyncIterator[BillingUnderTest]:
    async with billing_under_test(database_url) as billing:
        yield billing


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[Provider]:
    async with running_provider(tmp_path / "ledger.sqlite3") as provider:
        yield provider


@pytest.mark.parametrize("failpoint", ["C1", "C2", "C3", "C4", "C5"])
async def test_an_executor_killed_at_any_point_of_a_charge_charges_once(
    billing: BillingUnderTest, provider: Provider, database_url: str, failpoint: str
) -> None:
    charges = [new_charge(order_id) for order_id in range(1, 4)]
    await billing.request(*charges)
    async with billing_process(
        "executor", database_url=database_url, provider_url=provider.url, failpoint=failpoint
    ) as (killed, _):
        assert await asyncio.wait_for(killed.wait(), DEADLINE_SECONDS) == -signal.SIGKILL
    if failpoint == "C1":
        assert await provider.payments() == []
    if failpoint == "C2":
        async with asyncio.timeout(DEADLINE_SECONDS):  # the request was on its way when its sender died
            while not await provider.payments():
                await asyncio.sleep(0.05)
    if failpoint in ("C1", "C2", "C3", "C4"):
        assert await billing.events() == []
    if failpoint == "C5":
        assert len(await billing.events()) >= 1

    await billing.execute("UPDATE charge SET lease_expires_at = now() WHERE lease_owner IS NOT NULL")
    async with billing_process("executor", database_url=database_url, provider_url=provider.url):
        settled = await billing.settled(1, 2, 3)
    payments = await provider.payments()
    assert [charge.state for charge in settled] == ["captured"] * 3
    assert [payment["order_id"] for payment in payments] == [1, 2, 3]
    assert [charge.provider_reference for charge in settled] == [payment["payment_id"] for payment in payments]
    assert sorted(event["order_id"] for event in await billing.events()) == [1, 2, 3]


async def test_an_executor_stops_cleanly_and_leaves_no_lease(
    billing: BillingUnderTest, provider: Provider, database_url: str
) -> None:
    await provider.fail({"kind": "slow", "delay_seconds": 0.5})
    await billing.request(*(new_charge(order_id) for order_id in range(1, 60)))
    async with billing_process("executor", database_url=database_url, provider_url=provider.url) as (process, _):
        await billing.until(1, lambda charge: charge.attempt == 1, DEADLINE_SECONDS)
        process.terminate()
        assert await asyncio.wait_for(process.wait(), DEADLINE_SECONDS) == 0
    found = [await billing.charge_of(order_id) for order_id in range(1, 60)]
    captured = {charge.order_id for charge in found if charge.state == "captured"}
    assert captured
    assert captured == {payment["order_id"] for payment in await provider.payments()}, "what was paid is settled"
    assert {charge.attempt for charge in found if charge.state == "requested"} <= {0}, "nothing is left in hand"


async def test_the_api_pages_charges_by_order_and_state(
    billing: BillingUnderTest, provider: Provider, database_url: str
) -> None:
    charges = [new_charge(order_id) for order_id in (3, 1, 2, 7)] + [new_charge(5, currency="ZZZ")]
    await billing.request(*charges)
    await billing.execute(
        "UPDATE charge SET state = 'captured', provider_reference = 'p', settled_at = now() WHERE order_id IN (2, 5)"
    )
    await billing.execute(
        "INSERT INTO charge (charge_id, order_id, state, cancel_event_id) VALUES (gen_random_uuid(), 9, 'cancelled',"
        " gen_random_uuid())"
    )
    async with billing_process("api", database_url=database_url, provider_url=provider.url) as (_, url):
        _, first = await get(f"{url}/charges?limit=4")
        assert [charge["order_id"] for charge in first["charges"]] == [1, 2, 3, 5]
        _, second = await get(f"{url}/charges?limit=4&after_order_id={first['next']}")
        assert [charge["order_id"] for charge in second["charges"]] == [7, 9]
        assert second["next"] is None
        _, captured = await get(f"{url}/charges?state=captured")
        assert [charge["order_id"] for charge in captured["charges"]] == [2, 5]
        assert captured["charges"][1]["amount"] == "19.99", "a currency that is gone hides no page"

        _, of_order = await get(f"{url}/charges?order_id=2")
        [charge] = of_order["charges"]
        assert (charge["amount"], charge["currency"], charge["state"]) == ("19.99", "EUR", "captured")
        assert charge["event_id"] == str(charges[2].event_id)
        assert "customer_id" not in charge
        assert (await get(f"{url}/charges/{charge['charge_id']}")) == (200, charge)
        assert (await get(f"{url}/charges?order_id=404"))[1] == {"charges": [], "next": None}
        assert (await get(f"{url}/charges?order_id=2&state=requested"))[1] == {"charges": [], "next": None}
        [placeholder] = (await get(f"{url}/charges?order_id=9"))[1]["charges"]
        assert (placeholder["amount"], placeholder["event_id"]) == (None, None)

        status, problem = await get(f"{url}/charges/{uuid4()}")
        assert (status, problem["status"], problem["type"]) == (404, 404, "not-found")
        status, problem = await get(f"{url}/charges?limit=0&state=paid&after_order_id=-1")
        assert status == 422
        assert {error["field"] for error in problem["errors"]} == {"limit", "state", "after_order_id"}

        status, inbox = await get(f"{url}/inbox")
        assert (status, inbox["group"], inbox["handled"]) == (200, "billing-order-confirmed", 0)
        status, ready = await get(f"{url}/readyz")
        assert (status, ready["status"]) == (200, "ready")


async def test_metrics_tell_the_backlog_of_charges(
    billing: BillingUnderTest, provider: Provider, database_url: str
) -> None:
    await billing.request(*(new_charge(order_id) for order_id in range(1, 4)))
    await billing.execute("UPDATE charge SET requested_at = now() - interval '1 hour' WHERE order_id = 1")
    async with billing_process("api", database_url=database_url, provider_url=provider.url) as (_, url):
        await get(f"{url}/livez")
        async with asyncio.timeout(DEADLINE_SECONDS), aiohttp.ClientSession() as session:
            while True:
                async with session.get(f"{url}/metrics") as response:
                    text = await response.text()
                if 'billing_unfinished_charges{state="requested"}' in text:
                    break
                await asyncio.sleep(0.05)
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("billing_"))
    assert float(values['billing_unfinished_charges{state="requested"}']) == 3
    assert 3600 <= float(values['billing_oldest_unfinished_charge_seconds{state="requested"}']) < 3700
    assert float(values['billing_unfinished_charges{state="needs_review"}']) == 0


async def test_a_provider_that_does_not_know_us_makes_the_executor_degraded(
    billing: BillingUnderTest, provider: Provider, database_url: str
) -> None:
    await billing.request(*(new_charge(order_id) for order_id in range(1, 30)))
    async with billing_process("executor", database_url=database_url, provider_url=f"{provider.url}/wrong") as (_, url):
        async with asyncio.timeout(DEADLINE_SECONDS):
            while (answer := await get(f"{url}/readyz"))[1]["status"] != "degraded":
                await asyncio.sleep(0.05)
    assert answer[0] == 200, "degraded is no reason to take the process away"
    assert "404" in answer[1]["checks"]["executor"]["reason"]
    assert (await billing.charge_of(29)).state == "requested"


async def test_reviews_show_a_person_what_happened_to_the_money(
    billing: BillingUnderTest, provider: Provider, database_url: str
) -> None:
    unpaid, paid = new_charge(1), new_charge(2)
    await billing.request(unpaid, paid, new_charge(3))
    await billing.execute(
        "UPDATE charge SET state = 'needs_review', review_reason = 'idempotency_window_passed' WHERE order_id < 3"
    )
    assert await provider.charge(str(paid.event_id), 2, "19.99") == 201
    assert await provider.charge("somebody-else", 2, "5.00") == 201
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from billing_service.cli import main; main()", "reviews"),
        env={
            **os.environ,
            "BILLING_SERVICE_DATABASE_URL": database_url,
            "BILLING_SERVICE_PAYMENT_PROVIDER_URL": provider.url,
        },
        cwd=REPOSITORY,
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await asyncio.wait_for(process.communicate(), DEADLINE_SECONDS)
    first, second = output.decode().splitlines()
    assert process.returncode == 0
    assert first.startswith("order 1 ")
    assert "idempotency_window_passed; the provider has no payment" in first
    assert second.startswith("order 2 ")
    assert "captured 19.99 EUR" in second
    assert "(our key)" in second
    assert "(another key)" in second
