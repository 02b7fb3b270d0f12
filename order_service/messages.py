"""What the order service accepts: the results of payments, as billing publishes them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shared.inbox.messages import EventMessage

PAYMENT_TOPIC = "billing-service.payment"

_OrderId = Annotated[int, Field(gt=0, lt=2**63, strict=True)]


class PaymentCapturedMessage(EventMessage):
    """The order was paid."""

    event_type: Literal["payment.captured.v1"]
    order_id: _OrderId


class PaymentDeclinedMessage(EventMessage):
    """The provider declined for good."""

    event_type: Literal["payment.declined.v1"]
    order_id: _OrderId


PaymentMessage = PaymentCapturedMessage | PaymentDeclinedMessage
