CREATE FUNCTION public.dedup_floor_only_rises() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
        BEGIN
            IF TG_OP = 'DELETE' OR NEW.event_id < OLD.event_id THEN
                RAISE EXCEPTION 'dedup_floor only rises: the marks below it are gone'
                    USING ERRCODE = 'restrict_violation';
            END IF;
            RETURN NEW;
        END
        $$;
CREATE FUNCTION public.outbox_event_draw_position() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
        BEGIN
            PERFORM pg_advisory_xact_lock(x'4F5554'::integer, NEW.bucket);
            NEW.position := nextval('outbox_event_position');
            RETURN NEW;
        END
        $$;
CREATE FUNCTION public.outbox_event_refuse_update() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
        BEGIN
            RAISE EXCEPTION 'outbox_event is insert-only: publish a new event instead of changing one'
                USING ERRCODE = 'restrict_violation';
        END
        $$;
CREATE TABLE public.dead_letter (
    letter_id bigint NOT NULL,
    consumer_group text NOT NULL,
    source_topic text NOT NULL,
    source_partition integer NOT NULL,
    source_offset bigint NOT NULL,
    key bytea,
    event_id uuid,
    headers jsonb NOT NULL,
    payload bytea,
    reason text NOT NULL,
    error text NOT NULL,
    attempts integer DEFAULT 1 NOT NULL,
    first_failed_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    last_failed_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    next_attempt_at timestamp with time zone,
    status text DEFAULT 'open'::text NOT NULL,
    blocks boolean DEFAULT false NOT NULL,
    retrying boolean DEFAULT false NOT NULL,
    decided_at timestamp with time zone,
    decided_by text,
    decision_reason text,
    settled_at timestamp with time zone,
    CONSTRAINT ck_dead_letter_status CHECK ((status = ANY (ARRAY['open'::text, 'resolved'::text, 'discarded'::text])))
);
COMMENT ON COLUMN public.dead_letter.headers IS '[name, base64 or null] pairs, in order';
COMMENT ON COLUMN public.dead_letter.blocks IS 'a valid event that failed: later events of its key and topic wait behind it';
COMMENT ON COLUMN public.dead_letter.retrying IS 'a retry began; if it is still so when the next one is due, the first did not live to its end';
ALTER TABLE public.dead_letter ALTER COLUMN letter_id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME public.dead_letter_letter_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE public.dedup_floor (
    singleton boolean DEFAULT true NOT NULL,
    event_id uuid NOT NULL,
    CONSTRAINT ck_dedup_floor_one_row CHECK (singleton)
);
COMMENT ON TABLE public.dedup_floor IS 'lowest event id that still has a partition; only rises';
CREATE TABLE public.idempotency_key (
    customer_id bigint NOT NULL,
    key text NOT NULL,
    fingerprint bytea NOT NULL,
    order_id bigint NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL
);
COMMENT ON COLUMN public.idempotency_key.fingerprint IS 'SHA-256 of the request in its canonical form';
CREATE TABLE public.inbox_attempt (
    consumer_group text NOT NULL,
    topic text NOT NULL,
    partition integer NOT NULL,
    first_offset bigint NOT NULL,
    last_offset bigint NOT NULL,
    attempts integer NOT NULL,
    last_attempt_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
);
COMMENT ON TABLE public.inbox_attempt IS 'what is in hand after a member died; committed before it is tried';
CREATE TABLE public.inbox_member (
    member_id uuid NOT NULL,
    consumer_group text NOT NULL,
    entered_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    died_at timestamp with time zone
);
COMMENT ON TABLE public.inbox_member IS 'consumers that run; each holds a lock of its session while it lives';
CREATE TABLE public.inbox_tally (
    tally_id bigint NOT NULL,
    consumer_group text NOT NULL,
    handled bigint NOT NULL,
    duplicates bigint NOT NULL,
    dead bigint NOT NULL,
    outside_window bigint NOT NULL
);
COMMENT ON TABLE public.inbox_tally IS 'settled records, a row for each batch in its own transaction; the upkeep folds rows together; read sums only';
ALTER TABLE public.inbox_tally ALTER COLUMN tally_id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME public.inbox_tally_tally_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE public.order_item (
    order_id bigint NOT NULL,
    line smallint NOT NULL,
    sku text NOT NULL,
    quantity integer NOT NULL,
    unit_price numeric(19,4) NOT NULL,
    CONSTRAINT ck_order_item_line_positive CHECK ((line > 0)),
    CONSTRAINT ck_order_item_quantity_positive CHECK ((quantity > 0)),
    CONSTRAINT ck_order_item_unit_price_positive CHECK ((unit_price > (0)::numeric))
);
CREATE TABLE public.orders (
    order_id bigint NOT NULL,
    customer_id bigint NOT NULL,
    currency text NOT NULL,
    total_amount numeric(19,4) NOT NULL,
    status text NOT NULL,
    payment_status text NOT NULL,
    version integer NOT NULL,
    confirmed_at timestamp with time zone DEFAULT now() NOT NULL,
    confirmed_event_id uuid NOT NULL,
    payment_event_id uuid,
    payment_updated_at timestamp with time zone,
    CONSTRAINT ck_orders_currency_code CHECK ((currency ~ '^[A-Z]{3}$'::text)),
    CONSTRAINT ck_orders_customer_id_positive CHECK ((customer_id > 0)),
    CONSTRAINT ck_orders_payment_status_known CHECK ((payment_status = ANY (ARRAY['pending'::text, 'charged'::text, 'declined'::text]))),
    CONSTRAINT ck_orders_status_known CHECK ((status = 'confirmed'::text)),
    CONSTRAINT ck_orders_total_amount_positive CHECK ((total_amount > (0)::numeric)),
    CONSTRAINT ck_orders_version_positive CHECK ((version > 0))
);
ALTER TABLE public.orders ALTER COLUMN order_id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME public.orders_order_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE public.outbox_bucket (
    bucket smallint NOT NULL,
    lease_owner uuid,
    lease_epoch bigint DEFAULT 0 NOT NULL,
    lease_expires_at timestamp with time zone,
    CONSTRAINT ck_outbox_bucket_bucket_range CHECK (((bucket >= 0) AND (bucket < 96)))
)
WITH (fillfactor='50');
COMMENT ON COLUMN public.outbox_bucket.lease_owner IS 'random for each relay process';
CREATE TABLE public.outbox_event (
    event_id uuid NOT NULL,
    bucket smallint NOT NULL,
    "position" bigint NOT NULL,
    topic text NOT NULL,
    key bytea NOT NULL,
    event_type text NOT NULL,
    payload bytea NOT NULL,
    headers jsonb DEFAULT '{}'::jsonb NOT NULL,
    created_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT ck_outbox_event_bucket_range CHECK (((bucket >= 0) AND (bucket < 96)))
);
COMMENT ON COLUMN public.outbox_event."position" IS 'drawn by the trigger under the bucket''s lock';
COMMENT ON COLUMN public.outbox_event.payload IS 'serialised once, in the business transaction';
CREATE SEQUENCE public.outbox_event_position
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.outbox_event_position OWNED BY public.outbox_event."position";
CREATE TABLE public.outbox_parked (
    bucket smallint NOT NULL,
    "position" bigint NOT NULL,
    event_id uuid NOT NULL,
    topic text NOT NULL,
    key bytea NOT NULL,
    event_type text NOT NULL,
    payload bytea NOT NULL,
    headers jsonb NOT NULL,
    created_at timestamp with time zone NOT NULL,
    reason text NOT NULL,
    parked_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    released_at timestamp with time zone,
    released_by text,
    refused boolean DEFAULT true NOT NULL,
    settled_at timestamp with time zone,
    outcome text,
    settled_by text,
    note text,
    CONSTRAINT ck_outbox_parked_bucket_range CHECK (((bucket >= 0) AND (bucket < 96))),
    CONSTRAINT ck_outbox_parked_outcome_known CHECK (
CASE
    WHEN (settled_at IS NULL) THEN (outcome IS NULL)
    ELSE (outcome = ANY (ARRAY['published'::text, 'discarded'::text]))
END)
);
COMMENT ON COLUMN public.outbox_parked.refused IS 'false: it waits behind a refused event of its key';
CREATE TABLE public.outbox_progress (
    bucket smallint NOT NULL,
    "position" bigint NOT NULL,
    published_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT ck_outbox_progress_bucket_range CHECK (((bucket >= 0) AND (bucket < 96)))
);
CREATE TABLE public.outbox_relay (
    owner uuid NOT NULL,
    expires_at timestamp with time zone NOT NULL
);
COMMENT ON TABLE public.outbox_relay IS 'live relays, also those that own no bucket yet: the divisor of a fair share';
CREATE TABLE public.outbox_topic (
    topic text NOT NULL,
    partitions integer NOT NULL,
    registered_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT ck_outbox_topic_partitions_divide_buckets CHECK ((partitions = ANY (ARRAY[1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96])))
);
CREATE TABLE public.processed_event (
    event_id uuid NOT NULL,
    consumer_group text NOT NULL,
    processed_at timestamp with time zone DEFAULT now() NOT NULL,
    payload_digest bytea NOT NULL,
    outcome text NOT NULL,
    CONSTRAINT ck_processed_event_digest_length CHECK ((octet_length(payload_digest) = 32)),
    CONSTRAINT ck_processed_event_outcome CHECK ((outcome = ANY (ARRAY['done'::text, 'dead'::text])))
)
PARTITION BY RANGE (event_id);
COMMENT ON COLUMN public.processed_event.payload_digest IS 'SHA-256 of the payload''s bytes';
ALTER TABLE ONLY public.dead_letter
    ADD CONSTRAINT pk_dead_letter PRIMARY KEY (letter_id);
