"""The audit: every confirmed order has exactly one payment, proved from three ledgers that do not share a database.

Orders, charges and the provider's payments are merged by order id in constant memory. On a running system the three are
never read at the same instant, so nothing is called wrong that was read once: a suspect is read again by id until two
readings agree. What is still on its way is pending, not wrong.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from chargeonce.ledgers import ChargeEntry, Inbox, Ledgers, OrderEntry, PaymentEntry

# States of a charge whose money moved at the provider, and those that may still get there.
_MONEY_MOVED = frozenset({"captured", "refund_requested", "refunded"})
_RETURNED_STATUS = {"captured": "charged", "declined": "declined"}


class Kind(enum.StrEnum):
    """What can be wrong with an order."""

    MISSING_CHARGE = "missing_charges"
    CHARGE_WITHOUT_ORDER = "charges_without_order"
    CHARGE_WITHOUT_PAYMENT = "charges_without_payment"
    PAYMENT_WITHOUT_CHARGE = "payments_without_charge"
    DOUBLE_CHARGE = "double_charges"
    AMOUNT_DIFFERENCE = "amount_differences"
    EVENT_DIFFERENCE = "event_differences"
    STATUS_DIFFERENCE = "status_differences"
    NEEDS_REVIEW = "needs_review"


EXPLANATIONS = {
    Kind.MISSING_CHARGE: "a confirmed order was not charged",
    Kind.CHARGE_WITHOUT_ORDER: "a charge for an order that does not exist",
    Kind.CHARGE_WITHOUT_PAYMENT: "billing says captured and the provider has no such payment",
    Kind.PAYMENT_WITHOUT_CHARGE: "the provider moved money that billing does not account for",
    Kind.DOUBLE_CHARGE: "more than one payment, or more than one charge, for one order",
    Kind.AMOUNT_DIFFERENCE: "order, charge and payment differ in amount or currency",
    Kind.EVENT_DIFFERENCE: "charge or payment do not carry the event id of the order",
    Kind.STATUS_DIFFERENCE: "the order's payment status contradicts its charge",
    Kind.NEEDS_REVIEW: "billing does not know whether the money moved; a person must decide",
}


@dataclass(frozen=True, slots=True)
class Case:
    """Everything that the three ledgers have about one order id."""

    order_id: int
    order: OrderEntry | None
    charges: tuple[ChargeEntry, ...]
    payments: tuple[PaymentEntry, ...]

    @property
    def captured(self) -> tuple[PaymentEntry, ...]:
        """The payments whose money moved."""
        return tuple(payment for payment in self.payments if payment.status == "captured")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is wrong with a case, and whether it is only on its way."""

    wrong: frozenset[Kind] = frozenset()
    pending: bool = False


@dataclass(frozen=True, slots=True)
class Rules:
    """When an order is old enough to be judged: confirmed and published before `cut`; at once when `settled`.

    `settled` is for a system in which nothing is on its way any more: what is pending is then missing.
    """

    cut: datetime
    settled: bool = False


def judge(case: Case, rules: Rules) -> Verdict:
    """Compare the three ledgers' entries of one order. Pure; says wrong for what may only have been read too early."""
    wrong = set(_differences(case))
    if case.order is None:
        wrong |= {Kind.CHARGE_WITHOUT_ORDER} if case.charges else set()
        wrong |= {Kind.PAYMENT_WITHOUT_CHARGE} if case.captured and not case.charges else set()
        return Verdict(frozenset(wrong))
    if len(case.charges) > 1 or len(case.captured) > 1:
        wrong.add(Kind.DOUBLE_CHARGE)
    pending = False
    if not case.charges:
        wrong |= {Kind.PAYMENT_WITHOUT_CHARGE} if case.captured else set()
        pending = _is_on_its_way(case.order, rules)
        wrong |= set() if pending else {Kind.MISSING_CHARGE}
    for charge in case.charges:
        if charge.state == "requested":
            pending = not rules.settled
            wrong |= {Kind.MISSING_CHARGE} if rules.settled else set()
        elif charge.state == "needs_review":
            wrong.add(Kind.NEEDS_REVIEW)
        elif charge.state in _MONEY_MOVED:
            wrong |= set() if case.captured else {Kind.CHARGE_WITHOUT_PAYMENT}
        elif case.captured:
            wrong.add(Kind.PAYMENT_WITHOUT_CHARGE)
    return Verdict(frozenset(wrong), pending and not wrong)


def _is_on_its_way(order: OrderEntry, rules: Rules) -> bool:
    """Whether an order without charge is young, or its event has left the outbox late or not at all."""
    if rules.settled:
        return False
    left = [event.published_at for event in order.events if event.published and event.published_at is not None]
    waits = any(not event.published for event in order.events)
    return waits or max([order.confirmed_at, *left]) >= rules.cut


