"""The audit reads what the services and the provider really answer."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import Decimal
from uuid import uuid4

from pydantic import TypeAdapter

from billing_service.api.charges import ChargePage, ChargeView
from billing_service.charge import Charge, ChargeState
from chargeonce.ledgers import ChargeEntry, Inbox, OrderEntry, PaymentEntry
from order_service.api.orders import EventView, OrderPage, OrderSummary, OrderView
from order_service.order import Order, OrderStatus, PaymentStatus
from payment_provider.ledger import Payment
from shared.inbox.summary import InboxSummary

NOW = datetime.now(UTC)

ORDER = Order(
    order_id=7,
    customer_id=1,
    currency="KWD",
    total_amount=Decimal("3.1250"),
    status=OrderStatus.CONFIRMED,
    payment_status=PaymentStatus.PENDING,
    version=1,
    confirmed_at=NOW,
    confirmed_event_id=uuid4(),
)


def test_an_order_in_a_list_and_by_id() -> None:
    page = json.loads(OrderPage(orders=[OrderSummary.of(ORDER)], next=None).model_dump_json())
    listed = OrderEntry.model_validate(page["orders"][0])
    assert (listed.order_id, listed.total_amount, listed.currency) == (7, Decimal("3.125"), "KWD")
    assert (listed.event_id, listed.confirmed_at, listed.payment_status) == (ORDER.confirmed_event_id, NOW, "pending")
    event = EventView(
        event_id=ORDER.confirmed_event_id, event_type="t", occurred_at=NOW, published=False, published_at=None
    )
    view = OrderView(**OrderSummary.of(ORDER).model_dump(), customer_id=1, items=[], events=[event])
    assert not OrderEntry.model_validate_json(view.model_dump_json()).events[0].published


def test_a_charge_and_the_placeholder_of_a_cancelled_order() -> None:
    charge = Charge(
        charge_id=uuid4(),
        order_id=7,
        event_id=ORDER.confirmed_event_id,
        amount=Decimal("3.1250"),
        currency="KWD",
        state=ChargeState.CAPTURED,
        requested_at=NOW,
        first_attempt_at=NOW,
        next_attempt_at=None,
        attempt=1,
        provider_reference="reference",
        decline_reason=None,
        review_reason=None,
        settled_at=NOW,
    )
    page = json.loads(ChargePage(charges=[ChargeView.of(charge)], next=7).model_dump_json())
    entry = ChargeEntry.model_validate(page["charges"][0])
    assert (entry.amount, entry.state, entry.event_id) == (Decimal("3.125"), "captured", ORDER.confirmed_event_id)
    empty = {**page["charges"][0], "event_id": None, "amount": None, "currency": None, "state": "cancelled"}
    assert ChargeEntry.model_validate(empty).amount is None


def test_a_payment_of_the_provider() -> None:
    payment = Payment(str(uuid4()), "charge", 7, 3125, "KWD", "captured", None, "key", NOW.isoformat())
    entry = PaymentEntry.model_validate_json(json.dumps(payment.public()))
    assert (entry.order_id, entry.amount, entry.idempotency_key) == (7, Decimal("3.125"), "key")


def test_what_an_inbox_tells_of_itself() -> None:
    summary = InboxSummary("g", 10, 3, 1, 0, {"not_json": 1})
    inbox = Inbox.model_validate_json(TypeAdapter(InboxSummary).dump_json(summary))
    assert (inbox.duplicates_absorbed, inbox.dead_letters_open) == (3, {"not_json": 1})
