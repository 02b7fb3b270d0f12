"""Where records go that cannot be processed: kept whole, with a reason code, in the transaction that settles them.

Writing a letter must never fail for ever (field report F51): text is freed of what PostgreSQL cannot store, headers are
base64, and the same letter twice is one letter.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from shared.errors import MessageRejected
from shared.kafka.records import ConsumedRecord

HANDLER_FAILED = "handler_failed"
"""The handler raised on this event when it was alone: a bug, or data that the handler does not expect."""

KILLS = "kills_the_consumer"
"""The process died each time that it had this event alone in hand. It is not tried again by itself."""

BEHIND = "behind_dead_letter"
"""An earlier event of the same key and topic failed, so this one waits behind its letter. It was never tried."""

RETRY_AFTER_SECONDS = (60, 300, 1800, 7200)
"""When a valid event that failed is tried again by itself; then it waits for a person."""

_ERROR_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class Letter:
    """A record that is put aside, the event id it stands for where one is known, and why.

    `blocks` is for valid events that failed: later ones of their key wait behind them. What is wrong for good, or a
    verdict that a person must see, holds up nobody.
    """

    record: ConsumedRecord
    event_id: UUID | None
    reason: str
    error: str
    blocks: bool = False

    @classmethod
    def rejected(cls, record: ConsumedRecord, event_id: UUID | None, rejection: MessageRejected) -> Letter:
        """Return the letter of a record that was rejected."""
        return cls(record, event_id, rejection.reason, rejection.detail)

    @classmethod
    def behind(cls, record: ConsumedRecord, event_id: UUID) -> Letter:
        """Return the letter of a valid event that has to wait behind another letter of its key."""
        return cls(record, event_id, BEHIND, "waits behind an earlier event of its key that failed", blocks=True)


_INSERT = text("""
    INSERT INTO dead_letter (consumer_group, source_topic, source_partition, source_offset, key, event_id, headers,
                             payload, reason, error, blocks, attempts, next_attempt_at)
    SELECT :group, l.topic, l.partition, l.record_offset, l.key, l.event_id, CAST(l.headers AS jsonb),
           l.payload, l.reason, l.error, l.blocks, CASE WHEN l.reason = :behind THEN 0 ELSE 1 END,
           CASE WHEN l.blocks AND l.reason = :failed THEN clock_timestamp() + make_interval(secs => :retry_after) END
    FROM unnest(CAST(:topics AS text[]), CAST(:partitions AS integer[]), CAST(:offsets AS bigint[]),
                CAST(:keys AS bytea[]), CAST(:event_ids AS uuid[]), CAST(:headers AS text[]),
                CAST(:payloads AS bytea[]), CAST(:reasons AS text[]), CAST(:errors AS text[]),
                CAST(:blocks AS boolean[]))
         AS l (topic, partition, record_offset, key, event_id, headers, payload, reason, error, blocks)
    ORDER BY l.topic, l.partition, l.record_offset
    ON CONFLICT DO NOTHING
    RETURNING source_topic, source_partition, source_offset
""")


async def insert_letters(
    session: AsyncSession, group: str, letters: Sequence[Letter], *, with_contents: bool = True
) -> set[tuple[str, int, int]]:
    """Insert the letters that do not exist yet; return topic, partition and offset of those that were new.

    `with_contents` False leaves out key, payload and headers: they are still in the topic, at the letter's offset. Such
    a letter cannot be retried, and holds up nobody.
    """
    if not letters:
        return set()
    records = [letter.record for letter in letters]
    rows = await session.execute(
        _INSERT,
        {
            "group": group,
            "topics": [record.topic for record in records],
            "partitions": [record.partition for record in records],
            "offsets": [record.offset for record in records],
            "keys": [record.key if with_contents else None for record in records],
            "event_ids": [letter.event_id for letter in letters],
            "headers": [headers_json(record) if with_contents else "[]" for record in records],
            "payloads": [record.value if with_contents else None for record in records],
            "reasons": [storable(letter.reason) for letter in letters],
            "errors": [storable(letter.error) for letter in letters],
            "blocks": [letter.blocks and with_contents for letter in letters],
            "behind": BEHIND,
            "failed": HANDLER_FAILED,
            "retry_after": RETRY_AFTER_SECONDS[0],
        },
    )
    return {(topic, partition, offset) for topic, partition, offset in rows}


def headers_json(record: ConsumedRecord) -> str:
    """Return the headers as a JSON list of [name, base64 or null]: order and repetitions kept, any bytes allowed."""
    return json.dumps(
        [
            [storable(name), None if value is None else base64.b64encode(value).decode("ascii")]
            for name, value in record.headers
        ]
    )


def storable(words: str, limit: int = _ERROR_CHARACTERS) -> str:
    """Return text that PostgreSQL can store: without NUL and lone surrogates, at most `limit` characters."""
    return words.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode("utf-8")[:limit]


def failure_text(error: BaseException) -> str:
    """Return class and first line of an error, fit for a letter. Statements and parameters stay out."""
    try:
        lines = str(error).splitlines()
    except Exception:  # an error whose own text fails must not keep its letter from being written
        lines = []
    return storable(f"{type(error).__name__}: {lines[0] if lines else ''}")