def _differences(case: Case) -> Iterable[Kind]:
    order = case.order
    for charge in case.charges:
        if charge.amount is None:
            continue
        if order is not None:
            if (charge.amount, charge.currency) != (order.total_amount, order.currency):
                yield Kind.AMOUNT_DIFFERENCE
            if charge.event_id != order.event_id:
                yield Kind.EVENT_DIFFERENCE
            if order.payment_status not in ("pending", _RETURNED_STATUS.get(charge.state, order.payment_status)):
                yield Kind.STATUS_DIFFERENCE
        for payment in case.captured:
            if (payment.amount, payment.currency) != (charge.amount, charge.currency):
                yield Kind.AMOUNT_DIFFERENCE
            if charge.state in _MONEY_MOVED and payment.payment_id != charge.provider_reference:
                yield Kind.EVENT_DIFFERENCE
            if payment.idempotency_key != str(charge.event_id):
                yield Kind.EVENT_DIFFERENCE


@dataclass(slots=True)
class Sums:
    """Money of one currency over the orders that were judged; `pending` is that of the others."""

    orders: Decimal = Decimal(0)
    charges_captured: Decimal = Decimal(0)
    provider_captured: Decimal = Decimal(0)
    declined: Decimal = Decimal(0)
    pending: Decimal = Decimal(0)


@dataclass(slots=True)
class AuditResult:
    """What the audit found. Counts and sums leave out pending orders, except for `orders_confirmed`."""

    cut: datetime
    settled: bool
    finding_limit: int
    orders_confirmed: int = 0
    pending: int = 0
    charges_captured: int = 0
    charges_declined: int = 0
    payments_captured: int = 0
    results_pending: int = 0
    read_again: int = 0
    seconds: float = 0.0
    counts: Counter[Kind] = field(default_factory=Counter)
    findings: dict[Kind, list[int]] = field(default_factory=lambda: defaultdict(list))
    sums: dict[str, Sums] = field(default_factory=lambda: defaultdict(Sums))
    inboxes: dict[str, Inbox] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        """Whether every judged order was charged once, in the right amount, or declined."""
        return not self.counts

    @property
    def duplicates_absorbed(self) -> int:
        """Records that came again and had no effect, in both services."""
        return sum(inbox.duplicates_absorbed for inbox in self.inboxes.values())

    @property
    def dead_letters(self) -> Counter[str]:
        """Open dead letters of both services by reason."""
        return sum((Counter(inbox.dead_letters_open) for inbox in self.inboxes.values()), Counter[str]())

    def add(self, case: Case, verdict: Verdict) -> None:
        """Account for one order whose verdict stands."""
        order = case.order
        self.orders_confirmed += order is not None
        if verdict.pending and order is not None:
            self.pending += 1
            self.sums[order.currency].pending += order.total_amount
            return
        for kind in verdict.wrong:
            self.counts[kind] += 1
            if len(self.findings[kind]) < self.finding_limit:
                self.findings[kind].append(case.order_id)
        if order is not None:
            self.sums[order.currency].orders += order.total_amount
            self.results_pending += order.payment_status == "pending"
        for charge in case.charges:
            self._add_charge(charge)
        for payment in case.captured:
            self.payments_captured += 1
            self.sums[payment.currency].provider_captured += payment.amount

    def _add_charge(self, charge: ChargeEntry) -> None:
        if charge.amount is None or charge.currency is None:
            return
        if charge.state in _MONEY_MOVED:
            self.charges_captured += 1
            self.sums[charge.currency].charges_captured += charge.amount
        elif charge.state == "declined":
            self.charges_declined += 1
            self.sums[charge.currency].declined += charge.amount

    def verdict(self) -> str:
        """One sentence for a person."""
        judged = self.orders_confirmed - self.pending
        waiting = f" {self.pending} more are on their way." if self.pending else ""
        if self.clean:
            declined = f" ({self.charges_declined} were declined, so no money moved)" if self.charges_declined else ""
            every = (
                "No order was there to be charged" if not judged else f"All {judged} orders were charged exactly once"
            )
            return f"{every}{declined}.{waiting}"
        found = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in self.counts.most_common())
        return f"The ledgers disagree: {found}.{waiting}"

    def as_json(self) -> dict[str, Any]:
        """The result for machines; money as decimal strings."""
        return {
            "clean": self.clean,
            "verdict": self.verdict(),
            "cut": self.cut.isoformat(),
            "settled": self.settled,
            "orders_confirmed": self.orders_confirmed,
            "orders_pending": self.pending,
            "results_pending": self.results_pending,
            "charges_captured": self.charges_captured,
            "charges_declined": self.charges_declined,
            "payments_captured": self.payments_captured,
            **{str(kind): self.counts[kind] for kind in Kind},
            "duplicates_absorbed": self.duplicates_absorbed,
            "dead_letters": self.dead_letters.total(),
            "dead_letters_by_reason": dict(sorted(self.dead_letters.items())),
            "totals": {
                currency: {
                    "orders": format(sums.orders, "f"),
                    "charges_captured": format(sums.charges_captured, "f"),
                    "provider_captured": format(sums.provider_captured, "f"),
                    "declined": format(sums.declined, "f"),
                    "pending": format(sums.pending, "f"),
                }
                for currency, sums in sorted(self.sums.items())
            },
            "findings": {str(kind): {"order_ids": ids} for kind, ids in sorted(self.findings.items())},
            "read_again": self.read_again,
            "seconds": round(self.seconds, 3),
        }


