"""Every query of the billing service. Functions take a session and never commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

from sqlalchemy import Row, Select, bindparam, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from billing_service.charge import (
    Charge,
    ChargeState,
    ClaimedCharge,
    NewCharge,
    Review,
    ReviewReason,
    Settle,
    SettledCharge,
    canonical_request,
)
from billing_service.tables import charge
from shared.identifiers import lowest_id_at, new_event_id

CLAIM_PLANNING = {"enable_seqscan": "off", "enable_bitmapscan": "off", "enable_sort": "off"}
"""Session settings of whoever claims. The claim's plan is kept as long as its connection, and may have been made when
the table was small: only with these is it the walk along ix_charge_due whatever the statistics say (field report F8).
"""

COUNTED_AT_MOST = 100_000
"""Unfinished charges are counted up to here: a bigger backlog is reported as this number."""


# ----------------------------------------------------------------------------------------------- order events


async def insert_charges(session: AsyncSession, new: Sequence[NewCharge]) -> set[UUID]:
    """Insert charges as `requested`, due at once; return the event ids of those that were inserted.

    An event that is missing from the result met a charge with its order or its event id: `find_conflicting` tells
    which (field report F49). Rows go in by order id, so that two batches wait for each other instead of deadlocking.
    """
    by_order = sorted(new, key=lambda item: (item.order_id, item.event_id))
    result = await session.execute(
        _INSERT_CHARGES,
        {
            "charge_ids": [new_event_id() for _ in by_order],
            "order_ids": [item.order_id for item in by_order],
            "event_ids": [item.event_id for item in by_order],
            "customer_ids": [item.customer_id for item in by_order],
            "amounts": [item.amount for item in by_order],
            "currencies": [item.currency for item in by_order],
            "traceparents": [item.traceparent for item in by_order],
        },
    )
    return set(result.scalars())


_INSERT_CHARGES = text("""
    INSERT INTO charge (charge_id, order_id, event_id, customer_id, amount, currency, traceparent,
                        state, next_attempt_at)
    SELECT n.charge_id, n.order_id, n.event_id, n.customer_id, n.amount, n.currency, n.traceparent,
           'requested', clock_timestamp()
    FROM unnest(CAST(:charge_ids AS uuid[]), CAST(:order_ids AS bigint[]), CAST(:event_ids AS uuid[]),
                CAST(:customer_ids AS bigint[]), CAST(:amounts AS numeric[]), CAST(:currencies AS text[]),
                CAST(:traceparents AS text[]))
         WITH ORDINALITY AS n (charge_id, order_id, event_id, customer_id, amount, currency, traceparent, sorted)
    ORDER BY n.sorted
    ON CONFLICT DO NOTHING
    RETURNING event_id
""")


@dataclass(frozen=True, slots=True)
class ExistingCharge:
    """What is stored where an insert found its place taken."""

    order_id: int
    event_id: UUID | None
    amount: Decimal | None
    currency: str | None
    state: ChargeState


async def find_conflicting(
    session: AsyncSession, order_ids: Sequence[int], event_ids: Sequence[UUID]
) -> Sequence[ExistingCharge]:
    """Return the charges that have one of the orders or one of the event ids."""
    rows = await session.execute(_CONFLICTING, {"order_ids": list(order_ids), "event_ids": list(event_ids)})
    return [
        ExistingCharge(row.order_id, row.event_id, row.amount, row.currency, ChargeState(row.state)) for row in rows
    ]


_CONFLICTING = text("""
    SELECT order_id, event_id, amount, currency, state FROM charge WHERE order_id = ANY (CAST(:order_ids AS bigint[]))
    UNION
    SELECT order_id, event_id, amount, currency, state FROM charge WHERE event_id = ANY (CAST(:event_ids AS uuid[]))
