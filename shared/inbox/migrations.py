"""Frozen DDL of the inbox. A service's migrations call `upgrade_1(op)` and so on; a later change adds one, never edits.

Frozen means self-contained: nothing here reads tables.py, which moves on. Partitions are not part of it: the migrate
command calls `upkeep.ensure_partitions` afterwards, and the upkeep service makes the next days'.
"""

from __future__ import annotations

from shared.ddl import Ddl


def upgrade_1(op: Ddl) -> None:
    """Create the inbox: dedup marks by event id, the floor below which none are kept, dead letters and the tally."""
    op.execute("""
        CREATE TABLE processed_event (
            event_id       uuid        NOT NULL,
            consumer_group text        NOT NULL,
            processed_at   timestamptz NOT NULL DEFAULT now(),
            payload_digest bytea       NOT NULL,
            outcome        text        NOT NULL,
            CONSTRAINT pk_processed_event PRIMARY KEY (event_id, consumer_group),
            CONSTRAINT ck_processed_event_digest_length CHECK (octet_length(payload_digest) = 32),
            CONSTRAINT ck_processed_event_outcome CHECK (outcome IN ('done', 'dead'))
        ) PARTITION BY RANGE (event_id)
    """)
    op.execute("COMMENT ON COLUMN processed_event.payload_digest IS 'SHA-256 of the payload''s bytes'")
    op.execute("CREATE INDEX ix_processed_event_processed_at ON processed_event (processed_at)")
    op.execute("""
        CREATE TABLE dedup_floor (
            singleton boolean NOT NULL DEFAULT true CONSTRAINT pk_dedup_floor PRIMARY KEY,
            event_id  uuid    NOT NULL,
            CONSTRAINT ck_dedup_floor_one_row CHECK (singleton)
        )
    """)
    op.execute("COMMENT ON TABLE dedup_floor IS 'lowest event id that still has a partition; only rises'")
    op.execute("INSERT INTO dedup_floor (event_id) VALUES ('00000000-0000-0000-0000-000000000000')")
    # A lower floor would let marks be made again where some were dropped, and a duplicate would pass as new.
    op.execute("""
        CREATE FUNCTION dedup_floor_only_rises() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF TG_OP = 'DELETE' OR NEW.event_id < OLD.event_id THEN
                RAISE EXCEPTION 'dedup_floor only rises: the marks below it are gone'
                    USING ERRCODE = 'restrict_violation';
            END IF;
            RETURN NEW;
        END
        $$
    """)
    op.execute("""
        CREATE TRIGGER dedup_floor_only_rises BEFORE UPDATE OR DELETE ON dedup_floor
        FOR EACH ROW EXECUTE FUNCTION dedup_floor_only_rises()
    """)
    op.execute("""
        CREATE TABLE dead_letter (
            letter_id        bigint      NOT NULL GENERATED ALWAYS AS IDENTITY
                                         CONSTRAINT pk_dead_letter PRIMARY KEY,
            consumer_group   text        NOT NULL,
            source_topic     text        NOT NULL,
            source_partition integer     NOT NULL,
            source_offset    bigint      NOT NULL,
            key              bytea,
            event_id         uuid,
            headers          jsonb       NOT NULL,
            payload          bytea,
            reason           text        NOT NULL,
            error            text        NOT NULL,
            attempts         integer     NOT NULL DEFAULT 1,
            first_failed_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
            last_failed_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
            next_attempt_at  timestamptz,
            status           text        NOT NULL DEFAULT 'open',
            CONSTRAINT uq_dead_letter_source
                UNIQUE (consumer_group, source_topic, source_partition, source_offset),
            CONSTRAINT ck_dead_letter_status CHECK (status IN ('open', 'resolved', 'discarded'))
        )
    """)
    op.execute("COMMENT ON COLUMN dead_letter.headers IS '[name, base64 or null] pairs, in order'")
    # One letter an event; but a second payload under a known id is another thing to look at, so it has its own letter.
    op.execute("""
        CREATE UNIQUE INDEX uq_dead_letter_event ON dead_letter (consumer_group, event_id)
        WHERE event_id IS NOT NULL AND reason <> 'payload_mismatch'
    """)
    op.execute("CREATE INDEX ix_dead_letter_state ON dead_letter (consumer_group, status, reason)")
    # A row for each batch, folded together by the upkeep. One row that every batch changes would leave a dead version
    # each time, and while a backup holds its snapshot none of them can be removed: each batch steps over more.
    op.execute("""
        CREATE TABLE inbox_tally (
            tally_id       bigint NOT NULL GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_inbox_tally PRIMARY KEY,
            consumer_group text   NOT NULL,
            handled        bigint NOT NULL,
            duplicates     bigint NOT NULL,
            dead           bigint NOT NULL,
            outside_window bigint NOT NULL
        )
    """)
    op.execute("""
        COMMENT ON TABLE inbox_tally IS
        'settled records, a row for each batch in its own transaction; the upkeep folds rows together; read sums only'
    """)


