"""What billing accepts as an order event: exact decimal strings, or a dead letter with a reason."""

import json
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing_service.handlers import OrderConfirmedHandler
from billing_service.messages import ORDER_CONFIRMED_TOPIC, OrderConfirmedMessage
from shared.errors import MessageRejected
from shared.identifiers import new_event_id
from shared.inbox.messages import ConsumedRecord
from shared.money import exponent, format_amount

handler = OrderConfirmedHandler()


def payload(**changes: Any) -> dict[str, Any]:
    return {
        "event_id": str(new_event_id()),
        "event_type": "order.confirmed.v1",
        "occurred_at": "2025-01-02T03:04:05+00:00",
        "order_id": 1,
        "customer_id": 7,
        "total_amount": "19.99",
        "currency": "EUR",
        "aggregate_version": 1,
        **changes,
    }


def record(value: bytes | None) -> ConsumedRecord:
    return ConsumedRecord(ORDER_CONFIRMED_TOPIC, 0, 0, b"1", value, (), 0)


def decode(body: dict[str, Any]) -> OrderConfirmedMessage:
    return handler.decode(record(json.dumps(body).encode()))


def test_a_valid_event_is_read_exactly() -> None:
    message = decode(payload(total_amount="0.10", an_unknown_field=1))
    assert message.total_amount == Decimal("0.10")
    assert (message.order_id, message.customer_id, message.currency) == (1, 7, "EUR")


@given(units=st.integers(1, 999_999_999_999), currency=st.sampled_from(["EUR", "JPY", "KWD", "CLF"]))
def test_f31_amounts_are_read_without_loss(units: int, currency: str) -> None:
    amount = Decimal(units).scaleb(-exponent(currency))
    message = decode(payload(total_amount=format_amount(amount, currency), currency=currency))
    assert message.total_amount == amount


@given(number=st.one_of(st.floats(allow_nan=True, allow_infinity=True), st.integers(), st.booleans(), st.none()))
def test_f31_an_amount_that_is_no_string_is_refused(number: object) -> None:
    with pytest.raises(MessageRejected) as refused:
        decode(payload(total_amount=number))
    assert refused.value.reason in ("invalid_message", "not_json")  # NaN and Infinity are not JSON at all


@given(
    text=st.one_of(
        st.sampled_from(
            ["NaN", "Infinity", "-1", "+1", "0", "0.00", "1e2", "19.999", "1_0", " 1", "1 ", "\u0661", "", ".5"]
        ),
        st.text(max_size=20).filter(lambda text: not text.isascii() or not any(c.isdigit() for c in text)),
    )
)
def test_f31_a_string_that_is_no_exact_positive_amount_is_refused(text: str) -> None:
    with pytest.raises(MessageRejected) as refused:
        decode(payload(total_amount=text))
    assert refused.value.reason == "invalid_message"


@pytest.mark.parametrize(
    "changes",
    [
        {"total_amount": "1.5", "currency": "JPY"},
        {"currency": "EURO"},
        {"currency": "eur"},
        {"currency": "XAU"},
        {"currency": None},
        {"order_id": "1"},
        {"order_id": 1.0},
        {"order_id": True},
        {"order_id": 0},
        {"order_id": 2**63},
        {"customer_id": -1},
        {"aggregate_version": 0},
        {"occurred_at": "2025-01-02T03:04:05"},
        {"total_amount": "9999999999999.99"},
    ],
    ids=str,
)
def test_an_event_with_a_wrong_field_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(MessageRejected) as refused:
        decode(payload(**changes))
    assert refused.value.reason == "invalid_message"


@pytest.mark.parametrize("event_type", ["order.confirmed.v2", "order.cancelled.v1", ""])
def test_another_event_type_is_refused(event_type: str) -> None:
    with pytest.raises(MessageRejected) as refused:
        decode(payload(event_type=event_type))
    assert refused.value.reason == "unknown_event_type"


@pytest.mark.parametrize("event_id", ["x", None, "f47ac10b-58cc-4372-a567-0e02b2c3d479"])
def test_an_event_without_a_uuid7_is_refused(event_id: str | None) -> None:
    with pytest.raises(MessageRejected) as refused:
        decode(payload(event_id=event_id))
    assert refused.value.reason == "invalid_event_id"


def test_f29_a_tombstone_is_refused() -> None:
    with pytest.raises(MessageRejected) as refused:
        handler.decode(record(None))
    assert refused.value.reason == "tombstone"


def test_a_refusal_repeats_no_value() -> None:
    with pytest.raises(MessageRejected) as refused:
        decode(payload(customer_id="secret-customer", total_amount="secret-amount"))
    assert "secret" not in refused.value.detail