ALTER TABLE ONLY public.dedup_floor
    ADD CONSTRAINT pk_dedup_floor PRIMARY KEY (singleton);
ALTER TABLE ONLY public.idempotency_key
    ADD CONSTRAINT pk_idempotency_key PRIMARY KEY (customer_id, key);
ALTER TABLE ONLY public.inbox_attempt
    ADD CONSTRAINT pk_inbox_attempt PRIMARY KEY (consumer_group, topic, partition, first_offset, last_offset);
ALTER TABLE ONLY public.inbox_member
    ADD CONSTRAINT pk_inbox_member PRIMARY KEY (member_id);
ALTER TABLE ONLY public.inbox_tally
    ADD CONSTRAINT pk_inbox_tally PRIMARY KEY (tally_id);
ALTER TABLE ONLY public.order_item
    ADD CONSTRAINT pk_order_item PRIMARY KEY (order_id, line);
ALTER TABLE ONLY public.orders
    ADD CONSTRAINT pk_orders PRIMARY KEY (order_id);
ALTER TABLE ONLY public.outbox_bucket
    ADD CONSTRAINT pk_outbox_bucket PRIMARY KEY (bucket);
ALTER TABLE ONLY public.outbox_event
    ADD CONSTRAINT pk_outbox_event PRIMARY KEY (event_id);
