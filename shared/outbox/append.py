"""Where an event becomes a row: checked when it is published, appended as the transaction's last statement."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from shared.errors import InvalidInput, Refused, TooLarge
from shared.kafka.partitioner import key_hash
from shared.outbox.tables import BUCKETS
from shared.telemetry import trace_headers

# A record must fit into one Kafka batch; brokers take 1,048,588 bytes by default (message.max.bytes), framing included.
MAX_EVENT_BYTES = 1_000_000
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}", re.ASCII)  # Kafka's own rule for topic names
_HEADER_NAME = re.compile(r"[!-~]{1,64}", re.ASCII)
_MAX_HEADER_CHARACTERS = 1024
_MAX_EVENT_TYPE_CHARACTERS = 200
# What the relay adds to a record: its framing and the headers event_id, event_type and traceparent.
_RECORD_OVERHEAD_BYTES = 1024


@dataclass(frozen=True, slots=True)
class OutgoingEvent:
    """An event on its way into the outbox. `key` is the aggregate's id: events of one key leave in commit order."""

    event_id: UUID
    topic: str
    key: bytes
    event_type: str
    payload: bytes = field(repr=False)
    headers: Mapping[str, str] = field(default_factory=dict)


def bucket_of(key: bytes) -> int:
    """Return the bucket of a key: Kafka's own hash, so a bucket lies within one partition of each topic."""
    return key_hash(key) % BUCKETS


_APPEND = text("""
    INSERT INTO outbox_event (event_id, bucket, topic, key, event_type, payload, headers)
    SELECT e.event_id, e.bucket, e.topic, e.key, e.event_type, e.payload, CAST(e.headers AS jsonb)
    FROM unnest(CAST(:event_ids AS uuid[]), CAST(:buckets AS smallint[]), CAST(:topics AS text[]),
                CAST(:keys AS bytea[]), CAST(:event_types AS text[]), CAST(:payloads AS bytea[]),
                CAST(:headers AS text[]))
         WITH ORDINALITY AS e (event_id, bucket, topic, key, event_type, payload, headers, published)
    JOIN outbox_topic USING (topic)
    ORDER BY e.bucket, e.published
""")


class EventWriter:
    """Appends events to the outbox of the database that the session is connected to.

    `signal` tells the relay, after the commit, in which buckets there is something to read (a hint: it polls anyway).
    """

    def __init__(
        self, signal: Callable[[Sequence[int]], None] = lambda _: None, max_event_bytes: int = MAX_EVENT_BYTES
    ) -> None:
        self.signal = signal
        self._max_event_bytes = max_event_bytes

    def check(self, event: OutgoingEvent) -> None:
        """Refuse an event that could never leave. Raises TooLarge or InvalidInput, failing the request that made it."""
        headers = sum(len(name.encode()) + len(value.encode()) for name, value in event.headers.items())
        size = len(event.payload) + len(event.key) + headers + _RECORD_OVERHEAD_BYTES
        if size > self._max_event_bytes:
            raise TooLarge(f"the event would have {size} bytes and {self._max_event_bytes} can be published; send less")
        if not event.key:
            raise InvalidInput("an event needs a key (its aggregate's id): without one it has no order")
        if not _TOPIC.fullmatch(event.topic):
            raise InvalidInput("the topic's name may have up to 249 letters, digits, dots, dashes and underscores")
        if not 0 < len(event.event_type) <= _MAX_EVENT_TYPE_CHARACTERS or "\0" in event.event_type:
            raise InvalidInput(f"an event type has up to {_MAX_EVENT_TYPE_CHARACTERS} characters without NUL")
        for name, value in event.headers.items():
            if not _HEADER_NAME.fullmatch(name) or len(value) > _MAX_HEADER_CHARACTERS or "\0" in value:
                raise InvalidInput(
                    f"header {name[:64]!r}: names have up to 64 printable characters without blanks, "
                    f"values up to {_MAX_HEADER_CHARACTERS} without NUL"
                )

    async def append(self, session: AsyncSession, events: Sequence[OutgoingEvent]) -> Sequence[int]:
        """Insert the events in one statement, sorted by bucket so that two transactions cannot deadlock on the locks.

        Returns their buckets.

        Raises Refused when a topic is not registered in `outbox_topic`; the transaction must then roll back.
        """
        trace = trace_headers()
        buckets = [bucket_of(event.key) for event in events]
        result = await session.execute(
            _APPEND,
            {
                "event_ids": [event.event_id for event in events],
                "buckets": buckets,
                "topics": [event.topic for event in events],
                "keys": [event.key for event in events],
                "event_types": [event.event_type for event in events],
                "payloads": [event.payload for event in events],
                "headers": [json.dumps({**trace, **event.headers}) for event in events],
            },
        )
        if result.rowcount != len(events):  # type: ignore[attr-defined]  # an INSERT's result is a CursorResult
            topics = ", ".join(sorted({event.topic for event in events}))
            raise Refused(
                f"one of the topics {topics} is not registered in outbox_topic; run the service's migrate command"
            )
        return buckets
