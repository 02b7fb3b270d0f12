"""The inbox's tables. Partitions of `processed_event` are made and dropped by upkeep.py; migrations.py owns the DDL.

`processed_event` is partitioned by the event id itself: a duplicate has the same id, so it meets the same partition and
its unique key (field report F23). Partitioned by `processed_at` the key would need that column, and a duplicate that
comes a day later would be new.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB


def define_inbox(metadata: MetaData) -> None:
    """Add the inbox's tables to a service's metadata."""
    now = text("clock_timestamp()")
    Table(
        "processed_event",
        metadata,
        Column("event_id", Uuid, nullable=False),
        Column("consumer_group", Text, nullable=False),
        Column("processed_at", DateTime(timezone=True), nullable=False, server_default=text("now()"), index=True),
        Column("payload_digest", LargeBinary, nullable=False, comment="SHA-256 of the payload's bytes"),
        Column("outcome", Text, nullable=False),
        PrimaryKeyConstraint("event_id", "consumer_group"),
        CheckConstraint("octet_length(payload_digest) = 32", name="digest_length"),
        CheckConstraint("outcome IN ('done', 'dead')", name="outcome"),
        postgresql_partition_by="RANGE (event_id)",
    )
    Table(
        "dedup_floor",
        metadata,
        Column("singleton", Boolean, primary_key=True, server_default=text("true")),
        Column("event_id", Uuid, nullable=False),
        CheckConstraint("singleton", name="one_row"),
        comment="lowest event id that still has a partition; only rises",
    )
    Table(
        "dead_letter",
        metadata,
        Column("letter_id", BigInteger, Identity(always=True), primary_key=True),
        Column("consumer_group", Text, nullable=False),
        Column("source_topic", Text, nullable=False),
        Column("source_partition", Integer, nullable=False),
        Column("source_offset", BigInteger, nullable=False),
        Column("key", LargeBinary),
        Column("event_id", Uuid),
        Column("headers", JSONB, nullable=False, comment="[name, base64 or null] pairs, in order"),
        Column("payload", LargeBinary),
        Column("reason", Text, nullable=False),
        Column("error", Text, nullable=False),
        Column("attempts", Integer, nullable=False, server_default=text("1")),
        Column("first_failed_at", DateTime(timezone=True), nullable=False, server_default=now),
        Column("last_failed_at", DateTime(timezone=True), nullable=False, server_default=now),
        Column("next_attempt_at", DateTime(timezone=True)),
        Column("status", Text, nullable=False, server_default=text("'open'")),
        Column(
            "blocks",
            Boolean,
            nullable=False,
            server_default=text("false"),
            comment="a valid event that failed: later events of its key and topic wait behind it",
        ),
        Column(
            "retrying",
            Boolean,
            nullable=False,
            server_default=text("false"),
            comment="a retry began; if it is still so when the next one is due, the first did not live to its end",
        ),
        Column("decided_at", DateTime(timezone=True)),
        Column("decided_by", Text),
        Column("decision_reason", Text),
        Column("settled_at", DateTime(timezone=True)),
        UniqueConstraint(
            "consumer_group", "source_topic", "source_partition", "source_offset", name="uq_dead_letter_source"
        ),
        Index(
            "uq_dead_letter_event",
            "consumer_group",
            "event_id",
            unique=True,
            postgresql_where=text("event_id IS NOT NULL AND reason <> 'payload_mismatch'"),
        ),
        Index("ix_dead_letter_state", "consumer_group", "status", "reason"),
        Index(
            "ix_dead_letter_blocking",
            "consumer_group",
            "source_topic",
            text("sha256(key)"),
            postgresql_where=text("blocks AND status = 'open'"),
        ),
        Index(
            "ix_dead_letter_due",
            "consumer_group",
            "next_attempt_at",
            postgresql_where=text("status = 'open' AND next_attempt_at IS NOT NULL"),
        ),
        CheckConstraint("status IN ('open', 'resolved', 'discarded')", name="status"),
    )
    Table(
        "inbox_member",
        metadata,
        Column("member_id", Uuid, primary_key=True),
        Column("consumer_group", Text, nullable=False),
        Column("entered_at", DateTime(timezone=True), nullable=False, server_default=now),
        Column("died_at", DateTime(timezone=True)),
        comment="consumers that run; each holds a lock of its session while it lives",
    )
    Table(
        "inbox_attempt",
        metadata,
        Column("consumer_group", Text, primary_key=True),
        Column("topic", Text, primary_key=True),
        Column("partition", Integer, primary_key=True, autoincrement=False),
        Column("first_offset", BigInteger, primary_key=True, autoincrement=False),
        Column("last_offset", BigInteger, primary_key=True, autoincrement=False),
        Column("attempts", Integer, nullable=False),
        Column("last_attempt_at", DateTime(timezone=True), nullable=False, server_default=now),
        comment="what is in hand after a member died; committed before it is tried",
    )
    Table(
        "inbox_tally",
        metadata,
        Column("tally_id", BigInteger, Identity(always=True), primary_key=True),
        Column("consumer_group", Text, nullable=False),
        Column("handled", BigInteger, nullable=False),
        Column("duplicates", BigInteger, nullable=False),
        Column("dead", BigInteger, nullable=False),
        Column("outside_window", BigInteger, nullable=False),
        comment="settled records, a row for each batch in its own transaction; "
        "the upkeep folds rows together; read sums only",
    )
