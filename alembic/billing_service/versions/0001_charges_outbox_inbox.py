"""Charges, and the kit's outbox and inbox.

Revision ID: 0001
Revises:
"""

from __future__ import annotations

from alembic import op

from shared.inbox import migrations as inbox
from shared.outbox import migrations as outbox

revision = "0001"
down_revision: str | None = None
branch_labels: tuple[str, ...] | None = None
depends_on: tuple[str, ...] | None = None


def upgrade() -> None:
    """Create the tables."""
    outbox.upgrade_1(op)
    inbox.upgrade_1(op)
    op.execute("""
        CREATE TABLE charge (
            charge_id           uuid        NOT NULL CONSTRAINT pk_charge PRIMARY KEY,
            order_id            bigint      NOT NULL CONSTRAINT uq_charge_order_id UNIQUE,
            event_id            uuid        CONSTRAINT uq_charge_event_id UNIQUE,
            customer_id         bigint,
            amount              numeric(19, 4),
            currency            text,
            state               text        NOT NULL,
            requested_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
            request             bytea,
            first_attempt_at    timestamptz,
            next_attempt_at     timestamptz,
            attempt             integer     NOT NULL DEFAULT 0,
            lease_owner         uuid,
            lease_expires_at    timestamptz,
            provider_reference  text,
            decline_reason      text,
            review_reason       text,
            cancel_event_id     uuid,
            cancel_requested_at timestamptz,
            settled_at          timestamptz,
            traceparent         text,
            CONSTRAINT ck_charge_order_id_positive CHECK (order_id > 0),
            CONSTRAINT ck_charge_amount_positive CHECK (amount > 0),
            CONSTRAINT ck_charge_currency_code CHECK (currency ~ '^[A-Z]{3}$'),
            CONSTRAINT ck_charge_attempt_counted CHECK (attempt >= 0),
            CONSTRAINT ck_charge_state_known CHECK (state IN
                ('requested', 'captured', 'declined', 'needs_review', 'cancelled', 'refund_requested', 'refunded')),
            CONSTRAINT ck_charge_complete_or_placeholder CHECK (
                num_nulls(event_id, customer_id, amount, currency) = 0
                OR (state = 'cancelled' AND num_nonnulls(event_id, customer_id, amount, currency) = 0)),
            CONSTRAINT ck_charge_requested_is_due CHECK (state <> 'requested' OR next_attempt_at IS NOT NULL),
            CONSTRAINT ck_charge_cancelled_by_event CHECK (state <> 'cancelled' OR cancel_event_id IS NOT NULL),
            CONSTRAINT ck_charge_lease_whole CHECK (num_nulls(lease_owner, lease_expires_at) IN (0, 2)),
            CONSTRAINT ck_charge_lease_while_requested CHECK (lease_owner IS NULL OR state = 'requested'),
            CONSTRAINT ck_charge_request_fixed_at_first_attempt CHECK (num_nulls(request, first_attempt_at) IN (0, 2)),
            CONSTRAINT ck_charge_settled_has_reference CHECK (
                state NOT IN ('captured', 'declined', 'refund_requested', 'refunded')
                OR num_nulls(provider_reference, settled_at) = 0),
            CONSTRAINT ck_charge_decline_has_reason CHECK ((decline_reason IS NOT NULL) = (state = 'declined')),
            CONSTRAINT ck_charge_review_has_reason CHECK (state <> 'needs_review' OR review_reason IS NOT NULL)
        ) WITH (fillfactor = 80)
    """)
    op.execute("COMMENT ON COLUMN charge.charge_id IS 'UUIDv7'")
    op.execute("COMMENT ON COLUMN charge.event_id IS 'of order.confirmed.v1; the idempotency key at the provider'")
    op.execute("COMMENT ON COLUMN charge.request IS 'the request''s bytes, fixed at the first claim'")
    op.execute("COMMENT ON COLUMN charge.first_attempt_at IS 'the idempotency window begins here'")
    op.execute("COMMENT ON COLUMN charge.next_attempt_at IS 'due from then on, unless leased'")
    op.execute("COMMENT ON COLUMN charge.attempt IS 'the fence of a claim'")
    op.execute("COMMENT ON COLUMN charge.lease_owner IS 'random for each executor'")
    op.execute("COMMENT ON COLUMN charge.traceparent IS 'of the order event: the charge continues its trace'")
    op.execute("""
        CREATE UNIQUE INDEX uq_charge_cancel_event_id ON charge (cancel_event_id) WHERE cancel_event_id IS NOT NULL
    """)
    # A claim changes no indexed column (a heap-only update); those few that are leased are passed over.
    op.execute("CREATE INDEX ix_charge_due ON charge (next_attempt_at) WHERE state = 'requested'")
    op.execute("""
        CREATE INDEX ix_charge_unfinished ON charge (state, requested_at)
        WHERE state IN ('requested', 'needs_review', 'refund_requested')
    """)
    # Pages of one state, by order id. Nearly all charges are captured: the key on order_id serves their pages.
    op.execute("CREATE INDEX ix_charge_state_order_id ON charge (state, order_id) WHERE state <> 'captured'")
    # The request is fixed at the first claim: other bytes under the same key would be refused, or charge anew later.
    op.execute("""
        CREATE FUNCTION charge_keep_request() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            RAISE EXCEPTION 'the request and the key of a charge stay as they were first sent'
                USING ERRCODE = 'restrict_violation';
        END
        $$
    """)
    op.execute("""
        CREATE TRIGGER charge_keep_request BEFORE UPDATE OF request, event_id, first_attempt_at ON charge
        FOR EACH ROW WHEN (
            OLD.request IS NOT NULL AND (
                NEW.request IS DISTINCT FROM OLD.request
                OR NEW.event_id IS DISTINCT FROM OLD.event_id
                OR NEW.first_attempt_at IS DISTINCT FROM OLD.first_attempt_at))
        EXECUTE FUNCTION charge_keep_request()
    """)


def downgrade() -> None:
    """Drop everything. Charges and unpublished events are lost with it."""
    op.execute("DROP TABLE charge")
    op.execute("DROP FUNCTION charge_keep_request()")
    inbox.downgrade_1(op)
    outbox.downgrade_1(op)
