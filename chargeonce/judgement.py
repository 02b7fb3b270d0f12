"""What the audit says of one order: in order, wrong, or not charged yet, and then where it waits and since when."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from chargeonce.ledgers import ChargeEntry, OrderEntry, PaymentEntry

# States of a charge whose money moved at the provider.
MONEY_MOVED = frozenset({"captured", "refund_requested", "refunded"})
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
    OVERDUE = "overdue"


EXPLANATIONS = {
    Kind.MISSING_CHARGE: "a confirmed order was not charged, and nothing is on its way that could charge it",
    Kind.CHARGE_WITHOUT_ORDER: "a charge for an order that does not exist",
    Kind.CHARGE_WITHOUT_PAYMENT: "billing says captured and the provider has no such payment",
    Kind.PAYMENT_WITHOUT_CHARGE: "the provider moved money that billing does not account for",
    Kind.DOUBLE_CHARGE: "more than one payment, or more than one charge, for one order",
    Kind.AMOUNT_DIFFERENCE: "order, charge and payment differ in amount or currency",
    Kind.EVENT_DIFFERENCE: "charge or payment do not carry the event id of the order",
    Kind.STATUS_DIFFERENCE: "the order's payment status contradicts its charge",
    Kind.NEEDS_REVIEW: "billing does not know whether the money moved; a person must decide",
    Kind.OVERDUE: "confirmed long ago, and still no charge is settled",
}


class Place(enum.StrEnum):
    """Where an order waits whose charge is not settled."""

    OUTBOX = "outbox"
    INBOX = "inbox"
    CHARGE = "charge"
    RECORD = "record"


MEANINGS = {
    Place.OUTBOX: "not charged yet, the event waits in the outbox (see order-relay's /readyz, Kafka)",
    Place.INBOX: "not charged yet, the event has left the outbox and made no charge (see `order-service outbox parked "
    "list`, billing-consumer's /readyz, billing's dead letters)",
    Place.CHARGE: "not charged yet, the charge waits in billing (see billing-executor's /readyz, the provider)",
    Place.RECORD: "charged at the provider, which billing has not recorded (see billing-executor's /readyz)",
}


class Age(enum.StrEnum):
    """How long an order has waited: newer than the cut, older, or older than anything should take."""

    PENDING = "pending"
    LATE = "late"
    OVERDUE = "overdue"


@dataclass(frozen=True, slots=True, order=True)
class Waiting:
    """That an order waits, where, and for how long. Only a reading by id tells of the event, so of the outbox."""

    place: Place
    age: Age


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
    """What is wrong with a case, and whether its charge is still to come."""

    wrong: frozenset[Kind] = frozenset()
    waiting: Waiting | None = None

    @property
    def is_certain(self) -> bool:
        """Whether one reading is enough: nothing is wrong, and what is late waits where a reading by id would say."""
        late = self.waiting is not None and self.waiting.age is not Age.PENDING
        return not self.wrong and (not late or self.waiting == Waiting(Place.CHARGE, Age.LATE))


@dataclass(frozen=True, slots=True)
class Rules:
    """When an uncharged order is late: confirmed before `cut`; and overdue: before `overdue_before`, too.

    `settled` is for a system in which nothing is on its way any more: what would be waiting is then missing. Nothing
    else makes an order missing, for billing cannot tell that an event will never come.
    """

    cut: datetime
    overdue_before: datetime
    settled: bool = False

    def age(self, confirmed_at: datetime) -> Age:
        """How long an order has waited that was confirmed then."""
        if confirmed_at >= self.cut:
            return Age.PENDING
        return Age.OVERDUE if confirmed_at < self.overdue_before else Age.LATE


def judge(case: Case, rules: Rules) -> Verdict:
    """Compare the three ledgers' entries of one order. Pure; says wrong for what may only have been read too early."""
    wrong = set(_differences(case))
    if case.order is None:
        wrong |= {Kind.CHARGE_WITHOUT_ORDER} if case.charges else set()
        wrong |= {Kind.PAYMENT_WITHOUT_CHARGE} if case.captured and not case.charges else set()
        return Verdict(frozenset(wrong))
    if len(case.charges) > 1 or len(case.captured) > 1:
        wrong.add(Kind.DOUBLE_CHARGE)
    if case.captured and not case.charges:
        wrong.add(Kind.PAYMENT_WITHOUT_CHARGE)
    for charge in case.charges:
        if charge.state == "needs_review":
            wrong.add(Kind.NEEDS_REVIEW)
        elif charge.state in MONEY_MOVED:
            wrong |= set() if case.captured else {Kind.CHARGE_WITHOUT_PAYMENT}
        elif charge.state != "requested" and case.captured:
            wrong.add(Kind.PAYMENT_WITHOUT_CHARGE)
    place = _place(case, case.order)
    if place is None:
        return Verdict(frozenset(wrong))
    if rules.settled:
        return Verdict(frozenset(wrong | {Kind.MISSING_CHARGE}))
    if wrong:  # ledgers that contradict each other say more than that one of them waits
        return Verdict(frozenset(wrong))
    waiting = Waiting(place, rules.age(case.order.confirmed_at))
    return Verdict(frozenset({Kind.OVERDUE} if waiting.age is Age.OVERDUE else ()), waiting)


def _place(case: Case, order: OrderEntry) -> Place | None:
    """Where an order waits; None when its charge is settled or in a person's hands."""
    if not case.charges:
        return Place.OUTBOX if any(not event.published for event in order.events) else Place.INBOX
    if any(charge.state == "requested" for charge in case.charges):
        return Place.RECORD if case.captured else Place.CHARGE
    return None


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
            if charge.state in MONEY_MOVED and payment.payment_id != charge.provider_reference:
                yield Kind.EVENT_DIFFERENCE
            if payment.idempotency_key != str(charge.event_id):
                yield Kind.EVENT_DIFFERENCE
