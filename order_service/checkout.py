"""The use case: confirm an order and publish that it was confirmed, in one transaction."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sqlalchemy.ext.asyncio import AsyncSession

from order_service import repository
from order_service.events import OrderConfirmedEvent
from order_service.order import NewOrder, Order, PaymentStatus
from shared import failpoints
from shared.errors import FieldError, InProgress, KeyReused
from shared.idempotency import HEADER, IdempotencyKey
from shared.identifiers import new_event_id
from shared.outbox.admission import Admission
from shared.unit_of_work import UnitsOfWork


@dataclass(frozen=True, slots=True)
class Confirmed:
    """An order as it was when it was confirmed; `replayed` when that was by an earlier request with the same key."""

    order: Order
    replayed: bool = False


class Checkout:
    """Confirms orders."""

    def __init__(self, units: UnitsOfWork, admission: Admission) -> None:
        self._units = units
        self._admission = admission

    async def confirm(self, new: NewOrder, key: IdempotencyKey | None = None) -> Confirmed:
        """Store the order, its `order.confirmed.v1` event and the client's key: all or nothing.

        The same request with the same key of the same customer returns the order of the first (field report F43).
        Raises KeyReused when the key stands for another request, InProgress while the first one runs, and Unavailable
        while too many events wait to be published, if a limit is set.
        """
        if key is None:
            self._admission.check()
        async with self._units.begin() as work:
            if key is not None:
                first = await self._first(work.session, new.customer_id, key)
                if first is not None:
                    return Confirmed(replace(first, payment_status=PaymentStatus.PENDING), replayed=True)
                self._admission.check()
            order = await repository.insert_order(work.session, new, new_event_id())
            if key is not None:
                await repository.insert_key(work.session, order, key)
            failpoints.hit("O1")
            work.publish(OrderConfirmedEvent.from_order(order).to_outgoing())
        failpoints.hit("O3")
        return Confirmed(order)

    async def _first(self, session: AsyncSession, customer_id: int, key: IdempotencyKey) -> Order | None:
        """Return the order that a key made, or None when it is new and ours for this transaction."""
        if not await repository.lock_key(session, customer_id, key.key):
            raise InProgress(f"a request with this {HEADER} is being worked on; its answer will be there soon")
        known = await repository.find_by_key(session, customer_id, key.key)
        if known is None:
            return None
        if known.fingerprint != key.fingerprint:
            message = f"this {HEADER} was used for another request; send a new key for a new order"
            raise KeyReused(f"{message}. Nothing was stored", [FieldError(HEADER, message)])
        return known.order