def downgrade_1(op: Ddl) -> None:
    """Drop the inbox. Dead letters and all knowledge of what was processed are lost with it."""
    for table in ("inbox_tally", "dead_letter", "dedup_floor", "processed_event"):
        op.execute(f"DROP TABLE {table}")
    op.execute("DROP FUNCTION dedup_floor_only_rises()")


def upgrade_2(op: Ddl) -> None:
    """Let dead letters be retried in sequence: which ones block their key, who decided what, and how it ended."""
    op.execute("""
        ALTER TABLE dead_letter
            ADD COLUMN blocks          boolean NOT NULL DEFAULT false,
            ADD COLUMN retrying        boolean NOT NULL DEFAULT false,
            ADD COLUMN decided_at      timestamptz,
            ADD COLUMN decided_by      text,
            ADD COLUMN decision_reason text,
            ADD COLUMN settled_at      timestamptz
    """)
    op.execute("""
        COMMENT ON COLUMN dead_letter.blocks IS
        'a valid event that failed: later events of its key and topic wait behind it'
    """)
    op.execute("""
        COMMENT ON COLUMN dead_letter.retrying IS
        'a retry began; if it is still so when the next one is due, the first did not live to its end'
    """)
    # Of a key its digest: an index row has 2,704 bytes at most, and a key may have more.
    op.execute("""
        CREATE INDEX ix_dead_letter_blocking ON dead_letter (consumer_group, source_topic, sha256(key))
        WHERE blocks AND status = 'open'
    """)
    op.execute("""
        CREATE INDEX ix_dead_letter_due ON dead_letter (consumer_group, next_attempt_at)
        WHERE status = 'open' AND next_attempt_at IS NOT NULL
    """)


def downgrade_2(op: Ddl) -> None:
    """Forget who decided what about dead letters."""
    op.execute("DROP INDEX ix_dead_letter_due")
    op.execute("DROP INDEX ix_dead_letter_blocking")
    op.execute("""
        ALTER TABLE dead_letter DROP COLUMN blocks, DROP COLUMN retrying, DROP COLUMN decided_at,
            DROP COLUMN decided_by, DROP COLUMN decision_reason, DROP COLUMN settled_at
    """)


def upgrade_3(op: Ddl) -> None:
    """Let a group know which of its members died, and what they had in hand."""
    op.execute("""
        CREATE TABLE inbox_member (
            member_id      uuid        NOT NULL CONSTRAINT pk_inbox_member PRIMARY KEY,
            consumer_group text        NOT NULL,
            entered_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
            died_at        timestamptz
        )
    """)
    op.execute("COMMENT ON TABLE inbox_member IS 'consumers that run; each holds a lock of its session while it lives'")
    op.execute("""
        CREATE TABLE inbox_attempt (
            consumer_group  text        NOT NULL,
            topic           text        NOT NULL,
            partition       integer     NOT NULL,
            first_offset    bigint      NOT NULL,
            last_offset     bigint      NOT NULL,
            attempts        integer     NOT NULL,
            last_attempt_at timestamptz NOT NULL DEFAULT clock_timestamp(),
            CONSTRAINT pk_inbox_attempt PRIMARY KEY (consumer_group, topic, partition, first_offset, last_offset)
        )
    """)
    op.execute("COMMENT ON TABLE inbox_attempt IS 'what is in hand after a member died; committed before it is tried'")


def downgrade_3(op: Ddl) -> None:
    """Forget who died."""
    op.execute("DROP TABLE inbox_attempt")
    op.execute("DROP TABLE inbox_member")
