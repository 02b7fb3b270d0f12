"""The billing service's tables: charges, the outbox's and the inbox's."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    DateTime,
    Index,
    Integer,
    LargeBinary,
    Numeric,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    text,
)

from shared.database import new_metadata
from shared.inbox.tables import define_inbox
from shared.outbox.tables import define_outbox

metadata = new_metadata()
define_outbox(metadata)
define_inbox(metadata)

_now = text("clock_timestamp()")

charge = Table(
    "charge",
    metadata,
    Column("charge_id", Uuid, primary_key=True, comment="UUIDv7"),
    Column("order_id", BigInteger, nullable=False),
    Column("event_id", Uuid, comment="of order.confirmed.v1; the idempotency key at the provider"),
    Column("customer_id", BigInteger),
    Column("amount", Numeric(19, 4)),
    Column("currency", Text),
    Column("state", Text, nullable=False),
    Column("requested_at", DateTime(timezone=True), nullable=False, server_default=_now),
    Column("request", LargeBinary, comment="the request's bytes, fixed at the first claim"),
    Column("first_attempt_at", DateTime(timezone=True), comment="the idempotency window begins here"),
    Column("next_attempt_at", DateTime(timezone=True), comment="due from then on, unless leased"),
    Column("attempt", Integer, nullable=False, server_default=text("0"), comment="the fence of a claim"),
    Column("lease_owner", Uuid, comment="random for each executor"),
    Column("lease_expires_at", DateTime(timezone=True)),
    Column("provider_reference", Text),
    Column("decline_reason", Text),
    Column("review_reason", Text),
    Column("cancel_event_id", Uuid),
    Column("cancel_requested_at", DateTime(timezone=True)),
    Column("settled_at", DateTime(timezone=True)),
    Column("traceparent", Text, comment="of the order event: the charge continues its trace"),
    Column("decided_at", DateTime(timezone=True)),
    Column("decided_by", Text),
    Column("decision_reason", Text),
    UniqueConstraint("order_id"),
    UniqueConstraint("event_id"),
    CheckConstraint("order_id > 0", name="order_id_positive"),
    CheckConstraint("amount > 0", name="amount_positive"),
    CheckConstraint("currency ~ '^[A-Z]{3}$'", name="currency_code"),
    CheckConstraint("attempt >= 0", name="attempt_counted"),
    CheckConstraint(
        "state IN ('requested', 'captured', 'declined', 'needs_review', 'cancelled', 'refund_requested', 'refunded')",
        name="state_known",
    ),
    CheckConstraint(
        "num_nulls(event_id, customer_id, amount, currency) = 0"
        " OR (state = 'cancelled' AND num_nonnulls(event_id, customer_id, amount, currency) = 0)",
        name="complete_or_placeholder",
    ),
    CheckConstraint("state <> 'requested' OR next_attempt_at IS NOT NULL", name="requested_is_due"),
    CheckConstraint("state <> 'cancelled' OR cancel_event_id IS NOT NULL", name="cancelled_by_event"),
    CheckConstraint("num_nulls(lease_owner, lease_expires_at) IN (0, 2)", name="lease_whole"),
    CheckConstraint("lease_owner IS NULL OR state = 'requested'", name="lease_while_requested"),
    CheckConstraint("num_nulls(request, first_attempt_at) IN (0, 2)", name="request_fixed_at_first_attempt"),
    CheckConstraint(
        "state NOT IN ('captured', 'declined', 'refund_requested', 'refunded')"
        " OR num_nulls(provider_reference, settled_at) = 0",
        name="settled_has_reference",
    ),
    CheckConstraint("(decline_reason IS NOT NULL) = (state = 'declined')", name="decline_has_reason"),
    CheckConstraint("state <> 'needs_review' OR review_reason IS NOT NULL", name="review_has_reason"),
    CheckConstraint("num_nulls(decided_at, decided_by, decision_reason) IN (0, 3)", name="decision_whole"),
    Index(
        "uq_charge_cancel_event_id",
        "cancel_event_id",
        unique=True,
        postgresql_where=text("cancel_event_id IS NOT NULL"),
    ),
    Index("ix_charge_due", "next_attempt_at", postgresql_where=text("state = 'requested'")),
    Index("ix_charge_state_order_id", "state", "order_id", postgresql_where=text("state <> 'captured'")),
    Index(
        "ix_charge_unfinished",
        "state",
        "requested_at",
        postgresql_where=text("state IN ('requested', 'needs_review', 'refund_requested')"),
    ),
)
