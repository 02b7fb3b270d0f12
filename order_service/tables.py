"""The order service's tables: its own, the outbox's and the inbox's."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    DateTime,
    ForeignKey,
    Identity,
    Integer,
    LargeBinary,
    Numeric,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    func,
)

from shared.database import new_metadata
from shared.inbox.tables import define_inbox
from shared.outbox.tables import define_outbox

metadata = new_metadata()
define_outbox(metadata)
define_inbox(metadata)

orders = Table(
    "orders",
    metadata,
    Column("order_id", BigInteger, Identity(always=True), primary_key=True),
    Column("customer_id", BigInteger, nullable=False),
    Column("currency", Text, nullable=False),
    Column("total_amount", Numeric(19, 4), nullable=False),
    Column("status", Text, nullable=False),
    Column("payment_status", Text, nullable=False),
    Column("version", Integer, nullable=False),
    Column("confirmed_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    Column("confirmed_event_id", Uuid, nullable=False),
    Column("payment_event_id", Uuid),
    Column("payment_updated_at", DateTime(timezone=True)),
    UniqueConstraint("confirmed_event_id"),
    CheckConstraint("customer_id > 0", name="customer_id_positive"),
    CheckConstraint("total_amount > 0", name="total_amount_positive"),
    CheckConstraint("currency ~ '^[A-Z]{3}$'", name="currency_code"),
    CheckConstraint("status IN ('confirmed')", name="status_known"),
    CheckConstraint("payment_status IN ('pending', 'charged', 'declined')", name="payment_status_known"),
    CheckConstraint("version > 0", name="version_positive"),
)

order_item = Table(
    "order_item",
    metadata,
    Column("order_id", BigInteger, ForeignKey("orders.order_id"), primary_key=True, autoincrement=False),
    Column("line", SmallInteger, primary_key=True, autoincrement=False),
    Column("sku", Text, nullable=False),
    Column("quantity", Integer, nullable=False),
    Column("unit_price", Numeric(19, 4), nullable=False),
    CheckConstraint("line > 0", name="line_positive"),
    CheckConstraint("quantity > 0", name="quantity_positive"),
    CheckConstraint("unit_price > 0", name="unit_price_positive"),
)

idempotency_key = Table(
    "idempotency_key",
    metadata,
    Column("customer_id", BigInteger, primary_key=True, autoincrement=False),
    Column("key", Text, primary_key=True),
    Column("fingerprint", LargeBinary, nullable=False, comment="SHA-256 of the request in its canonical form"),
    Column("order_id", BigInteger, ForeignKey("orders.order_id"), nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.now(), index=True),
)
