"""Between the services stands only the event: what one publishes is what the other accepts, to the last digit."""

from __future__ import annotations

import ast
import json
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import billing_service.messages as accepted
import order_service.events as published
from billing_service.messages import OrderConfirmedMessage
from order_service.events import OrderConfirmedEvent
from order_service.order import Order, OrderStatus, PaymentStatus
from shared.identifiers import new_event_id
from shared.inbox.messages import decode_json
from shared.kafka.records import ConsumedRecord
from shared.money import MAX_AMOUNT, exponent
from shared.outbox.append import OutgoingEvent

IDS = st.integers(1, 2**63 - 1)


@st.composite
def orders(draw: st.DrawFn) -> Order:
    currency = draw(st.sampled_from(["EUR", "JPY", "KWD", "CLF"]))
    minor_units = draw(st.integers(1, int(MAX_AMOUNT)))
    return Order(
        order_id=draw(IDS),
        customer_id=draw(IDS),
        currency=currency,
        total_amount=Decimal(minor_units).scaleb(-exponent(currency)),
        status=OrderStatus.CONFIRMED,
        payment_status=PaymentStatus.PENDING,
        version=draw(st.integers(1, 2**31 - 1)),
        confirmed_at=draw(st.datetimes(datetime(2020, 1, 1), datetime(2100, 1, 1))).replace(tzinfo=UTC),  # noqa: DTZ001
        confirmed_event_id=new_event_id(),
    )


def as_consumed(event: OutgoingEvent) -> ConsumedRecord:
    headers = (("event_id", str(event.event_id).encode()), ("event_type", event.event_type.encode()))
    return ConsumedRecord(event.topic, 0, 0, event.key, event.payload, headers, 0)


@given(orders())
def test_what_the_order_service_publishes_billing_accepts_unchanged(order: Order) -> None:
    event = OrderConfirmedEvent.from_order(order).to_outgoing()
    message = decode_json(as_consumed(event), {event.event_type: OrderConfirmedMessage})
    assert message.event_id == order.confirmed_event_id == event.event_id
    assert message.event_type == event.event_type
    assert message.occurred_at == order.confirmed_at
    assert (message.order_id, message.customer_id) == (order.order_id, order.customer_id)
    assert (message.total_amount, message.currency) == (order.total_amount, order.currency)
    assert message.aggregate_version == order.version
    assert event.key == str(order.order_id).encode()


def test_the_event_is_frozen_and_its_json_has_exactly_the_documented_fields() -> None:
    order = Order(
        7,
        8,
        "EUR",
        Decimal("19.90"),
        OrderStatus.CONFIRMED,
        PaymentStatus.PENDING,
        1,
        datetime.now(UTC),
        new_event_id(),
    )
    event = OrderConfirmedEvent.from_order(order)
    with pytest.raises(AttributeError):
        event.order_id = 9  # type: ignore[misc]
    payload = json.loads(event.to_outgoing().payload)
    assert list(payload) == [
        "event_id",
        "event_type",
        "occurred_at",
        "order_id",
        "customer_id",
        "total_amount",
        "currency",
        "aggregate_version",
    ]
    assert payload["total_amount"] == "19.90"
    assert payload["event_type"] == "order.confirmed.v1"


def test_both_sides_name_the_same_topic() -> None:
    assert published.ORDER_CONFIRMED_TOPIC == accepted.ORDER_CONFIRMED_TOPIC == "order-service.order.confirmed"


def test_a_producer_may_add_fields_before_its_consumers_know_them() -> None:
    order = Order(
        7, 8, "EUR", Decimal("1.00"), OrderStatus.CONFIRMED, PaymentStatus.PENDING, 1, datetime.now(UTC), new_event_id()
    )
    event = OrderConfirmedEvent.from_order(order).to_outgoing()
    extended = json.dumps({**json.loads(event.payload), "coupon": {"code": "X"}}).encode()
    record = ConsumedRecord(event.topic, 0, 0, event.key, extended, (), 0)
    assert decode_json(record, {event.event_type: OrderConfirmedMessage}).order_id == 7


def test_f26_the_services_import_nothing_of_each_other_or_of_the_provider() -> None:
    repository = Path(__file__).parents[2]
    others = {
        "order_service": {"billing_service", "payment_provider", "chargeonce"},
        "billing_service": {"order_service", "payment_provider", "chargeonce"},
        "payment_provider": {"order_service", "billing_service", "shared", "chargeonce"},
        "shared": {"order_service", "billing_service", "payment_provider", "chargeonce"},
    }
    for package, forbidden in others.items():
        for source in (repository / package).rglob("*.py"):
            for node in ast.walk(ast.parse(source.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not {name.partition(".")[0] for name in names} & forbidden, source