""")


# -------------------------------------------------------------------------------------------------- executor


@dataclass(frozen=True, slots=True)
class Claims:
    """Result of a claim: charges to send, and orders whose charge went to a person instead, with the reason."""

    claimed: Sequence[ClaimedCharge]
    reviewed: Sequence[tuple[int, ReviewReason]]


async def claim_due(
    session: AsyncSession, owner: UUID, limit: int, lease_seconds: float, window_seconds: float
) -> Claims:
    """Lease up to `limit` due charges to `owner`, the longest due first, raising each one's attempt number.

    The first claim fixes the request's bytes and begins the idempotency window; a charge whose window of
    `window_seconds` has passed goes to `needs_review` instead (field report F42). Time is the database's.
    """
    rows = await session.execute(_LOCK_DUE, {"limit": limit, "window_seconds": window_seconds})
    claimed: list[ClaimedCharge] = []
    reviewed: list[tuple[UUID, int, ReviewReason]] = []
    for row in rows:
        decided = _claimed(row)
        if isinstance(decided, ClaimedCharge):
            claimed.append(decided)
        else:
            reviewed.append((row.charge_id, row.order_id, decided))
    if reviewed:
        await session.execute(
            _REVIEW_LOCKED,
            {
                "charge_ids": [charge_id for charge_id, _, _ in reviewed],
                "reasons": [str(reason) for _, _, reason in reviewed],
            },
        )
    if claimed:
        await session.execute(
            _LEASE,
            {
                "charge_ids": [item.charge_id for item in claimed],
                "requests": [item.request for item in claimed],
                "owner": owner,
                "lease_seconds": lease_seconds,
            },
        )
    return Claims(claimed, [(order_id, reason) for _, order_id, reason in reviewed])


_LOCK_DUE = text("""
    SELECT charge_id, order_id, event_id, amount, currency, attempt, request, traceparent,
           coalesce(first_attempt_at < clock_timestamp() - make_interval(secs => :window_seconds), false) AS past_window
    FROM charge
    WHERE state = 'requested' AND next_attempt_at <= clock_timestamp()
          AND (lease_expires_at IS NULL OR lease_expires_at <= clock_timestamp())
    ORDER BY next_attempt_at
    LIMIT :limit
    FOR NO KEY UPDATE SKIP LOCKED
""")

_REVIEW_LOCKED = text("""
    UPDATE charge
    SET state = 'needs_review', review_reason = reviewed.reason, lease_owner = NULL, lease_expires_at = NULL
    FROM unnest(CAST(:charge_ids AS uuid[]), CAST(:reasons AS text[])) AS reviewed (charge_id, reason)
    WHERE charge.charge_id = reviewed.charge_id
""")

_LEASE = text("""
    UPDATE charge
    SET attempt = attempt + 1, lease_owner = :owner,
        lease_expires_at = clock_timestamp() + make_interval(secs => :lease_seconds),
        request = coalesce(charge.request, claimed.request),
        first_attempt_at = coalesce(first_attempt_at, clock_timestamp())
    FROM unnest(CAST(:charge_ids AS uuid[]), CAST(:requests AS bytea[])) AS claimed (charge_id, request)
    WHERE charge.charge_id = claimed.charge_id
