"""The charge: its states, what may follow what, and what each answer of the provider means. No frameworks here."""

from __future__ import annotations

import enum
import json
import random
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import assert_never
from uuid import UUID

from shared.money import format_stored_amount


class ChargeState(enum.StrEnum):
    """Where a charge stands."""

    REQUESTED = "requested"
    CAPTURED = "captured"
    DECLINED = "declined"
    NEEDS_REVIEW = "needs_review"
    CANCELLED = "cancelled"
    REFUND_REQUESTED = "refund_requested"
    REFUNDED = "refunded"


TRANSITIONS: dict[ChargeState, frozenset[ChargeState]] = {
    ChargeState.REQUESTED: frozenset(
        {ChargeState.CAPTURED, ChargeState.DECLINED, ChargeState.NEEDS_REVIEW, ChargeState.CANCELLED}
    ),
    # A person looks at the provider's ledger and says which it was; nothing automatic leaves this state.
    ChargeState.NEEDS_REVIEW: frozenset({ChargeState.CAPTURED, ChargeState.DECLINED}),
    ChargeState.CAPTURED: frozenset({ChargeState.REFUND_REQUESTED}),
    ChargeState.REFUND_REQUESTED: frozenset({ChargeState.REFUNDED}),
    ChargeState.DECLINED: frozenset(),
    ChargeState.CANCELLED: frozenset(),
    ChargeState.REFUNDED: frozenset(),
}
"""What may follow what. A state without successors is final and stays so."""


def may_follow(current: ChargeState, following: ChargeState) -> bool:
    """Tell whether a charge may go from one state to the other."""
    return following in TRANSITIONS[current]


class ReviewReason(enum.StrEnum):
    """Why a person must decide. Until then nothing is sent to the provider for this charge."""

    KEY_REUSED = "key_reused"  # the provider knows our key with another body
    REQUEST_REFUSED = "request_refused"  # the provider says that these bytes can never be accepted
    ANSWER_CONTRADICTS = "answer_contradicts"  # the provider confirms another payment than the one asked for
    UNCHARGEABLE = "unchargeable"  # no request can be made of it: its amount is not a number
    IDEMPOTENCY_WINDOW_PASSED = "idempotency_window_passed"  # the key protects no longer (field report F42)


@dataclass(frozen=True, slots=True)
class NewCharge:
    """A charge that an order event asks for. `traceparent` is the event's, for the charge continues its trace."""

    order_id: int
    event_id: UUID
    customer_id: int
    amount: Decimal
    currency: str
    traceparent: str | None = None


@dataclass(frozen=True, slots=True)
class Charge:
    """A charge as it is read. Amount, currency and event id are None in a cancelled placeholder only."""

    charge_id: UUID
    order_id: int
    event_id: UUID | None
    amount: Decimal | None
    currency: str | None
    state: ChargeState
    requested_at: datetime
    first_attempt_at: datetime | None
    next_attempt_at: datetime | None
    attempt: int
    provider_reference: str | None
    decline_reason: str | None
    review_reason: str | None
    settled_at: datetime | None


@dataclass(frozen=True, slots=True)
class ClaimedCharge:
    """A charge that this process may send to the provider until its lease ends.

    `attempt` is the fence: an outcome is recorded only while the row still carries it. `request` are the bytes to send,
    the same at every attempt; `event_id` is the idempotency key at every attempt (R-KFK-IDEM-4).
    """

    charge_id: UUID
    order_id: int
    event_id: UUID
    amount: Decimal
    currency: str
    attempt: int
    request: bytes
    traceparent: str | None = None


@dataclass(frozen=True, slots=True)
class SettledCharge:
    """A charge that just became captured or declined, with what its payment event tells."""

    charge_id: UUID
    order_id: int
    event_id: UUID
    amount: Decimal
    currency: str
    state: ChargeState
    provider_reference: str
    decline_reason: str | None
    settled_at: datetime
    traceparent: str | None


