"""Charges that wait for a person: what the provider's ledger has for each, and the decision about it.

Nothing automatic leaves `needs_review`. A decision is checked against the provider's own ledger at that moment, and is
one transaction with the payment event that the order waits for. It never moves money.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from billing_service import repository
from billing_service.charge import Charge, ChargeState, Settle
from billing_service.events import PaymentEvent
from billing_service.gateway import HttpPaymentGateway, ProviderPayment
from shared.database import Database
from shared.errors import Conflict, NotFound
from shared.money import format_stored_amount
from shared.unit_of_work import UnitsOfWork

_PAGE = 100
CALL_MAY_LAST = timedelta(minutes=5)
"""For so long after a call was given up a provider may still move the money that it asked for."""

NO_PAYMENT = "none"
"""The reference of a charge that a person closed because the provider has no payment for it."""


@dataclass(frozen=True, slots=True)
class OpenReview:
    """A charge that waits for a person, and the provider's payments for its order."""

    charge: Charge
    payments: Sequence[ProviderPayment]

    def describe(self) -> str:
        """Return one line: order, reason, what happened to the money, and which decision fits."""
        charge = self.charge
        amount = "" if charge.amount is None else format_stored_amount(charge.amount, charge.currency or "")
        known = f"order {charge.order_id} charge {charge.charge_id} {amount} {charge.currency}"
        told = "; ".join(
            f"{payment.status} {payment.amount} {payment.currency} as {payment.payment_id}"
            f" ({'our key' if self.is_ours(payment) else 'another key'})"
            for payment in self.payments
        )
        return f"{known}: {charge.review_reason}; the provider has {told or 'no payment'}"

    def is_ours(self, payment: ProviderPayment) -> bool:
        """Tell whether a payment was made with this charge's key."""
        return payment.idempotency_key == str(self.charge.event_id)

    def settlement(self, payment_id: str | None = None) -> Settle:
        """Return the result that the provider's ledger has: of our key, or the payment that is named.

        Raises Conflict when there is none, or it is not the payment that the order asked for.
        """
        order = self.charge.order_id
        chosen = [p for p in self.payments if (self.is_ours(p) if payment_id is None else p.payment_id == payment_id)]
        if not chosen:
            others = f"; it has {len(self.payments)} of other keys: name one with --payment" if self.payments else ""
            raise Conflict(
                f"the provider has no such payment for order {order}{others}. Nothing was changed. If nobody was "
                "charged: `billing-service reviews cancel`"
            )
        [payment] = chosen
        if (payment.amount, payment.currency) != (self.charge.amount, self.charge.currency):
            raise Conflict(
                f"payment {payment.payment_id} is of {payment.amount} {payment.currency}, and order {order} asked for "
                f"another amount. Nothing was changed: have the provider refund the difference, or the payment"
            )
        if payment.status == "captured":
            return Settle(ChargeState.CAPTURED, payment.payment_id)
        return Settle(ChargeState.DECLINED, payment.payment_id, payment.decline_reason or "unspecified")

    def cancellation(self, because: str) -> Settle:
        """Return the end of a charge that moved no money.

        Raises Conflict while the provider has a payment for it, or may still be working on the last call.
        """
        called_until = self.charge.next_attempt_at or self.charge.requested_at
        if self.charge.first_attempt_at is not None and datetime.now(UTC) < called_until + CALL_MAY_LAST:
            raise Conflict(
                f"the last call for order {self.charge.order_id} may still be at the provider. Nothing was changed: "
                f"try again after {called_until + CALL_MAY_LAST:%Y-%m-%d %H:%M:%S}Z"
            )
        if self.payments:
            raise Conflict(
                f"the provider has {len(self.payments)} payments for order {self.charge.order_id}, so it cannot be "
                "closed as not charged. Nothing was changed: `billing-service reviews settle`, or have them refunded"
            )
        return Settle(ChargeState.DECLINED, NO_PAYMENT, f"closed by a person: {because}"[:200])


async def open_reviews(database: Database, gateway: HttpPaymentGateway) -> AsyncIterator[OpenReview]:
    """Yield every charge that waits for a person, by order id. Raises Unavailable when the provider does not tell."""
    after = 0
    while True:
        async with database.session() as session:
            page = await repository.page_of_charges(session, after, _PAGE, ChargeState.NEEDS_REVIEW)
        for charge in page:
            yield OpenReview(charge, await gateway.payments_of(charge.order_id))
        if len(page) < _PAGE:
            return
        after = page[-1].order_id


async def find_review(database: Database, gateway: HttpPaymentGateway, order_id: int) -> OpenReview:
    """Return the charge of an order that waits for a person. Raises NotFound, Conflict or Unavailable."""
    async with database.session() as session:
        charge = await repository.find_charge_of_order(session, order_id)
    if charge is None:
        raise NotFound(f"order {order_id} has no charge")
    if charge.state is not ChargeState.NEEDS_REVIEW:
        raise Conflict(f"the charge of order {order_id} is {charge.state} and waits for nobody; nothing was changed")
    return OpenReview(charge, await gateway.payments_of(order_id))


async def decide(units: UnitsOfWork, review: OpenReview, step: Settle, by: str, because: str) -> None:
    """Record a decision with its payment event, in one transaction. Raises Conflict when somebody was faster."""
    async with units.begin() as work:
        settled = await repository.decide_review(work.session, review.charge.charge_id, step, by, because)
        if settled is None:
            raise Conflict(f"the charge of order {review.charge.order_id} waits no longer; nothing was changed")
        work.publish(PaymentEvent.from_charge(settled).to_outgoing())