""")


def _claimed(row: Row[Any]) -> ClaimedCharge | ReviewReason:
    if row.past_window:
        return ReviewReason.IDEMPOTENCY_WINDOW_PASSED
    try:
        request = row.request or canonical_request(row.order_id, row.amount, row.currency)
    except ValueError:
        return ReviewReason.UNCHARGEABLE  # alone: raising would keep every other charge from its turn
    return ClaimedCharge(
        charge_id=row.charge_id,
        order_id=row.order_id,
        event_id=row.event_id,
        amount=row.amount,
        currency=row.currency,
        attempt=row.attempt + 1,
        request=request,
        traceparent=row.traceparent,
    )


async def settle(session: AsyncSession, results: Sequence[tuple[ClaimedCharge, Settle]]) -> Sequence[SettledCharge]:
    """Give charges their result where their fence still holds; return those that got it."""
    rows = await session.execute(
        _SETTLE,
        {
            "charge_ids": [claimed.charge_id for claimed, _ in results],
            "attempts": [claimed.attempt for claimed, _ in results],
            "states": [str(step.state) for _, step in results],
            "references": [step.reference for _, step in results],
            "decline_reasons": [step.decline_reason for _, step in results],
        },
    )
    return [_settled(row) for row in rows]


def _settled(row: Row[Any]) -> SettledCharge:
    return SettledCharge(**{**row._mapping, "state": ChargeState(row.state)})


_SETTLE = text("""
    UPDATE charge
    SET state = result.state, provider_reference = result.reference, decline_reason = result.decline_reason,
        settled_at = clock_timestamp(), lease_owner = NULL, lease_expires_at = NULL
    FROM unnest(CAST(:charge_ids AS uuid[]), CAST(:attempts AS integer[]), CAST(:states AS text[]),
                CAST(:references AS text[]), CAST(:decline_reasons AS text[]))
         AS result (charge_id, attempt, state, reference, decline_reason)
    WHERE charge.charge_id = result.charge_id AND charge.attempt = result.attempt AND charge.state = 'requested'
    RETURNING charge.charge_id, order_id, event_id, amount, currency, charge.state, provider_reference,
              charge.decline_reason, settled_at, traceparent
""")


async def decide_review(
    session: AsyncSession, charge_id: UUID, step: Settle, by: str, because: str
) -> SettledCharge | None:
    """Give a charge that waits for a person its result; None when it waits no longer."""
    row = (
        await session.execute(
            _DECIDE_REVIEW,
            {
                "charge_id": charge_id,
                "state": str(step.state),
                "reference": step.reference,
                "decline_reason": step.decline_reason,
                "by": by,
                "because": because,
            },
        )
    ).one_or_none()
    return None if row is None else _settled(row)


_DECIDE_REVIEW = text("""
    UPDATE charge
    SET state = :state, provider_reference = :reference, decline_reason = :decline_reason,
        settled_at = clock_timestamp(), decided_at = clock_timestamp(), decided_by = :by, decision_reason = :because
    WHERE charge_id = :charge_id AND state = 'needs_review'
    RETURNING charge_id, order_id, event_id, amount, currency, state, provider_reference, decline_reason, settled_at,
              traceparent
""")


async def send_to_review(session: AsyncSession, results: Sequence[tuple[ClaimedCharge, Review]]) -> set[UUID]:
    """Hand charges to a person where their fence still holds; return the ids of those that went."""
    result = await session.execute(
        _SEND_TO_REVIEW,
        {
            "charge_ids": [claimed.charge_id for claimed, _ in results],
            "attempts": [claimed.attempt for claimed, _ in results],
            "reasons": [str(step.reason) for _, step in results],
        },
    )
    return set(result.scalars())


_SEND_TO_REVIEW = text("""
    UPDATE charge
    SET state = 'needs_review', review_reason = result.reason, lease_owner = NULL, lease_expires_at = NULL
    FROM unnest(CAST(:charge_ids AS uuid[]), CAST(:attempts AS integer[]), CAST(:reasons AS text[]))
         AS result (charge_id, attempt, reason)
    WHERE charge.charge_id = result.charge_id AND charge.attempt = result.attempt AND charge.state = 'requested'
    RETURNING charge.charge_id
""")


async def try_again_later(session: AsyncSession, results: Sequence[tuple[ClaimedCharge, float]]) -> set[UUID]:
    """End leases and make the charges due after so many seconds; return the ids of those whose fence still held."""
    result = await session.execute(
        _TRY_AGAIN_LATER,
        {
            "charge_ids": [claimed.charge_id for claimed, _ in results],
            "attempts": [claimed.attempt for claimed, _ in results],
            "delays": [delay for _, delay in results],
        },
    )
    return set(result.scalars())


_TRY_AGAIN_LATER = text("""
    UPDATE charge
    SET next_attempt_at = clock_timestamp() + make_interval(secs => result.delay_seconds),
        lease_owner = NULL, lease_expires_at = NULL
    FROM unnest(CAST(:charge_ids AS uuid[]), CAST(:attempts AS integer[]), CAST(:delays AS double precision[]))
         AS result (charge_id, attempt, delay_seconds)
    WHERE charge.charge_id = result.charge_id AND charge.attempt = result.attempt AND charge.state = 'requested'
    RETURNING charge.charge_id
