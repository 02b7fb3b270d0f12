"""Which order a client's Idempotency-Key made."""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("""
        CREATE TABLE idempotency_key (
            customer_id bigint      NOT NULL,
            key         text        NOT NULL,
            fingerprint bytea       NOT NULL,
            order_id    bigint      NOT NULL
                        CONSTRAINT fk_idempotency_key_order_id_orders REFERENCES orders (order_id),
            created_at  timestamptz NOT NULL DEFAULT now(),
            CONSTRAINT pk_idempotency_key PRIMARY KEY (customer_id, key)
        )
    """)
    op.execute("COMMENT ON COLUMN idempotency_key.fingerprint IS 'SHA-256 of the request in its canonical form'")
    op.execute("CREATE INDEX ix_idempotency_key_created_at ON idempotency_key (created_at)")


def downgrade() -> None:
    op.execute("DROP TABLE idempotency_key")
