"""What an audit found: counts, sums, order ids, and what it comes to in words."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Any

from chargeonce.judgement import MEANINGS, MONEY_MOVED, Age, Case, Kind, Verdict, Waiting
from chargeonce.ledgers import ChargeEntry, Inbox, OrderEntry

# Not a contradiction between ledgers, but work that is not done.
_NO_DISAGREEMENT = frozenset({Kind.OVERDUE, Kind.NEEDS_REVIEW})


@dataclass(slots=True)
class Sums:
    """Money of one currency: of the orders that were judged, and apart from it of those that are not charged yet.

    `pending` is that of all that are on their way, `late` the part of it that should have arrived, `overdue` that of
    the orders that are not on their way but overdue.
    """

    orders: Decimal = Decimal(0)
    charges_captured: Decimal = Decimal(0)
    provider_captured: Decimal = Decimal(0)
    declined: Decimal = Decimal(0)
    pending: Decimal = Decimal(0)
    late: Decimal = Decimal(0)
    overdue: Decimal = Decimal(0)


@dataclass(slots=True)
class AuditResult:
    """What the audit found. Orders that wait for their charge count in `orders_confirmed` and `waiting` only."""

    cut: datetime
    settled: bool
    finding_limit: int
    overdue_before: datetime | None = None
    orders_confirmed: int = 0
    charges_captured: int = 0
    charges_declined: int = 0
    payments_captured: int = 0
    results_pending: int = 0
    read_again: int = 0
    seconds: float = 0.0
    counts: Counter[Kind] = field(default_factory=Counter)
    findings: dict[Kind, list[int]] = field(default_factory=lambda: defaultdict(list))
    waiting: Counter[Waiting] = field(default_factory=Counter)
    waiting_orders: dict[Waiting, list[int]] = field(default_factory=lambda: defaultdict(list))
    sums: dict[str, Sums] = field(default_factory=lambda: defaultdict(Sums))
    inboxes: dict[str, Inbox] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        """Whether every judged order was charged once, in the right amount, or declined, and none is overdue."""
        return not self.counts

    @property
    def pending(self) -> int:
        """Orders on their way: not charged yet and not overdue. Those that are late are among them."""
        return self.pending_young + self.late

    @property
    def pending_young(self) -> int:
        """Orders on their way that were confirmed after the cut."""
        return self._waiting(Age.PENDING)

    @property
    def late(self) -> int:
        """Orders on their way that were confirmed before the cut."""
        return self._waiting(Age.LATE)

    def _waiting(self, age: Age) -> int:
        return sum(count for waiting, count in self.waiting.items() if waiting.age is age)

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
        for kind in verdict.wrong:
            self.counts[kind] += 1
            if len(self.findings[kind]) < self.finding_limit:
                self.findings[kind].append(case.order_id)
        if order is not None and verdict.waiting is not None:
            self._add_waiting(order, verdict.waiting)
            return
        if order is not None:
            self.sums[order.currency].orders += order.total_amount
            self.results_pending += order.payment_status == "pending"
        for charge in case.charges:
            self._add_charge(charge)
        for payment in case.captured:
            self.payments_captured += 1
            self.sums[payment.currency].provider_captured += payment.amount

    def _add_waiting(self, order: OrderEntry, waiting: Waiting) -> None:
        self.waiting[waiting] += 1
        sums = self.sums[order.currency]
        if waiting.age is Age.OVERDUE:
            sums.overdue += order.total_amount
        else:
            sums.pending += order.total_amount
            sums.late += order.total_amount if waiting.age is Age.LATE else 0
        if waiting.age is not Age.PENDING and len(self.waiting_orders[waiting]) < self.finding_limit:
            self.waiting_orders[waiting].append(order.order_id)

    def _add_charge(self, charge: ChargeEntry) -> None:
        if charge.amount is None or charge.currency is None:
            return
        if charge.state in MONEY_MOVED:
            self.charges_captured += 1
            self.sums[charge.currency].charges_captured += charge.amount
        elif charge.state == "declined":
            self.charges_declined += 1
            self.sums[charge.currency].declined += charge.amount

    def verdict(self) -> str:
        """What it comes to, in a few sentences for a person. Never says of all orders what is true of some."""
        wrong = Counter({kind: count for kind, count in self.counts.items() if kind not in _NO_DISAGREEMENT})
        if wrong:
            found = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in wrong.most_common())
            sentences = [f"The ledgers disagree: {found}."]
        else:
            sentences = [self._charged()]
        if overdue := self.counts[Kind.OVERDUE]:
            since = f", confirmed before {self.overdue_before:%Y-%m-%d %H:%M:%S %Z}" if self.overdue_before else ""
            money = _money({currency: sums.overdue for currency, sums in self.sums.items()})
            sentences.append(f"{_orders(overdue)} overdue{money}{since}: {self._where(Age.OVERDUE)}.")
        if reviews := self.counts[Kind.NEEDS_REVIEW]:
            sentences.append(
                f"{_orders(reviews)} waiting for a person, for nobody knows whether the money moved: "
                "`billing-service reviews` lists them."
            )
        if self.late:
            money = _money({currency: sums.late for currency, sums in self.sums.items()})
            sentences.append(f"{_orders(self.late)} late{money}: {self._where(Age.LATE)}.")
        if self.pending_young:
            sentences.append(f"{_orders(self.pending_young)} on the way, too young to be judged.")
        return " ".join(sentences)

    def _charged(self) -> str:
        """How many were charged. No ledger disagrees, so that a captured charge is an order that was charged once."""
        total, charged, declined = self.orders_confirmed, self.charges_captured, self.charges_declined
        if not total:
            return "No order was there to be charged."
        if charged == total:
            return f"All {total} orders were charged exactly once."
        without_money = f"; {declined} {_was(declined)} declined, so no money moved" if declined else ""
        cancelled = total - charged - declined - self.waiting.total() - self.counts[Kind.NEEDS_REVIEW]
        without_money += f"; {cancelled} {_was(cancelled)} cancelled, so no money moved" if cancelled > 0 else ""
        return f"{charged} of {total} orders {_was(charged)} charged exactly once{without_money}."

    def _where(self, age: Age) -> str:
        """What waiting at each place means for the money, and where to look."""
        found = sorted((waiting.place, count) for waiting, count in self.waiting.items() if waiting.age is age)
        return "; ".join(f"{count} {MEANINGS[place]}" for place, count in found)

    def as_json(self) -> dict[str, Any]:
        """The result for machines; money as decimal strings."""
        return {
            "clean": self.clean,
            "verdict": self.verdict(),
            "cut": self.cut.isoformat(),
            "overdue_before": self.overdue_before.isoformat() if self.overdue_before else None,
            "settled": self.settled,
            "orders_confirmed": self.orders_confirmed,
            "orders_pending": self.pending,
            "orders_late": self.late,
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
                    "late": format(sums.late, "f"),
                    "overdue": format(sums.overdue, "f"),
                }
                for currency, sums in sorted(self.sums.items())
            },
            "findings": {str(kind): {"order_ids": ids} for kind, ids in sorted(self.findings.items())},
            "waiting": {str(age): self._places(age) for age in (Age.LATE, Age.OVERDUE)},
            "read_again": self.read_again,
            "seconds": round(self.seconds, 3),
        }

    def _places(self, age: Age) -> dict[str, Any]:
        """How many orders of an age wait where, and the first ones' ids."""
        return {
            str(waiting.place): {"orders": count, "order_ids": self.waiting_orders[waiting]}
            for waiting, count in sorted(self.waiting.items())
            if waiting.age is age
        }


def _orders(count: int) -> str:
    return f"{count} order{' is' if count == 1 else 's are'}"


def _money(sums: Mapping[str, Decimal]) -> str:
    found = ", ".join(f"{format(amount, 'f')} {currency}" for currency, amount in sorted(sums.items()) if amount)
    return f" ({found})" if found else ""


def _was(count: int) -> str:
    return "was" if count == 1 else "were"