""")


# ---------------------------------------------------------------------------------------------------- reading


async def find_charge(session: AsyncSession, charge_id: UUID) -> Charge | None:
    """Return a charge, or None."""
    row = (await session.execute(_SELECT.where(charge.c.charge_id == charge_id))).one_or_none()
    return None if row is None else _charge(row)


async def find_charge_of_order(session: AsyncSession, order_id: int) -> Charge | None:
    """Return the charge of an order, or None. There is never more than one."""
    row = (await session.execute(_SELECT.where(charge.c.order_id == order_id))).one_or_none()
    return None if row is None else _charge(row)


async def order_before(session: AsyncSession, moment: datetime) -> int:
    """Return an order id behind which lies everything that belongs to the time since then, known here or not.

    That is the last order before it, too: what a restored database has forgotten lies between that one and the first
    that came afterwards. By the time in the charges' ids.
    """
    return int((await session.execute(_ORDER_BEFORE, {"lowest": lowest_id_at(moment)})).scalar_one())


_ORDER_BEFORE = text("""
    SELECT least((SELECT min(order_id) - 1 FROM charge WHERE charge_id >= :lowest),
                 coalesce((SELECT max(order_id) FROM charge WHERE charge_id < :lowest), 0))
""")


async def page_of_charges(
    session: AsyncSession, after_order_id: int, limit: int, state: ChargeState | None = None
) -> Sequence[Charge]:
    """Return up to `limit` charges of higher order ids, ascending; of one state if given."""
    return [_charge(row) for row in await session.execute(page_query(after_order_id, limit, state))]


def page_query(after_order_id: int, limit: int, state: ChargeState | None) -> Select[Any]:
    """Return the query of `page_of_charges`. The state is a literal, or the partial index could not serve it."""
    query = _SELECT.where(charge.c.order_id > after_order_id).order_by(charge.c.order_id).limit(limit)
    if state is None:
        return query
    return query.where(charge.c.state == bindparam("state", str(state), literal_execute=True))


_SELECT = select(
    *(
        charge.c[name]
        for name in (
            "charge_id",
            "order_id",
            "event_id",
            "amount",
            "currency",
            "state",
            "requested_at",
            "first_attempt_at",
            "next_attempt_at",
            "attempt",
            "provider_reference",
            "decline_reason",
            "review_reason",
            "settled_at",
        )
    )
)


def _charge(row: Row[Any]) -> Charge:
    return Charge(**{**row._mapping, "state": ChargeState(row.state)})


@dataclass(frozen=True, slots=True)
class Backlog:
    """Unfinished charges of one state: how many (up to COUNTED_AT_MOST) and how old the oldest is."""

    state: ChargeState
    charges: int
    oldest_seconds: float


async def unfinished(session: AsyncSession) -> Sequence[Backlog]:
    """Return the backlog of each state that a charge should leave. Costs at most a bounded index scan a state."""
    rows = await session.execute(_UNFINISHED, {"most": COUNTED_AT_MOST})
    return [Backlog(ChargeState(row.state), row.charges, row.oldest_seconds) for row in rows]


# The partial index ix_charge_unfinished needs the states as literals.
_UNFINISHED = text(
    " UNION ALL ".join(
        f"""
        SELECT CAST('{state}' AS text) AS state, CAST(count(*) AS integer) AS charges,
               CAST(coalesce(extract(epoch FROM clock_timestamp() - min(requested_at)), 0) AS float8) AS oldest_seconds
        FROM (SELECT requested_at FROM charge WHERE state = '{state}' ORDER BY requested_at LIMIT :most) AS counted
        """  # noqa: S608 - the states are constants of this code
        for state in (ChargeState.REQUESTED, ChargeState.NEEDS_REVIEW, ChargeState.REFUND_REQUESTED)
    )
)
