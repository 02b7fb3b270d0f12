"""The use case: confirm an order and publish that it was confirmed, in one transaction."""

from __future__ import annotations

from order_service import repository
from order_service.events import OrderConfirmedEvent
from order_service.order import NewOrder, Order
from shared import failpoints
from shared.identifiers import new_event_id
from shared.outbox.admission import Admission
from shared.unit_of_work import UnitsOfWork


class Checkout:
    """Confirms orders."""

    def __init__(self, units: UnitsOfWork, admission: Admission) -> None:
        self._units = units
        self._admission = admission

    async def confirm(self, new: NewOrder) -> Order:
        """Store the order and its `order.confirmed.v1` event: both or neither. Returns the committed order.

        Raises Unavailable while too many events wait to be published, if a limit is set.
        """
        self._admission.check()
        async with self._units.begin() as work:
            order = await repository.insert_order(work.session, new, new_event_id())
            failpoints.hit("O1")
            work.publish(OrderConfirmedEvent.from_order(order).to_outgoing())
        failpoints.hit("O3")
        return order
