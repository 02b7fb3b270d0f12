"""Orders with their items, the outbox and the inbox."""

from __future__ import annotations

from alembic import op

from shared.inbox import migrations as inbox
from shared.outbox import migrations as outbox

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    outbox.upgrade_1(op)
    inbox.upgrade_1(op)
    op.execute("""
        CREATE TABLE orders (
            order_id           bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_orders PRIMARY KEY,
            customer_id        bigint         NOT NULL,
            currency           text           NOT NULL,
            total_amount       numeric(19, 4) NOT NULL,
            status             text           NOT NULL,
            payment_status     text           NOT NULL,
            version            integer        NOT NULL,
            confirmed_at       timestamptz    NOT NULL DEFAULT now(),
            confirmed_event_id uuid           NOT NULL,
            payment_event_id   uuid,
            payment_updated_at timestamptz,
            CONSTRAINT uq_orders_confirmed_event_id UNIQUE (confirmed_event_id),
            CONSTRAINT ck_orders_customer_id_positive CHECK (customer_id > 0),
            CONSTRAINT ck_orders_total_amount_positive CHECK (total_amount > 0),
            CONSTRAINT ck_orders_currency_code CHECK (currency ~ '^[A-Z]{3}$'),
            CONSTRAINT ck_orders_status_known CHECK (status IN ('confirmed')),
            CONSTRAINT ck_orders_payment_status_known CHECK (payment_status IN ('pending', 'charged', 'declined')),
            CONSTRAINT ck_orders_version_positive CHECK (version > 0)
        )
    """)
    op.execute("""
        CREATE TABLE order_item (
            order_id   bigint         NOT NULL CONSTRAINT fk_order_item_order_id_orders REFERENCES orders (order_id),
            line       smallint       NOT NULL,
            sku        text           NOT NULL,
            quantity   integer        NOT NULL,
            unit_price numeric(19, 4) NOT NULL,
            CONSTRAINT pk_order_item PRIMARY KEY (order_id, line),
            CONSTRAINT ck_order_item_line_positive CHECK (line > 0),
            CONSTRAINT ck_order_item_quantity_positive CHECK (quantity > 0),
            CONSTRAINT ck_order_item_unit_price_positive CHECK (unit_price > 0)
        )
    """)


def downgrade() -> None:
    op.execute("DROP TABLE order_item")
    op.execute("DROP TABLE orders")
    inbox.downgrade_1(op)
    outbox.downgrade_1(op)