def canonical_request(order_id: int, amount: Decimal, currency: str) -> bytes:
    """Return the body of the charge request: one spelling for one charge, so that a repeat is byte for byte the same.

    The list of currencies is not asked: it may have changed since the order, and the provider decides what it charges.
    Raises ValueError when the amount is not finite.
    """
    body = {"order_id": order_id, "amount": format_stored_amount(amount, currency), "currency": currency}
    return json.dumps(body, separators=(",", ":")).encode()


# ------------------------------------------------------------------------------------- what the provider may answer


@dataclass(frozen=True, slots=True)
class Captured:
    """The money moved, once."""

    reference: str


@dataclass(frozen=True, slots=True)
class Declined:
    """A business result: no money moves, now or later."""

    reference: str
    reason: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """The money may have moved: no answer, a broken one, or a fault of the provider."""

    why: str
    retry_after_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class StillRunning:
    """The provider works on an earlier request with this key."""

    retry_after_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class SlowDown:
    """The provider took nothing, for we ask too much."""

    retry_after_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Forbidden:
    """The provider does not know us, or not this address: no charge will succeed until a person sets it right."""

    status: int


@dataclass(frozen=True, slots=True)
class KeyReused:
    """The provider knows this key with another body."""


@dataclass(frozen=True, slots=True)
class RequestRefused:
    """The provider says that these bytes can never be accepted."""

    status: int


@dataclass(frozen=True, slots=True)
class AnswerContradicts:
    """The provider confirms, but not the payment that was asked for. `fields` names what differs."""

    fields: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Aborted:
    """This process hung up before the answer came, or never called: it stops, or calls are paused."""


Outcome = (
    Captured
    | Declined
    | Unknown
    | StillRunning
    | SlowDown
    | Forbidden
    | KeyReused
    | RequestRefused
    | AnswerContradicts
    | Aborted
)
"""Everything a call can end with. Matched in `next_step`, and there only, into what happens to the charge."""


# ------------------------------------------------------------------------------------------------ what happens next


@dataclass(frozen=True, slots=True)
class Settle:
    """The charge has its result."""

    state: ChargeState
    reference: str
    decline_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Review:
    """The charge waits for a person."""

    reason: ReviewReason
    reference: str | None = None


@dataclass(frozen=True, slots=True)
class TryAgain:
    """The same bytes go out with the same key, after this time."""

    after_seconds: float


NextStep = Settle | Review | TryAgain


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential backoff with full jitter, which spreads the retries of many charges over the whole interval."""

    first_seconds: float = 0.5
    most_seconds: float = 60.0

    def delay_seconds(self, attempt: int, at_least_seconds: float | None = None) -> float:
        """Return the wait after the `attempt`-th attempt, and never less than the provider asked for."""
        ceiling = min(self.most_seconds, self.first_seconds * 2 ** min(max(attempt - 1, 0), 30))
        jitter = random.uniform(0, ceiling)  # noqa: S311 - spreads retries, guards no secret
        if at_least_seconds is None:
            return jitter
        # A little more than asked for: all who were sent away would else come back in the same instant.
        return at_least_seconds + jitter * 0.1


def next_step(outcome: Outcome, attempt: int, policy: RetryPolicy) -> NextStep:
    """Tell what an outcome means for the charge. A fresh key is never the answer: what is uncertain is asked again."""
    match outcome:
        case Captured(reference):
            return Settle(ChargeState.CAPTURED, reference)
        case Declined(reference, reason):
            return Settle(ChargeState.DECLINED, reference, reason)
        case Unknown(_, retry_after) | StillRunning(retry_after) | SlowDown(retry_after):
            return TryAgain(policy.delay_seconds(attempt, retry_after))
        case Forbidden():
            return TryAgain(policy.delay_seconds(attempt))
        case KeyReused():
            return Review(ReviewReason.KEY_REUSED)
        case RequestRefused():
            return Review(ReviewReason.REQUEST_REFUSED)
        case AnswerContradicts():
            return Review(ReviewReason.ANSWER_CONTRADICTS)
        case Aborted():
            return TryAgain(0.0)
        case _:
            assert_never(outcome)
