"""Routes of the order API. Money is a decimal string in both directions; bad input names the field and the remedy."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated, Self
from uuid import UUID

from fastapi import APIRouter, Header, Path, Query, Request, Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from order_service import repository
from order_service.checkout import Checkout
from order_service.order import NewOrder, Order, OrderItem, OrderStatus, PaymentStatus
from shared.database import Database
from shared.errors import FieldError, InvalidInput, NotFound
from shared.idempotency import HEADER, REPLAYED_HEADER, IdempotencyKey, fingerprint, missing_key, parse_key
from shared.inbox.summary import InboxSummary, inbox_summary
from shared.money import exponent, format_stored_amount, parse_positive_amount
from shared.web import StrictJsonRoute

router = APIRouter(tags=["orders"], route_class=StrictJsonRoute)

MAX_ITEMS = 100
MAX_QUANTITY = 100_000
_MAX_BIGINT = 2**63 - 1


def _plain_digits(value: object) -> object:
    """Refuse what int() would take as well, such as +1, 01 or 1_0: an id has one spelling."""
    if isinstance(value, str) and not _PLAIN_DIGITS.fullmatch(value):
        raise ValueError("is a whole number in digits, without sign, blanks or leading zeros")
    return value


_PLAIN_DIGITS = re.compile(r"[1-9][0-9]*", re.ASCII)
OrderId = Annotated[int, Path(ge=1, le=_MAX_BIGINT), BeforeValidator(_plain_digits)]


class NewItem(BaseModel):
    """A line of a new order."""

    model_config = ConfigDict(extra="forbid", strict=True)

    sku: Annotated[str, Field(min_length=1, max_length=64, examples=["BOOK-1"])]
    quantity: Annotated[int, Field(ge=1, le=MAX_QUANTITY, examples=[2])]
    unit_price: Annotated[str, Field(max_length=32, examples=["19.99"], description="decimal string, more than zero")]

    @field_validator("sku")
    @classmethod
    def _printable(cls, value: str) -> str:
        if not value.isprintable():
            raise ValueError("may have printable characters only")
        return value


class NewOrderRequest(BaseModel):
    """What `POST /orders` takes. The total is computed by the server."""

    model_config = ConfigDict(extra="forbid", strict=True)

    customer_id: Annotated[int, Field(ge=1, le=_MAX_BIGINT, examples=[7])]
    currency: Annotated[str, Field(examples=["EUR"], description="ISO 4217 code")]
    items: Annotated[list[NewItem], Field(min_length=1, max_length=MAX_ITEMS)]

    @field_validator("currency")
    @classmethod
    def _known(cls, value: str) -> str:
        exponent(value)
        return value

    def to_order(self) -> NewOrder:
        """Return the order with its total. Raises InvalidInput naming each price that is refused."""
        items: list[OrderItem] = []
        refused: list[FieldError] = []
        for number, item in enumerate(self.items):
            try:
                price = parse_positive_amount(item.unit_price, self.currency)
            except ValueError as error:
                refused.append(FieldError(f"items.{number}.unit_price", str(error)))
            else:
                items.append(OrderItem(item.sku, item.quantity, price))
        if refused:
            raise InvalidInput("; ".join(f"{item.field}: {item.message}" for item in refused), refused)
        return NewOrder.of(self.customer_id, self.currency, items)


class ItemView(BaseModel):
    sku: str
    quantity: int
    unit_price: str


class EventView(BaseModel):
    """An event of the order; `published_at` is null while it waits (and once its record has been cleaned away)."""

    event_id: UUID
    event_type: str
    occurred_at: datetime
    published: bool
    published_at: datetime | None


class OrderSummary(BaseModel):
    """An order in a list, as the audit reads it."""

    order_id: int
    status: OrderStatus
    payment_status: PaymentStatus
    currency: str
    total_amount: str
    confirmed_at: datetime
    event_id: UUID

    @classmethod
    def of(cls, order: Order) -> Self:
        return cls(
            order_id=order.order_id,
            status=order.status,
            payment_status=order.payment_status,
            currency=order.currency,
            total_amount=format_stored_amount(order.total_amount, order.currency),
            confirmed_at=order.confirmed_at,
            event_id=order.confirmed_event_id,
        )


class OrderView(OrderSummary):
    """One order with its items and events."""

    customer_id: int
    items: list[ItemView]
    events: list[EventView]


class OrderPage(BaseModel):
    """Orders ascending by id; ask again with `after_order_id=next` until `next` is null."""

    orders: list[OrderSummary]
    next: int | None


@router.post("/orders", status_code=201)
async def create_order(
    body: NewOrderRequest,
    request: Request,
    response: Response,
    _documented: Annotated[
        str | None,
        Header(
            alias=HEADER,
            description="up to 255 characters, bare or in quotes, unique for this customer: the same request with the "
            "same key makes no second order and gets the first one's answer",
        ),
    ] = None,
) -> OrderSummary:
    """Confirm an order. It is stored together with its event: the charge follows, whatever crashes from now on."""
    checkout: Checkout = request.app.state.checkout
    key = parse_key(request.headers.getlist(HEADER))
    if key is None and request.app.state.require_idempotency_key:
        raise missing_key()
    given = None if key is None else IdempotencyKey(key, fingerprint(body.model_dump_json()))
    confirmed = await checkout.confirm(body.to_order(), given)
    response.headers["Location"] = f"/orders/{confirmed.order.order_id}"
    if confirmed.replayed:
        response.headers[REPLAYED_HEADER] = "true"
    return OrderSummary.of(confirmed.order)


@router.get("/orders/{order_id}")
async def read_order(order_id: OrderId, request: Request) -> OrderView:
    """Return an order, where its payment stands, and when its events left the outbox."""
    database: Database = request.app.state.database
    async with database.session() as session:
        order = await repository.find_order(session, order_id)
        if order is None:
            raise NotFound(f"there is no order {order_id}")
        items = await repository.find_items(session, order_id)
        publication = await repository.find_publication(session, order.confirmed_event_id)
    confirmed = EventView(
        event_id=publication.event_id,
        event_type="order.confirmed.v1",
        occurred_at=order.confirmed_at,
        published=publication.published,
        published_at=publication.published_at,
    )
    return OrderView(
        **OrderSummary.of(order).model_dump(),
        customer_id=order.customer_id,
        items=[
            ItemView(sku=i.sku, quantity=i.quantity, unit_price=format_stored_amount(i.unit_price, order.currency))
            for i in items
        ],
        events=[confirmed],
    )


@router.get("/orders")
async def list_orders(
    request: Request,
    after_order_id: Annotated[int, Query(ge=0, le=_MAX_BIGINT)] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> OrderPage:
    """Return a page of orders, ascending by id."""
    database: Database = request.app.state.database
    async with database.session() as session:
        found = await repository.page_of_orders(session, after_order_id, limit)
    return OrderPage(
        orders=[OrderSummary.of(order) for order in found],
        next=found[-1].order_id if len(found) == limit else None,
    )


@router.get("/inbox", tags=["inbox"])
async def read_inbox(request: Request) -> InboxSummary:
    """Return what the service's inbox absorbed: events handled, duplicates, open dead letters by reason."""
    database: Database = request.app.state.database
    async with database.session() as session:
        return await inbox_summary(session, request.app.state.consumer_group)
