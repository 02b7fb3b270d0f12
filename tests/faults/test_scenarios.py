"""The scenarios that anyone may ask to see: kills in mid-processing, a broker and a database that go and come back."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

from chargeonce.system import PROCESSES
from tests.faults.conftest import BODY, Shop

PROVIDER_FAULTS: list[dict[str, Any]] = [
    {"kind": "timeout_after_capture", "remaining": 3, "delay_seconds": 30},
    {"kind": "reset_after_capture", "remaining": 3},
    {"kind": "reset_before_capture", "remaining": 3},
    {"kind": "error_500", "remaining": 3},
    {"kind": "unavailable_503", "remaining": 3, "retry_after_seconds": 1},
    {"kind": "rate_limited_429", "remaining": 3, "retry_after_seconds": 1},
    {"kind": "wrong_body", "remaining": 3},
    {"kind": "slow", "remaining": 3, "delay_seconds": 1},
    {"kind": "conflict_409", "remaining": 3},
]


async def test_the_broker_stops_and_starts_and_the_api_serves_throughout(shop: Shop) -> None:
    await shop.orders(10)
    await shop.system.stack.kafka.stop()
    before = len(shop.acknowledged)
    for _ in range(10):
        await shop.orders(3)
    assert len(shop.acknowledged) == before + 30, "the API does not notice that Kafka is away"
    order = await shop.json(f"{shop.system.orders_url}/orders/{max(shop.acknowledged)}")
    assert [event["published"] for event in order["events"]] == [False]
    await shop.system.stack.kafka.start()
    await shop.audit_is_clean()
    order = await shop.json(f"{shop.system.orders_url}/orders/{max(shop.acknowledged)}")
    assert (order["payment_status"], order["events"][0]["published"]) == ("charged", True)


async def test_the_broker_is_killed_and_loses_nothing(shop: Shop) -> None:
    ordering = asyncio.create_task(shop.orders(40))
    await shop.system.stack.kafka.kill()
    await ordering
    await shop.system.stack.kafka.start()
    await shop.audit_is_clean()


async def test_f38_f44_the_databases_restart_under_load(shop: Shop) -> None:
    stop = asyncio.get_running_loop().create_future()
    ordering = asyncio.create_task(shop.order_until(stop))  # type: ignore[arg-type]
    await shop.orders(5)
    await shop.system.stack.postgres.kill()
    await shop.system.stack.postgres.start()
    async with asyncio.timeout(30):
        while await shop.order() is None:
            await asyncio.sleep(0.05)
    stop.set_result(None)
    await ordering
    await shop.audit_is_clean()


@pytest.mark.parametrize("fault", PROVIDER_FAULTS, ids=[str(fault["kind"]) for fault in PROVIDER_FAULTS])
async def test_f41_whatever_the_provider_does_the_money_moves_once(shop: Shop, fault: dict[str, Any]) -> None:
    await shop.faults(fault)
    await shop.orders(8)
    await shop.audit_is_clean()
    rules = (await shop.json(f"{shop.system.provider_url}/faults"))["rules"]
    assert [rule["fired"] for rule in rules] == [fault["remaining"]], "the fault did not happen"
    await shop.faults()


async def test_a_declined_payment_reaches_the_order_and_moves_no_money(shop: Shop) -> None:
    await shop.audit_is_clean()
    moved = await shop.payments()
    await shop.faults({"kind": "declined", "remaining": 1})
    async with shop.client.post(f"{shop.system.orders_url}/orders", json=BODY) as response:
        created = await response.json()
    await shop.settled()
    order = await shop.json(f"{shop.system.orders_url}/orders/{created['order_id']}")
    assert order["payment_status"] == "declined"
    assert await shop.payments() == moved
    await shop.faults()


@pytest.mark.parametrize("name", PROCESSES)
async def test_f22_sigterm_under_load_ends_each_process_with_status_0_and_loses_nothing(shop: Shop, name: str) -> None:
    ordering = asyncio.create_task(shop.orders(30))
    await asyncio.sleep(0)
    pid = shop.system.pid(name)
    assert pid is not None
    shop.system.signal(name, signal.SIGTERM)
    assert await shop.system.wait_ended(name, deadline_seconds=30) == 0
    await ordering
    await shop.system.start_process(name)
    await shop.system.wait_ready([name])
    await shop.audit_is_clean()