ALTER TABLE ONLY public.outbox_parked
    ADD CONSTRAINT pk_outbox_parked PRIMARY KEY (bucket, "position");
ALTER TABLE ONLY public.outbox_progress
    ADD CONSTRAINT pk_outbox_progress PRIMARY KEY (bucket, "position");
ALTER TABLE ONLY public.outbox_relay
    ADD CONSTRAINT pk_outbox_relay PRIMARY KEY (owner);
ALTER TABLE ONLY public.outbox_topic
    ADD CONSTRAINT pk_outbox_topic PRIMARY KEY (topic);
ALTER TABLE ONLY public.processed_event
    ADD CONSTRAINT pk_processed_event PRIMARY KEY (event_id, consumer_group);
ALTER TABLE ONLY public.dead_letter
    ADD CONSTRAINT uq_dead_letter_source UNIQUE (consumer_group, source_topic, source_partition, source_offset);
ALTER TABLE ONLY public.orders
    ADD CONSTRAINT uq_orders_confirmed_event_id UNIQUE (confirmed_event_id);
ALTER TABLE ONLY public.outbox_event
    ADD CONSTRAINT uq_outbox_event_bucket_position UNIQUE (bucket, "position");
ALTER TABLE ONLY public.outbox_parked
    ADD CONSTRAINT uq_outbox_parked_event_id UNIQUE (event_id);
CREATE INDEX ix_dead_letter_blocking ON public.dead_letter USING btree (consumer_group, source_topic, sha256(key)) WHERE (blocks AND (status = 'open'::text));
CREATE INDEX ix_dead_letter_due ON public.dead_letter USING btree (consumer_group, next_attempt_at) WHERE ((status = 'open'::text) AND (next_attempt_at IS NOT NULL));
CREATE INDEX ix_dead_letter_state ON public.dead_letter USING btree (consumer_group, status, reason);
CREATE INDEX ix_idempotency_key_created_at ON public.idempotency_key USING btree (created_at);
CREATE INDEX ix_outbox_parked_waiting ON public.outbox_parked USING btree (bucket, "position") WHERE (settled_at IS NULL);
CREATE INDEX ix_processed_event_processed_at ON ONLY public.processed_event USING btree (processed_at);
CREATE UNIQUE INDEX uq_dead_letter_event ON public.dead_letter USING btree (consumer_group, event_id) WHERE ((event_id IS NOT NULL) AND (reason <> 'payload_mismatch'::text));
CREATE TRIGGER dedup_floor_only_rises BEFORE DELETE OR UPDATE ON public.dedup_floor FOR EACH ROW EXECUTE FUNCTION public.dedup_floor_only_rises();
CREATE TRIGGER outbox_event_draw_position BEFORE INSERT ON public.outbox_event FOR EACH ROW EXECUTE FUNCTION public.outbox_event_draw_position();
CREATE TRIGGER outbox_event_refuse_update BEFORE UPDATE ON public.outbox_event FOR EACH STATEMENT EXECUTE FUNCTION public.outbox_event_refuse_update();
ALTER TABLE ONLY public.idempotency_key
    ADD CONSTRAINT fk_idempotency_key_order_id_orders FOREIGN KEY (order_id) REFERENCES public.orders(order_id);
ALTER TABLE ONLY public.order_item
    ADD CONSTRAINT fk_order_item_order_id_orders FOREIGN KEY (order_id) REFERENCES public.orders(order_id);
