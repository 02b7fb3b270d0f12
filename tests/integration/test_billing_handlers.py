"""Order events become charges: once, in few statements, and what does not fit is classified."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import event as sqlalchemy_event
from sqlalchemy import text

from billing_service.handlers import OrderConfirmedHandler
from billing_service.messages import ORDER_CONFIRMED_TOPIC, OrderConfirmedMessage
from shared.errors import MessageRejected
from shared.identifiers import new_event_id
from shared.inbox.messages import ConsumedRecord, Incoming
from tests.support.billing import BillingUnderTest, billing_under_test

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
async def billing(database_url: str) -> AsyncIterator[BillingUnderTest]:
    async with billing_under_test(database_url) as billing:
        yield billing


def incoming(
    order_id: int, headers: Sequence[tuple[str, bytes | None]] = (), **changes: Any
) -> Incoming[OrderConfirmedMessage]:
    fields: dict[str, Any] = {
        "event_id": new_event_id(),
        "event_type": "order.confirmed.v1",
        "occurred_at": "2025-01-02T03:04:05+00:00",
        "order_id": order_id,
        "customer_id": 7,
        "currency": "EUR",
        "total_amount": "19.99",
        "aggregate_version": 1,
        **changes,
    }
    message = OrderConfirmedMessage.model_validate(fields, strict=False)
    record = ConsumedRecord(ORDER_CONFIRMED_TOPIC, 0, 0, str(order_id).encode(), b"{}", tuple(headers), 0)
    return Incoming(message.event_id, message, record)


async def handle(billing: BillingUnderTest, *events: Incoming[OrderConfirmedMessage]) -> Mapping[UUID, MessageRejected]:
    async with billing.units.begin() as work:
        ordered = sorted(events, key=lambda event: event.event_id)
        return await OrderConfirmedHandler().handle(work, ordered)


async def test_an_event_becomes_a_charge_that_is_due(billing: BillingUnderTest) -> None:
    event = incoming(1)
    assert await handle(billing, event) == {}
    charge = await billing.charge_of(1)
    assert (charge.state, charge.event_id, charge.amount, charge.currency) == (
        "requested",
        event.event_id,
        Decimal("19.99"),
        "EUR",
    )
    assert charge.charge_id.version == 7
    assert charge.next_attempt_at is not None
    assert charge.attempt == 0


async def test_the_trace_of_the_event_is_kept_and_a_broken_one_costs_nothing(billing: BillingUnderTest) -> None:
    good = ("traceparent", TRACEPARENT.encode())
    await handle(
        billing,
        incoming(1, [good]),
        incoming(2, [("traceparent", b"\xff\xfe"), ("traceparent", None), ("TraceParent", TRACEPARENT.encode())]),
        incoming(3, [("traceparent", b"garbage")]),
    )
    async with billing.database.engine.connect() as connection:
        stored = (await connection.execute(text("SELECT traceparent FROM charge ORDER BY order_id"))).scalars().all()
    assert stored == [TRACEPARENT, TRACEPARENT, None]


async def test_the_same_event_again_is_a_success_without_effect(billing: BillingUnderTest) -> None:
    event = incoming(1)
    await handle(billing, event)
    before = await billing.charge_of(1)
    assert await handle(billing, event, incoming(2)) == {}
    assert await billing.charge_of(1) == before
    assert (await billing.charge_of(2)).state == "requested"


async def test_f49_a_second_event_for_an_order_is_shown_to_a_person(billing: BillingUnderTest) -> None:
    first, second = incoming(1), incoming(1)
    await handle(billing, first)
    rejected = await handle(billing, second, incoming(2))
    assert list(rejected) == [second.event_id]
    assert rejected[second.event_id].reason == "order_already_charged"
    assert str(first.event_id) in rejected[second.event_id].detail
    assert (await billing.charge_of(1)).event_id == first.event_id
    assert (await billing.charge_of(2)).state == "requested", "its neighbour is charged"


async def test_f49_two_events_for_an_order_in_one_batch_make_one_charge(billing: BillingUnderTest) -> None:
    first, second = sorted((incoming(1), incoming(1)), key=lambda event: event.event_id)
    rejected = await handle(billing, first, second)
    assert {event_id: rejection.reason for event_id, rejection in rejected.items()} == {
        second.event_id: "order_already_charged"
    }
    assert (await billing.charge_of(1)).event_id == first.event_id


@pytest.mark.parametrize("changes", [{"order_id": 2}, {"total_amount": "20.00"}, {"currency": "USD"}], ids=str)
async def test_the_same_event_id_with_other_contents_is_never_charged(
    billing: BillingUnderTest, changes: dict[str, Any]
) -> None:
    first = incoming(1)
    await handle(billing, first)
    forged = incoming(changes.pop("order_id", 1), event_id=first.event_id, **changes)
    rejected = await handle(billing, forged)
    assert rejected[first.event_id].reason == "payload_mismatch"
    assert (await billing.charge_of(1)).amount == Decimal("19.99")


async def test_a_confirmation_after_the_cancellation_revives_nothing(billing: BillingUnderTest) -> None:
    await billing.execute(
        "INSERT INTO charge (charge_id, order_id, state, cancel_event_id, cancel_requested_at)"
        " VALUES (gen_random_uuid(), 1, 'cancelled', gen_random_uuid(), now())"
    )
    assert await handle(billing, incoming(1)) == {}
    assert (await billing.charge_of(1)).state == "cancelled"


async def test_f50_batches_with_the_same_orders_in_reverse_do_not_deadlock(billing: BillingUnderTest) -> None:
    one = [incoming(order_id) for order_id in range(1, 201)]
    two = [incoming(order_id) for order_id in range(200, 0, -1)]
    results = await asyncio.gather(handle(billing, *one), handle(billing, *two))
    assert sum(len(rejected) for rejected in results) == 200
    for rejected in results:
        assert {rejection.reason for rejection in rejected.values()} <= {"order_already_charged"}


async def test_the_executor_is_woken_after_the_commit_and_only_for_new_charges(billing: BillingUnderTest) -> None:
    seen: list[str] = []
    handler = OrderConfirmedHandler(lambda: seen.append("signal"))
    event = incoming(1)
    async with billing.units.begin() as work:
        await handler.handle(work, [event])
        assert seen == []
    assert seen == ["signal"]
    async with billing.units.begin() as work:
        await handler.handle(work, [event])
    assert seen == ["signal"]


@pytest.mark.parametrize("size", [1, 500])
async def test_a_batch_costs_one_statement_whatever_its_size(billing: BillingUnderTest, size: int) -> None:
    statements: list[str] = []
    sqlalchemy_event.listen(
        billing.database.engine.sync_engine,
        "before_cursor_execute",
        lambda _c, _cursor, statement, *_: statements.append(statement),
    )
    await handle(billing, *(incoming(order_id) for order_id in range(1, size + 1)))
    assert len(statements) == 1
    statements.clear()
    await handle(billing, *(incoming(order_id) for order_id in range(1, size + 1)))
    assert len(statements) == 2, "the insert, and one query that classifies what it did not insert"


async def test_f31_every_currency_and_size_of_amount_survives_storage(billing: BillingUnderTest) -> None:
    amounts = {1: ("999999999999", "JPY"), 2: ("0.001", "KWD"), 3: ("0.0001", "CLF"), 4: ("123456789012.99", "EUR")}
    await handle(
        billing,
        *(incoming(order, total_amount=amount, currency=currency) for order, (amount, currency) in amounts.items()),
    )
    for order_id, (amount, currency) in amounts.items():
        charge = await billing.charge_of(order_id)
        assert (charge.amount, charge.currency) == (Decimal(amount), currency)
