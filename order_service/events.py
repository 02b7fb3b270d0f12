"""What the order service publishes. billing_service.messages is its consumer's model; tests/contracts holds both."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from order_service.order import Order
from shared.money import format_amount
from shared.outbox.append import OutgoingEvent

ORDER_CONFIRMED_TOPIC = "order-service.order.confirmed"


@dataclass(frozen=True, slots=True)
class OrderConfirmedEvent:
    """An order was confirmed and shall be charged. Money is a decimal string with the currency's decimals."""

    event_id: UUID
    occurred_at: datetime
    order_id: int
    customer_id: int
    total_amount: str
    currency: str
    aggregate_version: int
    event_type: str = "order.confirmed.v1"

    @classmethod
    def from_order(cls, order: Order) -> OrderConfirmedEvent:
        """Return the event of a confirmed order; `occurred_at` is when it was confirmed."""
        return cls(
            event_id=order.confirmed_event_id,
            occurred_at=order.confirmed_at,
            order_id=order.order_id,
            customer_id=order.customer_id,
            total_amount=format_amount(order.total_amount, order.currency),
            currency=order.currency,
            aggregate_version=order.version,
        )

    def to_outgoing(self) -> OutgoingEvent:
        """Return the event as the outbox takes it: keyed by the order, serialised once."""
        payload = {
            "event_id": str(self.event_id),
            "event_type": self.event_type,
            "occurred_at": self.occurred_at.isoformat(),
            "order_id": self.order_id,
            "customer_id": self.customer_id,
            "total_amount": self.total_amount,
            "currency": self.currency,
            "aggregate_version": self.aggregate_version,
        }
        return OutgoingEvent(
            event_id=self.event_id,
            topic=ORDER_CONFIRMED_TOPIC,
            key=str(self.order_id).encode(),
            event_type=self.event_type,
            payload=json.dumps(payload, separators=(",", ":")).encode(),
        )
