"""The way back: what billing publishes of a payment, the order service accepts."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from uuid import uuid4

import pytest

import billing_service.events as published
import order_service.messages as accepted
from billing_service.charge import ChargeState, SettledCharge
from billing_service.events import PaymentEvent
from order_service.handlers import PaymentHandler
from order_service.messages import PaymentCapturedMessage, PaymentDeclinedMessage
from shared.identifiers import new_event_id
from shared.kafka.records import ConsumedRecord


def settled(state: ChargeState) -> SettledCharge:
    return SettledCharge(
        charge_id=uuid4(),
        order_id=7,
        event_id=new_event_id(),
        amount=Decimal("19.90"),
        currency="EUR",
        state=state,
        provider_reference="payment-1",
        decline_reason="insufficient_funds" if state is ChargeState.DECLINED else None,
        settled_at=datetime.now(UTC),
        traceparent=None,
    )


@pytest.mark.parametrize(
    ("state", "model"),
    [(ChargeState.CAPTURED, PaymentCapturedMessage), (ChargeState.DECLINED, PaymentDeclinedMessage)],
)
def test_what_billing_publishes_the_order_service_accepts(state: ChargeState, model: type) -> None:
    event = PaymentEvent.from_charge(settled(state)).to_outgoing()
    record = ConsumedRecord(
        event.topic, 0, 0, event.key, event.payload, (("event_id", str(event.event_id).encode()),), 0
    )
    message = PaymentHandler().decode(record)
    assert type(message) is model
    assert (message.event_id, message.order_id) == (event.event_id, 7)


def test_both_sides_name_the_same_topic() -> None:
    assert published.PAYMENT_TOPIC == accepted.PAYMENT_TOPIC == "billing-service.payment"
    assert PaymentHandler().topics == (published.PAYMENT_TOPIC,)
