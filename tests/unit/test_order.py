"""The order aggregate."""

from __future__ import annotations

import itertools
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from order_service.order import PAYMENT_TRANSITIONS, NewOrder, OrderItem, PaymentStatus
from shared.errors import InvalidInput

ITEMS = st.lists(
    st.builds(
        OrderItem,
        sku=st.just("A"),
        quantity=st.integers(1, 1000),
        unit_price=st.integers(1, 10**7).map(lambda cents: Decimal(cents) / 100),
    ),
    min_size=1,
    max_size=30,
)


@given(ITEMS)
def test_the_total_is_the_exact_sum_of_the_lines(items: list[OrderItem]) -> None:
    cents = sum(item.quantity * int(item.unit_price * 100) for item in items)
    assert NewOrder.of(7, "EUR", items).total_amount == Decimal(cents) / 100


def test_an_absurd_total_is_refused_naming_the_field() -> None:
    with pytest.raises(InvalidInput) as refused:
        NewOrder.of(7, "EUR", [OrderItem("A", 100_000, Decimal(999_999_999))])
    assert refused.value.fields[0].field == "items"


def test_final_payment_states_stay_final() -> None:
    final = {PaymentStatus.CHARGED, PaymentStatus.DECLINED}
    assert all(not PAYMENT_TRANSITIONS[status] for status in final)
    assert PAYMENT_TRANSITIONS[PaymentStatus.PENDING] == final
    assert set(PAYMENT_TRANSITIONS) == set(PaymentStatus)
    pairs = itertools.product(PaymentStatus, PaymentStatus)
    assert sum(after in PAYMENT_TRANSITIONS[before] for before, after in pairs) == 2
