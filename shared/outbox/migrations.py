"""Frozen DDL of the outbox. A service's migrations call the upgrade functions in turn; a change adds one, never edits.

Frozen means self-contained: nothing here reads tables.py, which moves on.
"""

from __future__ import annotations

from shared.ddl import Ddl


def upgrade_1(op: Ddl) -> None:
    """Create the outbox: the log, its bucket leases, the progress log, parked events and registered topics."""
    op.execute("""
        CREATE TABLE outbox_event (
            event_id    uuid        NOT NULL CONSTRAINT pk_outbox_event PRIMARY KEY,
            bucket      smallint    NOT NULL,
            position    bigint      NOT NULL,
            topic       text        NOT NULL,
            key         bytea       NOT NULL,
            event_type  text        NOT NULL,
            payload     bytea       NOT NULL,
            headers     jsonb       NOT NULL DEFAULT '{}'::jsonb,
            created_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
            CONSTRAINT uq_outbox_event_bucket_position UNIQUE (bucket, position),
            CONSTRAINT ck_outbox_event_bucket_range CHECK (bucket >= 0 AND bucket < 96)
        )
    """)
    op.execute("COMMENT ON COLUMN outbox_event.position IS 'drawn by the trigger under the bucket''s lock'")
    op.execute("COMMENT ON COLUMN outbox_event.payload IS 'serialised once, in the business transaction'")
    # CACHE 1: a cache hands numbers to sessions ahead of time, and then position is not commit order.
    op.execute(
        "CREATE SEQUENCE outbox_event_position AS bigint MINVALUE 1 CACHE 1 NO CYCLE OWNED BY outbox_event.position"
    )
    # The lock is held until the commit is visible: inside a bucket, position order is commit order. 0x4F5554 is "OUT".
    op.execute("""
        CREATE FUNCTION outbox_event_draw_position() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            PERFORM pg_advisory_xact_lock(x'4F5554'::integer, NEW.bucket);
            NEW.position := nextval('outbox_event_position');
            RETURN NEW;
        END
        $$
    """)
    op.execute("""
        CREATE TRIGGER outbox_event_draw_position BEFORE INSERT ON outbox_event
        FOR EACH ROW EXECUTE FUNCTION outbox_event_draw_position()
    """)
    op.execute("""
        CREATE FUNCTION outbox_event_refuse_update() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            RAISE EXCEPTION 'outbox_event is insert-only: publish a new event instead of changing one'
                USING ERRCODE = 'restrict_violation';
        END
        $$
    """)
    op.execute("""
        CREATE TRIGGER outbox_event_refuse_update BEFORE UPDATE ON outbox_event
        FOR EACH STATEMENT EXECUTE FUNCTION outbox_event_refuse_update()
    """)
    op.execute("""
        CREATE TABLE outbox_bucket (
            bucket           smallint NOT NULL CONSTRAINT pk_outbox_bucket PRIMARY KEY,
            lease_owner      uuid,
            lease_epoch      bigint   NOT NULL DEFAULT 0,
            lease_expires_at timestamptz,
            CONSTRAINT ck_outbox_bucket_bucket_range CHECK (bucket >= 0 AND bucket < 96)
        ) WITH (fillfactor = 50)
    """)
    op.execute("COMMENT ON COLUMN outbox_bucket.lease_owner IS 'random for each relay process'")
    op.execute("INSERT INTO outbox_bucket (bucket) SELECT generate_series(0, 95)")
    op.execute("""
        CREATE TABLE outbox_relay (
            owner      uuid        NOT NULL CONSTRAINT pk_outbox_relay PRIMARY KEY,
            expires_at timestamptz NOT NULL
        )
    """)
    op.execute(
        "COMMENT ON TABLE outbox_relay IS 'live relays, also those that own no bucket yet: the divisor of a fair share'"
    )
    op.execute("""
        CREATE TABLE outbox_progress (
            bucket       smallint    NOT NULL,
            position     bigint      NOT NULL,
            published_at timestamptz NOT NULL DEFAULT clock_timestamp(),
            CONSTRAINT pk_outbox_progress PRIMARY KEY (bucket, position),
            CONSTRAINT ck_outbox_progress_bucket_range CHECK (bucket >= 0 AND bucket < 96)
        )
    """)
    op.execute("""
        CREATE TABLE outbox_parked (
            bucket      smallint    NOT NULL,
            position    bigint      NOT NULL,
            event_id    uuid        NOT NULL,
            topic       text        NOT NULL,
            key         bytea       NOT NULL,
            event_type  text        NOT NULL,
            payload     bytea       NOT NULL,
            headers     jsonb       NOT NULL,
            created_at  timestamptz NOT NULL,
            reason      text        NOT NULL,
            parked_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
            released_at timestamptz,
            released_by text,
            CONSTRAINT pk_outbox_parked PRIMARY KEY (bucket, position),
            CONSTRAINT uq_outbox_parked_event_id UNIQUE (event_id),
            CONSTRAINT ck_outbox_parked_bucket_range CHECK (bucket >= 0 AND bucket < 96)
        )
    """)
    op.execute("""
        CREATE TABLE outbox_topic (
            topic         text        NOT NULL CONSTRAINT pk_outbox_topic PRIMARY KEY,
            partitions    integer     NOT NULL,
            registered_at timestamptz NOT NULL DEFAULT now(),
            CONSTRAINT ck_outbox_topic_partitions_divide_buckets
                CHECK (partitions IN (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96))
        )
    """)


def downgrade_1(op: Ddl) -> None:
    """Drop the outbox. Unpublished events are lost with it: drain first."""
    for table in ("outbox_topic", "outbox_parked", "outbox_progress", "outbox_relay", "outbox_bucket", "outbox_event"):
        op.execute(f"DROP TABLE {table}")
    op.execute("DROP FUNCTION outbox_event_refuse_update()")
    op.execute("DROP FUNCTION outbox_event_draw_position()")


def upgrade_2(op: Ddl) -> None:
    """Give parked events an end: published after a release, or discarded, by whom and why."""
    op.execute("""
        ALTER TABLE outbox_parked
            ADD COLUMN refused    boolean NOT NULL DEFAULT true,
            ADD COLUMN settled_at timestamptz,
            ADD COLUMN outcome    text,
            ADD COLUMN settled_by text,
            ADD COLUMN note       text,
            ADD CONSTRAINT ck_outbox_parked_outcome_known
                CHECK (CASE WHEN settled_at IS NULL THEN outcome IS NULL ELSE outcome IN ('published', 'discarded') END)
    """)
    op.execute("COMMENT ON COLUMN outbox_parked.refused IS 'false: it waits behind a refused event of its key'")
    op.execute("CREATE INDEX ix_outbox_parked_waiting ON outbox_parked (bucket, position) WHERE settled_at IS NULL")


def downgrade_2(op: Ddl) -> None:
    """Forget how parked events ended. Settle all of them before: an older relay does not send what was released."""
    op.execute("DROP INDEX ix_outbox_parked_waiting")
    op.execute("""
        ALTER TABLE outbox_parked
            DROP CONSTRAINT ck_outbox_parked_outcome_known,
            DROP COLUMN refused, DROP COLUMN settled_at, DROP COLUMN outcome, DROP COLUMN settled_by, DROP COLUMN note
    """)
