"""What billing accepts: confirmed orders, as the order service publishes them (R-KFK-IDEM-1)."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from shared.inbox.messages import EventMessage
from shared.money import exponent, parse_positive_amount

ORDER_CONFIRMED_TOPIC = "order-service.order.confirmed"
ORDER_CONFIRMED_TYPE = "order.confirmed.v1"

_Id = Annotated[int, Field(gt=0, lt=2**63, strict=True)]


class OrderConfirmedMessage(EventMessage):
    """An order was confirmed and shall be charged, once. Money is a decimal string, never a JSON number (F31)."""

    event_type: Literal["order.confirmed.v1"]
    order_id: _Id
    customer_id: _Id
    currency: Annotated[str, Field(strict=True)]
    total_amount: Decimal
    aggregate_version: Annotated[int, Field(gt=0, lt=2**31, strict=True)]

    @field_validator("currency")
    @classmethod
    def _known_currency(cls, value: str) -> str:
        exponent(value)
        return value

    @field_validator("total_amount", mode="before")
    @classmethod
    def _exact_amount(cls, value: object, info: ValidationInfo) -> Decimal:
        currency = info.data.get("currency")
        if currency is None:
            raise ValueError("cannot be read without a valid currency")
        return parse_positive_amount(value, currency)
