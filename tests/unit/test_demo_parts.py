"""The demo's parts: orders at a pace, poison that really is poison, kills that do not count when nothing was lost."""

from __future__ import annotations

import json
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import aiohttp.web
import pytest
from rich.console import Console

from billing_service.handlers import OrderConfirmedHandler
from chargeonce.demo import phases
from chargeonce.demo.board import Board
from chargeonce.demo.load import DemoFailedError, Load, order_body
from chargeonce.demo.measure import InFlight
from chargeonce.demo.phases import Stage
from chargeonce.demo.poison import poison
from chargeonce.demo.story import Story
from order_service.api.orders import NewOrderRequest
from order_service.events import OrderConfirmedEvent
from shared.errors import MessageRejected
from shared.identifiers import new_event_id
from shared.kafka.records import ConsumedRecord


def genuine() -> ConsumedRecord:
    event = OrderConfirmedEvent(
        event_id=new_event_id(),
        occurred_at=datetime.now(UTC),
        order_id=7,
        customer_id=1,
        total_amount="19.99",
        currency="EUR",
        aggregate_version=1,
    ).to_outgoing()
    headers = (("event_id", str(event.event_id).encode()),)
    return ConsumedRecord(event.topic, 3, 9, event.key, event.payload, headers, 1_700_000_000_000)


# ------------------------------------------------------------------------------------------------------- poison


def test_every_poisonous_message_is_refused_by_what_billing_reads_or_contradicts_what_it_has() -> None:
    handler, record = OrderConfirmedHandler(), genuine()
    reasons, readable = [], []
    for bad in poison(record, partitions=12):
        try:
            readable.append(handler.decode(bad))
        except MessageRejected as rejection:
            reasons.append(rejection.reason)
    assert {"not_json", "tombstone", "unknown_event_type", "invalid_event_id", "invalid_message"} <= set(reasons)
    assert "event_id_mismatch" in reasons
    # What can be read is refused by the tables: a second event for a charged order, a second payload of an event.
    second, altered = readable
    assert second.order_id == altered.order_id == 7
    assert second.event_id != altered.event_id
    assert str(altered.event_id) == json.loads(record.value or b"")["event_id"]


def test_poison_is_spread_over_partitions_and_its_event_ids_are_all_different() -> None:
    bad = poison(genuine(), partitions=4)
    assert {record.partition for record in bad} == {0, 1, 2, 3}
    ids = [json.loads(each.value)["event_id"] for each in bad if each.value and b'"event_id"' in each.value]
    assert len(ids) == len(set(ids))


# --------------------------------------------------------------------------------------------------------- load


@dataclass
class Orders:
    """An order API that answers as it is told, 201 when told nothing."""

    answers: list[int] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    async def create(self, request: aiohttp.web.Request) -> aiohttp.web.Response:
        self.bodies.append(await request.json())
        return aiohttp.web.json_response({}, status=self.answers.pop(0) if self.answers else 201)


@pytest.fixture
async def orders() -> AsyncIterator[Orders]:
    orders = Orders()
    application = aiohttp.web.Application()
    application.router.add_post("/orders", orders.create)
    runner = aiohttp.web.AppRunner(application)
    await runner.setup()
    await aiohttp.web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    orders.url = f"http://{host}:{port}"
    yield orders
    await runner.cleanup()


@pytest.mark.parametrize("number", range(24))
def test_every_order_of_the_demo_is_one_that_the_api_takes(number: int) -> None:
    assert NewOrderRequest.model_validate(order_body(number)).to_order().total_amount > 0


async def test_only_released_orders_are_created_and_never_more_than_the_total(orders: Orders) -> None:
    async with Load(orders.url, total=10, rate_per_second=1000) as load:
        assert load.release(4) == 4
        await load.until(4, 10)
        assert not load.running
        assert (load.accepted, len(orders.bodies)) == (4, 4)
        assert load.release(100) == 6
        assert load.release(1) == 0
        await load.until(10, 10)
    assert len(orders.bodies) == 10


async def test_an_order_turned_away_stored_nothing_and_is_sent_again(orders: Orders) -> None:
    orders.answers = [503]
    async with Load(orders.url, total=2, rate_per_second=1000) as load:
        load.release(2)
        await load.until(2, 10)
        assert load.turned_away == 1
    assert len(orders.bodies) == 3


async def test_a_refused_order_fails_the_demo(orders: Orders) -> None:
    orders.answers = [422]
    async with Load(orders.url, total=1, rate_per_second=1000) as load:
        load.release(1)
        with pytest.raises(DemoFailedError, match="422"):
            await load.until(1, 10)


# -------------------------------------------------------------------------------------------------------- kills


class Frozen:
    """A system that notes what was done to its one process."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def signal(self, _name: str, number: signal.Signals) -> None:
        self.done.append(number.name)

    async def kill(self, _name: str) -> int:
        self.done.append("SIGKILL")
        return 99

    async def wait_ready(self, _names: list[str]) -> None:
        self.done.append("ready")


def stage(orders: Orders, system: Frozen) -> Stage:
    observer = SimpleNamespace(now_seconds=1.0)
    board = Board(Console(quiet=True), 10, 1)
    return Stage(
        cast("Any", system), Load(orders.url, 10, 1000), cast("Any", observer), board, Story(10, datetime.now(UTC))
    )


def measuring(*counts: int) -> Callable[[], Any]:
    left = list(counts)

    async def measure() -> InFlight:
        count = left.pop(0) if len(left) > 1 else left[0]
        return InFlight(count, f"in flight: {count}")

    return measure


async def test_a_kill_waits_until_something_is_in_flight_and_measures_it_in_a_frozen_process(orders: Orders) -> None:
    system = Frozen()
    acting = stage(orders, system)
    async with acting.load:
        await phases._kill(acting, "worker", measuring(0, 0, 7))
    assert system.done[:5] == ["SIGSTOP", "SIGCONT", "SIGSTOP", "SIGCONT", "SIGSTOP"]
    assert "SIGKILL" in system.done
    assert system.done[-1] == "ready"
    (kill,) = acting.story.kills
    assert (kill.process, kill.pid, kill.in_flight) == ("worker", 99, 7)


async def test_a_demo_in_which_nothing_was_in_flight_fails(orders: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "_IN_FLIGHT_DEADLINE_SECONDS", 0.2)
    system = Frozen()
    acting = stage(orders, system)
    async with acting.load:
        with pytest.raises(DemoFailedError, match="nothing was in flight in worker"):
            await phases._kill(acting, "worker", measuring(0))
    assert "SIGKILL" not in system.done
    assert system.done[-1] == "SIGCONT"
    assert not acting.story.kills
