"""The outbox's tables. Triggers, functions and the sequence are in migrations.py, which owns the DDL.

`outbox_event` and `outbox_progress` are insert-only logs: publishing updates no row, so a long transaction elsewhere
cannot make them slow, and a change-data-capture tool can read the same table.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

BUCKETS = 96
"""Buckets of an outbox. Partition counts that divide it put a whole bucket into one partition."""

PARTITION_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96)
"""Partition counts a topic may have: the divisors of BUCKETS."""

_BUCKET_RANGE = f"bucket >= 0 AND bucket < {BUCKETS}"


def define_outbox(metadata: MetaData) -> None:
    """Add the outbox's tables to a service's metadata."""
    now = text("clock_timestamp()")
    Table(
        "outbox_event",
        metadata,
        Column("event_id", Uuid, primary_key=True),
        Column("bucket", SmallInteger, nullable=False),
        Column("position", BigInteger, nullable=False, comment="drawn by the trigger under the bucket's lock"),
        Column("topic", Text, nullable=False),
        Column("key", LargeBinary, nullable=False),
        Column("event_type", Text, nullable=False),
        Column("payload", LargeBinary, nullable=False, comment="serialised once, in the business transaction"),
        Column("headers", JSONB, nullable=False, server_default=text("'{}'::jsonb")),
        Column("created_at", DateTime(timezone=True), nullable=False, server_default=now),
        UniqueConstraint("bucket", "position"),
        CheckConstraint(_BUCKET_RANGE, name="bucket_range"),
    )
    Table(
        "outbox_bucket",
        metadata,
        Column("bucket", SmallInteger, primary_key=True, autoincrement=False),
        Column("lease_owner", Uuid, comment="random for each relay process"),
        Column("lease_epoch", BigInteger, nullable=False, server_default=text("0")),
        Column("lease_expires_at", DateTime(timezone=True)),
        CheckConstraint(_BUCKET_RANGE, name="bucket_range"),
    )
    Table(
        "outbox_relay",
        metadata,
        Column("owner", Uuid, primary_key=True),
        Column("expires_at", DateTime(timezone=True), nullable=False),
        comment="live relays, also those that own no bucket yet: the divisor of a fair share",
    )
    Table(
        "outbox_progress",
        metadata,
        Column("bucket", SmallInteger, primary_key=True, autoincrement=False),
        Column("position", BigInteger, primary_key=True, autoincrement=False),
        Column("published_at", DateTime(timezone=True), nullable=False, server_default=now),
        CheckConstraint(_BUCKET_RANGE, name="bucket_range"),
    )
    Table(
        "outbox_parked",
        metadata,
        Column("bucket", SmallInteger, primary_key=True, autoincrement=False),
        Column("position", BigInteger, primary_key=True, autoincrement=False),
        Column("event_id", Uuid, nullable=False),
        Column("topic", Text, nullable=False),
        Column("key", LargeBinary, nullable=False),
        Column("event_type", Text, nullable=False),
        Column("payload", LargeBinary, nullable=False),
        Column("headers", JSONB, nullable=False),
        Column("created_at", DateTime(timezone=True), nullable=False),
        Column("reason", Text, nullable=False),
        Column("parked_at", DateTime(timezone=True), nullable=False, server_default=now),
        Column("released_at", DateTime(timezone=True)),
        Column("released_by", Text),
        Column(
            "refused",
            Boolean,
            nullable=False,
            server_default=text("true"),
            comment="false: it waits behind a refused event of its key",
        ),
        Column("settled_at", DateTime(timezone=True)),
        Column("outcome", Text),
        Column("settled_by", Text),
        Column("note", Text),
        UniqueConstraint("event_id"),
        Index("ix_outbox_parked_waiting", "bucket", "position", postgresql_where=text("settled_at IS NULL")),
        CheckConstraint(
            "CASE WHEN settled_at IS NULL THEN outcome IS NULL ELSE outcome IN ('published', 'discarded') END",
            name="outcome_known",
        ),
        CheckConstraint(_BUCKET_RANGE, name="bucket_range"),
    )
    Table(
        "outbox_topic",
        metadata,
        Column("topic", Text, primary_key=True),
        Column("partitions", Integer, nullable=False),
        Column("registered_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
        CheckConstraint(f"partitions IN ({', '.join(map(str, PARTITION_COUNTS))})", name="partitions_divide_buckets"),
    )
