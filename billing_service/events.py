"""What billing publishes: the result of each charge. The consumer's models are order_service.messages."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from billing_service.charge import ChargeState, SettledCharge
from shared.identifiers import new_event_id
from shared.money import format_stored_amount
from shared.outbox.append import OutgoingEvent

PAYMENT_TOPIC = "billing-service.payment"

_EVENT_TYPES = {ChargeState.CAPTURED: "payment.captured.v1", ChargeState.DECLINED: "payment.declined.v1"}


@dataclass(frozen=True, slots=True)
class PaymentEvent:
    """An order was paid, or the provider declined for good. `order_event_id` is the event that asked for the charge."""

    event_id: UUID
    event_type: str
    occurred_at: datetime
    order_id: int
    charge_id: UUID
    order_event_id: UUID
    amount: str
    currency: str
    provider_reference: str
    decline_reason: str | None
    traceparent: str | None = None

    @classmethod
    def from_charge(cls, charge: SettledCharge) -> PaymentEvent:
        """Return the event of a charge that was captured or declined; `occurred_at` is when it was settled."""
        return cls(
            event_id=new_event_id(),
            event_type=_EVENT_TYPES[charge.state],
            occurred_at=charge.settled_at,
            order_id=charge.order_id,
            charge_id=charge.charge_id,
            order_event_id=charge.event_id,
            amount=format_stored_amount(charge.amount, charge.currency),
            currency=charge.currency,
            provider_reference=charge.provider_reference,
            decline_reason=charge.decline_reason,
            traceparent=charge.traceparent,
        )

    def to_outgoing(self) -> OutgoingEvent:
        """Return the event as the outbox takes it: keyed by the order, in the trace of the order's request."""
        payload = {
            "event_id": str(self.event_id),
            "event_type": self.event_type,
            "occurred_at": self.occurred_at.isoformat(),
            "order_id": self.order_id,
            "charge_id": str(self.charge_id),
            "order_event_id": str(self.order_event_id),
            "amount": self.amount,
            "currency": self.currency,
            "provider_reference": self.provider_reference,
            "decline_reason": self.decline_reason,
        }
        return OutgoingEvent(
            event_id=self.event_id,
            topic=PAYMENT_TOPIC,
            key=str(self.order_id).encode(),
            event_type=self.event_type,
            payload=json.dumps(payload, separators=(",", ":")).encode(),
            headers={"traceparent": self.traceparent} if self.traceparent else {},
        )
