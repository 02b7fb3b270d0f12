"""The order aggregate: what an order is, what it costs, and how its payment may change. No frameworks here."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from uuid import UUID

from shared.errors import FieldError, InvalidInput
from shared.money import MAX_AMOUNT, total


class OrderStatus(enum.StrEnum):
    """Where the order stands."""

    CONFIRMED = "confirmed"


class PaymentStatus(enum.StrEnum):
    """What the order knows of its payment."""

    PENDING = "pending"
    CHARGED = "charged"
    DECLINED = "declined"


PAYMENT_TRANSITIONS: dict[PaymentStatus, frozenset[PaymentStatus]] = {
    PaymentStatus.PENDING: frozenset({PaymentStatus.CHARGED, PaymentStatus.DECLINED}),
    PaymentStatus.CHARGED: frozenset(),
    PaymentStatus.DECLINED: frozenset(),
}
"""What may follow what. Final states stay final: a result that comes again changes nothing, another one is a fault."""


@dataclass(frozen=True, slots=True)
class OrderItem:
    """A line: `quantity` pieces at `unit_price` each, in the order's currency."""

    sku: str
    quantity: int
    unit_price: Decimal


@dataclass(frozen=True, slots=True)
class NewOrder:
    """An order about to be confirmed, with the total that the server computed."""

    customer_id: int
    currency: str
    items: Sequence[OrderItem]
    total_amount: Decimal

    @classmethod
    def of(cls, customer_id: int, currency: str, items: Sequence[OrderItem]) -> NewOrder:
        """Return the order with its total. Raises InvalidInput when nobody should be charged that much at once."""
        amount = total(item.unit_price * item.quantity for item in items)
        if amount > MAX_AMOUNT:
            message = f"the items' total is over {MAX_AMOUNT}; split the order"
            raise InvalidInput(message, [FieldError("items", message)])
        return cls(customer_id, currency, tuple(items), amount)


@dataclass(frozen=True, slots=True)
class Order:
    """A confirmed order. `version` counts the published changes of the aggregate, from 1 (field report F2)."""

    order_id: int
    customer_id: int
    currency: str
    total_amount: Decimal
    status: OrderStatus
    payment_status: PaymentStatus
    version: int
    confirmed_at: datetime
    confirmed_event_id: UUID
