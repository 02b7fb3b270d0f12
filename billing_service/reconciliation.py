"""Compares our charges with the provider's payments, order by order, and tells what either side lacks.

Both are read in pages ascending by order id, so memory is bounded however long they are. They are read at different
moments, so a difference is looked at again, by order, some times, before it is called one.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import structlog
from sqlalchemy import text

from billing_service import metrics, repository
from billing_service.charge import Charge, ChargeState
from billing_service.gateway import HttpPaymentGateway, ProviderPayment
from shared.database import Database
from shared.lifecycle import READY, Readiness, State
from shared.schedule import PeriodicService

log = structlog.get_logger(__name__)

NAMED_AT_MOST = 1000
_PAGE = 1000
_LOOKS = 3
_PAUSE_SECONDS = 0.5
_PAID = frozenset({ChargeState.CAPTURED, ChargeState.REFUND_REQUESTED, ChargeState.REFUNDED})


class Kind(enum.StrEnum):
    """What differs."""

    DOUBLE_PAYMENT = "double_payment"
    PAYMENT_WITHOUT_CHARGE = "payment_without_charge"
    CHARGE_WITHOUT_PAYMENT = "charge_without_payment"
    AMOUNT_DIFFERS = "amount_differs"
    PAID_NOT_RECORDED = "paid_not_recorded"
    PAID_THOUGH_CLOSED = "paid_though_closed"
    ANOTHER_PAYMENT = "another_payment"


MEANING = {
    Kind.DOUBLE_PAYMENT: "the customer paid more than once: have the provider refund all but the charge's reference",
    Kind.PAYMENT_WITHOUT_CHARGE: "the customer paid for what billing does not know: was billing's database restored, "
    "or does somebody else use this account? Replay the order's events, or refund",
    Kind.CHARGE_WITHOUT_PAYMENT: "the order counts as paid, and no money moved: ask the provider",
    Kind.AMOUNT_DIFFERS: "the customer paid another amount than the order's: correct it at the provider",
    Kind.PAID_NOT_RECORDED: "the money moved and the charge is still open: the executor asks again by itself with the "
    "same key; when it stays, `billing-service reviews`, or look at the executor's readiness",
    Kind.PAID_THOUGH_CLOSED: "the customer paid for an order that counts as not paid: refund, or correct the order",
    Kind.ANOTHER_PAYMENT: "the provider has a payment of this order that is not the charge's own: ask who made it",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """An order whose charge and payments contradict each other."""

    order_id: int
    kind: Kind
    charge_state: str | None
    payment_ids: tuple[str, ...]

    def describe(self) -> str:
        """Return one line, with what it means for money."""
        payments = ", ".join(self.payment_ids) or "none"
        state = self.charge_state or "no charge"
        return f"order {self.order_id} {self.kind}: charge {state}, payments {payments}; {MEANING[self.kind]}"


@dataclass(slots=True)
class Report:
    """What a reconciliation found; of findings the first NAMED_AT_MOST are named, all are counted."""

    charges: int = 0
    payments: int = 0
    counts: Counter[Kind] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)

    def add(self, finding: Finding) -> None:
        """Count a finding."""
        self.counts[finding.kind] += 1
        if len(self.findings) < NAMED_AT_MOST:
            self.findings.append(finding)


def judge(
    order_id: int, charge: Charge | None, payments: Sequence[ProviderPayment], settled_before: datetime
) -> Finding | None:
    """Tell what contradicts between the charge and the payments of one order, or None.

    A charge first sent after `settled_before` may still be waiting for its answer.
    """
    captured = [payment for payment in payments if payment.status == "captured"]
    kind = _kind(charge, captured)
    if (
        kind is Kind.PAID_NOT_RECORDED
        and charge is not None
        and (charge.first_attempt_at or settled_before) > settled_before
    ):
        return None
    if kind is None:
        return None
    state = None if charge is None else str(charge.state)
    return Finding(order_id, kind, state, tuple(payment.payment_id for payment in captured))


def _kind(charge: Charge | None, captured: Sequence[ProviderPayment]) -> Kind | None:
    if len(captured) > 1:
        return Kind.DOUBLE_PAYMENT
    if not captured:
        return Kind.CHARGE_WITHOUT_PAYMENT if charge is not None and charge.state in _PAID else None
    [payment] = captured
    if charge is None:
        return Kind.PAYMENT_WITHOUT_CHARGE
    if payment.idempotency_key != str(charge.event_id) and payment.payment_id != charge.provider_reference:
        return Kind.ANOTHER_PAYMENT
    if (payment.amount, payment.currency) != (charge.amount, charge.currency):
        return Kind.AMOUNT_DIFFERS
    if charge.state in _PAID:
        return None if payment.payment_id == charge.provider_reference else Kind.ANOTHER_PAYMENT
    if charge.state in (ChargeState.REQUESTED, ChargeState.NEEDS_REVIEW):
        return Kind.PAID_NOT_RECORDED
    return Kind.PAID_THOUGH_CLOSED


class Reconciliation:
    """Compares the two ledgers from an order id on."""

    def __init__(
        self,
        database: Database,
        gateway: HttpPaymentGateway,
        *,
        settling_seconds: float = 900.0,
        pause_seconds: float = _PAUSE_SECONDS,
    ) -> None:
        self._database = database
        self._gateway = gateway
        self._settling = timedelta(seconds=settling_seconds)
        self._pause_seconds = pause_seconds

    async def run(self, since: datetime | None = None) -> Report:
        """Compare everything, or the orders since then: also those that billing knows nothing of.

        Raises Unavailable when the provider does not tell, and what the database raises.
        """
        after = 0
        if since is not None:
            async with self._database.session() as session:
                after = await repository.order_before(session, since)
        report = Report()
        suspects: list[int] = []
        async for order_id, charge, payments in self._orders(after):
            report.charges += charge is not None
            report.payments += len(payments)
            if judge(order_id, charge, payments, datetime.now(UTC) - self._settling) is not None:
                suspects.append(order_id)
            if len(suspects) >= _PAGE:
                await self._look_again(suspects, report)
                suspects.clear()
        await self._look_again(suspects, report)
        return report

    async def _look_again(self, suspects: Sequence[int], report: Report) -> None:
        """Keep what is found each time: what was under way when it was read has ended by then."""
        found: dict[int, Finding] = {}
        remaining = list(suspects)
        for look in range(_LOOKS):
            if not remaining:
                return
            if look:
                await asyncio.sleep(self._pause_seconds)
            again = {order_id: await self._look(order_id) for order_id in remaining}
            found = {order_id: finding for order_id, finding in again.items() if finding is not None}
            remaining = list(found)
        for finding in found.values():
            report.add(finding)

    async def _look(self, order_id: int) -> Finding | None:
        payments = await self._gateway.payments_of(order_id)
        async with self._database.session() as session:
            charge = await repository.find_charge_of_order(session, order_id)
        return judge(order_id, charge, payments, datetime.now(UTC) - self._settling)

    async def _orders(self, after: int) -> AsyncIterator[tuple[int, Charge | None, Sequence[ProviderPayment]]]:
        """Yield each order that has a charge or payments, ascending."""
        charges, payments = self._charges(after), self._payments(after)
        charge, payment = await anext(charges, None), await anext(payments, None)
        while charge is not None or payment is not None:
            order_id = min(each.order_id for each in (charge, payment) if each is not None)
            of_order: list[ProviderPayment] = []
            while payment is not None and payment.order_id == order_id:
                of_order.append(payment)
                payment = await anext(payments, None)
            if charge is not None and charge.order_id == order_id:
                yield order_id, charge, of_order
                charge = await anext(charges, None)
            else:
                yield order_id, None, of_order

    async def _charges(self, after: int) -> AsyncIterator[Charge]:
        while True:
            async with self._database.session() as session:
                page = await repository.page_of_charges(session, after, _PAGE)
            for charge in page:
                yield charge
            if len(page) < _PAGE:
                return
            after = page[-1].order_id

    async def _payments(self, after: int) -> AsyncIterator[ProviderPayment]:
        page = await self._gateway.page_of_payments(after)
        while True:
            for payment in page.payments:
                yield payment
            if page.next is None:
                return
            page = await self._gateway.page_of_payments(page.next.after_order_id, page.next.after_payment_id)


class ReconciliationService(PeriodicService):
    """Reconciles the last days on a schedule. Of several processes one does it at a time."""

    name = "reconciliation"

    def __init__(
        self,
        database: Database,
        gateway: HttpPaymentGateway,
        *,
        interval_seconds: float,
        looks_back: timedelta = timedelta(hours=48),
    ) -> None:
        super().__init__(interval_seconds)
        self._database = database
        self._gateway = gateway
        self._looks_back = looks_back

    async def start(self) -> None:
        await self._gateway.open()
        await super().start()

    async def stop(self) -> None:
        await super().stop()
        await self._gateway.close()

    async def do(self) -> None:
        async with self._database.engine.connect() as pooled:
            connection = await pooled.execution_options(isolation_level="AUTOCOMMIT")
            if not (await connection.execute(_TRY_LOCK)).scalar_one():
                self.readiness = READY
                return
            try:
                began = time.monotonic()
                report = await Reconciliation(self._database, self._gateway).run(datetime.now(UTC) - self._looks_back)
            finally:
                await connection.execute(_UNLOCK)
        metrics.RECONCILIATION_SECONDS.set(time.monotonic() - began)
        metrics.RECONCILED_AT.set_to_current_time()
        for kind in Kind:
            metrics.RECONCILIATION_FINDINGS.labels(kind).set(report.counts[kind])
        for finding in report.findings:
            log.error(
                "reconciliation.finding", order_id=finding.order_id, kind=finding.kind, meaning=finding.describe()
            )
        total = report.counts.total()
        self.readiness = READY if not total else Readiness(State.DEGRADED, _degraded(total))
        log.info("reconciliation.done", charges=report.charges, payments=report.payments, findings=total)


def _degraded(total: int) -> str:
    return (
        f"{total} orders whose charge and payments contradict each other: `billing-service reconcile` names them and "
        "says what it means for the money; charging goes on"
    )


_TRY_LOCK = text("SELECT pg_try_advisory_lock(x'5245434F'::integer, 1)")  # "RECO"
_UNLOCK = text("SELECT pg_advisory_unlock(x'5245434F'::integer, 1)")
