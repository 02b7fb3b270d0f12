"""What a person needs to decide about a charge: the charge, and what the provider's ledger has for its order."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from billing_service import repository
from billing_service.charge import Charge, ChargeState
from billing_service.gateway import HttpPaymentGateway, ProviderPayment
from shared.database import Database
from shared.money import format_stored_amount

_PAGE = 100


@dataclass(frozen=True, slots=True)
class OpenReview:
    """A charge that waits for a person, and the provider's payments for its order."""

    charge: Charge
    payments: Sequence[ProviderPayment]

    def describe(self) -> str:
        """Return one line: order, reason, and what happened to the money."""
        charge = self.charge
        amount = "" if charge.amount is None else format_stored_amount(charge.amount, charge.currency or "")
        known = f"order {charge.order_id} charge {charge.charge_id} {amount} {charge.currency}"
        told = "; ".join(
            f"{payment.status} {payment.amount} {payment.currency} as {payment.payment_id}"
            f" ({'our key' if payment.idempotency_key == str(charge.event_id) else 'another key'})"
            for payment in self.payments
        )
        return f"{known}: {charge.review_reason}; the provider has {told or 'no payment'}"


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