class Audit:
    """Reads the ledgers once, and suspects again.

    `recheck_seconds` pass between two readings of a suspect; it is wrong when they agree, and judged by its last
    reading when it still changes after `recheck_tries`. At most `suspects_at_once` suspects are held in memory.
    """

    def __init__(
        self,
        ledgers: Ledgers,
        *,
        recheck_seconds: float = 1.0,
        recheck_tries: int = 10,
        suspects_at_once: int = 1000,
        readers: int = 16,
        finding_limit: int = 20,
    ) -> None:
        self._ledgers = ledgers
        self._recheck_seconds = recheck_seconds
        self._recheck_tries = recheck_tries
        self._suspects_at_once = suspects_at_once
        self._readers = asyncio.Semaphore(readers)
        self._finding_limit = finding_limit

    async def run(
        self, *, before: datetime | None = None, grace_seconds: float = 60.0, settled: bool = False
    ) -> AuditResult:
        """Judge the orders confirmed before a time, by default `grace_seconds` ago on the order service's clock.

        Raises LedgerAwayError when a service does not answer.
        """
        began = time.monotonic()
        cut = before or await self._ledgers.clock() - timedelta(seconds=grace_seconds)
        rules = Rules(cut.astimezone(UTC), settled)
        result = AuditResult(rules.cut, settled, self._finding_limit)
        suspects: list[Case] = []
        async for case in self._cases():
            verdict = judge(case, rules)
            if verdict.wrong:
                suspects.append(case)
            else:
                result.add(case, verdict)
            if len(suspects) >= self._suspects_at_once:
                await self._read_again(suspects, rules, result)
                suspects = []
        await self._read_again(suspects, rules, result)
        result.inboxes = await self._ledgers.inboxes()
        result.seconds = time.monotonic() - began
        return result

    async def _cases(self) -> AsyncIterator[Case]:
        """Merge the three streams by order id."""
        async with AsyncExitStack() as streams:
            orders, charges, payments = self._ledgers.orders(), self._ledgers.charges(), self._ledgers.payments()
            for stream in (orders, charges, payments):
                streams.push_async_callback(stream.close)
            while True:
                heads = [await orders.first_id(), await charges.first_id(), await payments.first_id()]
                ids = [head for head in heads if head is not None]
                if not ids:
                    return
                order_id = min(ids)
                order = await orders.take(order_id)
                yield Case(
                    order_id, order[0] if order else None, await charges.take(order_id), await payments.take(order_id)
                )

    async def _read_again(self, suspects: Sequence[Case], rules: Rules, result: AuditResult) -> None:
        """Account for suspects once they are in order, or once two readings agree that they are not."""
        for tries_left in reversed(range(self._recheck_tries)):
            if not suspects:
                return
            await asyncio.sleep(self._recheck_seconds)
            result.read_again += len(suspects)
            readings = await asyncio.gather(*(self._read(case.order_id) for case in suspects))
            changing: list[Case] = []
            for before, case in zip(suspects, readings, strict=True):
                verdict = judge(case, rules)
                if verdict.wrong and not _agree(before, case) and tries_left:
                    changing.append(case)
                elif case.order or case.charges or case.payments:
                    result.add(case, verdict)
            suspects = changing

    async def _read(self, order_id: int) -> Case:
        """Read one order from its end backwards, so that an entry's cause is read after it."""
        async with self._readers:
            payments = await self._ledgers.payments_of(order_id)
            charges = await self._ledgers.charges_of(order_id)
            return Case(order_id, await self._ledgers.order(order_id), charges, payments)


def _agree(before: Case, after: Case) -> bool:
    """Whether two readings say the same of the money; only a reading by id knows of events."""
    orders = [case.order.model_copy(update={"events": ()}) if case.order else None for case in (before, after)]
    return orders[0] == orders[1] and before.charges == after.charges and before.payments == after.payments
