"""Routes of the billing API: charges as the audit and a person read them. Money is a decimal string."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Self
from uuid import UUID

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel

from billing_service import repository
from billing_service.charge import Charge, ChargeState
from shared.database import Database
from shared.errors import NotFound
from shared.inbox.summary import InboxSummary, inbox_summary
from shared.money import format_stored_amount

router = APIRouter(tags=["charges"])

_MAX_BIGINT = 2**63 - 1


class ChargeView(BaseModel):
    """A charge. Event id, amount and currency are null in the placeholder of an order that was cancelled first."""

    charge_id: UUID
    order_id: int
    event_id: UUID | None
    amount: str | None
    currency: str | None
    state: ChargeState
    requested_at: datetime
    first_attempt_at: datetime | None
    next_attempt_at: datetime | None
    attempts: int
    provider_reference: str | None
    decline_reason: str | None
    review_reason: str | None
    settled_at: datetime | None

    @classmethod
    def of(cls, charge: Charge) -> Self:
        return cls(
            charge_id=charge.charge_id,
            order_id=charge.order_id,
            event_id=charge.event_id,
            amount=_amount(charge),
            currency=charge.currency,
            state=charge.state,
            requested_at=charge.requested_at,
            first_attempt_at=charge.first_attempt_at,
            next_attempt_at=charge.next_attempt_at if charge.state is ChargeState.REQUESTED else None,
            attempts=charge.attempt,
            provider_reference=charge.provider_reference,
            decline_reason=charge.decline_reason,
            review_reason=charge.review_reason,
            settled_at=charge.settled_at,
        )


def _amount(charge: Charge) -> str | None:
    if charge.amount is None or charge.currency is None:
        return None
    return format_stored_amount(charge.amount, charge.currency)


class ChargePage(BaseModel):
    """Charges ascending by order id; ask again with `after_order_id=next` until `next` is null."""

    charges: list[ChargeView]
    next: int | None


@router.get("/charges")
async def list_charges(
    request: Request,
    order_id: Annotated[int | None, Query(ge=1, le=_MAX_BIGINT, description="the charge of this order only")] = None,
    after_order_id: Annotated[int, Query(ge=0, le=_MAX_BIGINT)] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    state: ChargeState | None = None,
) -> ChargePage:
    """Return a page of charges, ascending by order id; of one order or one state if asked for."""
    database: Database = request.app.state.database
    async with database.session() as session:
        if order_id is not None:
            one = await repository.find_charge_of_order(session, order_id)
            matches = one is not None and state in (None, one.state)
            return ChargePage(charges=[ChargeView.of(one)] if one is not None and matches else [], next=None)
        found = await repository.page_of_charges(session, after_order_id, limit, state)
    return ChargePage(
        charges=[ChargeView.of(charge) for charge in found],
        next=found[-1].order_id if len(found) == limit else None,
    )


@router.get("/charges/{charge_id}")
async def read_charge(charge_id: UUID, request: Request) -> ChargeView:
    """Return a charge and where it stands."""
    database: Database = request.app.state.database
    async with database.session() as session:
        charge = await repository.find_charge(session, charge_id)
    if charge is None:
        raise NotFound(f"there is no charge {charge_id}")
    return ChargeView.of(charge)


@router.get("/inbox", tags=["inbox"])
async def read_inbox(request: Request) -> InboxSummary:
    """Return what the service's inbox absorbed: events handled, duplicates, open dead letters by reason."""
    database: Database = request.app.state.database
    async with database.session() as session:
        return await inbox_summary(session, request.app.state.consumer_group)
