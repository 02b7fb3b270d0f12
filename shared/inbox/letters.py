"""Every query on dead letters but their insertion: what retries need, and what an operator asks.

A letter is settled when it is `resolved` (its event was handled after all) or `discarded` (a person gave it up). Of the
letters that block a key only the first can be retried, and when it is settled the next one that waits behind it is due.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncSession

from shared.inbox.batch import letters_lock
from shared.inbox.dead_letters import BEHIND, HANDLER_FAILED, RETRY_AFTER_SECONDS, storable
from shared.kafka.records import ConsumedRecord

# ------------------------------------------------------------------------------------------------------ retries


@dataclass(frozen=True, slots=True)
class DueLetter:
    """A letter whose retry has begun: `attempts` counts it and is its fence."""

    letter_id: int
    attempts: int
    blocks: bool
    reason: str
    record: ConsumedRecord
    has_contents: bool


async def begin_retry(session: AsyncSession, group: str, lease_seconds: float) -> DueLetter | None:
    """Take the letter that has been due for longest and count its attempt; None when none is due.

    If this process dies, the letter is due again after the lease, and that time is the last: what kills a process twice
    waits for a person.
    """
    row = (await session.execute(_BEGIN_RETRY, {"group": group, "lease": lease_seconds})).one_or_none()
    return None if row is None else _due(row)


# `retrying` in SET is the old value: an attempt began before and never ended.
_BEGIN_RETRY = text("""
    UPDATE dead_letter
    SET attempts = attempts + 1, retrying = true,
        next_attempt_at = CASE WHEN NOT retrying THEN clock_timestamp() + make_interval(secs => :lease) END
    WHERE letter_id = (
        SELECT d.letter_id FROM dead_letter d
        WHERE d.consumer_group = :group AND d.status = 'open' AND d.next_attempt_at <= clock_timestamp()
              AND NOT (d.blocks AND EXISTS (
                  SELECT FROM dead_letter earlier
                  WHERE earlier.consumer_group = :group AND earlier.source_topic = d.source_topic
                        AND sha256(earlier.key) = sha256(d.key) AND earlier.blocks AND earlier.status = 'open'
                        AND (earlier.source_partition, earlier.source_offset) < (d.source_partition, d.source_offset)
              ))
        ORDER BY d.next_attempt_at, d.letter_id
        LIMIT 1
        FOR UPDATE SKIP LOCKED
    )
    RETURNING letter_id, attempts, blocks, reason, source_topic, source_partition, source_offset, key, payload, headers
""")


def _due(row: Row[Any]) -> DueLetter:
    record = ConsumedRecord(
        row.source_topic,
        row.source_partition,
        row.source_offset,
        None if row.key is None else bytes(row.key),
        None if row.payload is None else bytes(row.payload),
        tuple((name, None if value is None else base64.b64decode(value)) for name, value in row.headers),
        0,
    )
    return DueLetter(row.letter_id, row.attempts, row.blocks, row.reason, record, has_contents=row.payload is not None)


async def lock_for_settling(session: AsyncSession, group: str, letter: DueLetter) -> bool:
    """Lock a letter to settle it in this transaction; False when somebody else has decided about it meanwhile.

    What blocks a key is settled alone in its group: batches that saw the key blocked have written theirs by then.
    """
    if letter.blocks:
        await session.execute(_HOLD_LETTERS, {"name": letters_lock(group)})
    found = await session.execute(_LOCK, {"letter_id": letter.letter_id, "attempts": letter.attempts})
    return found.one_or_none() is not None


_HOLD_LETTERS = text("SELECT pg_advisory_xact_lock(hashtextextended(:name, 0))")

_LOCK = text("""
    SELECT letter_id FROM dead_letter
    WHERE letter_id = :letter_id AND attempts = :attempts AND status = 'open' FOR UPDATE
""")


async def take_mark(session: AsyncSession, group: str, event_id: UUID, digest: bytes) -> str:
    """Make the event's mark say `done`; return what it said: `new`, `dead`, `done`, or `other` for another payload."""
    made = await session.execute(_MAKE_MARK, {"group": group, "event_id": event_id, "digest": digest})
    if made.one_or_none() is not None:
        return "new"
    known = (await session.execute(_KNOWN_MARK, {"group": group, "event_id": event_id})).one()
    if bytes(known.payload_digest) != digest:
        return "other"
    if known.outcome == "dead":
        await session.execute(_REVIVE_MARK, {"group": group, "event_id": event_id})
    return str(known.outcome)


_MAKE_MARK = text("""
    INSERT INTO processed_event (event_id, consumer_group, payload_digest, outcome)
    VALUES (:event_id, :group, :digest, 'done')
    ON CONFLICT (event_id, consumer_group) DO NOTHING RETURNING event_id
""")

_KNOWN_MARK = text("""
    SELECT payload_digest, outcome FROM processed_event
    WHERE event_id = :event_id AND consumer_group = :group FOR UPDATE
""")

_REVIVE_MARK = text("""
    UPDATE processed_event SET outcome = 'done' WHERE event_id = :event_id AND consumer_group = :group
""")


async def settle_letter(session: AsyncSession, group: str, letter_id: int, status: str) -> bool:
    """Settle an open letter and let the next one of its key follow; False when it is settled already."""
    row = (await session.execute(_SETTLE, {"letter_id": letter_id, "status": status})).one_or_none()
    if row is None:
        return False
    if row.blocks:
        await session.execute(_NEXT_OF_KEY, {"group": group, "topic": row.source_topic, "key": row.key})
    return True


_SETTLE = text("""
    UPDATE dead_letter SET status = :status, settled_at = clock_timestamp(), next_attempt_at = NULL, retrying = false
    WHERE letter_id = :letter_id AND status = 'open'
    RETURNING source_topic, key, blocks
""")

_NEXT_OF_KEY = text(f"""
    UPDATE dead_letter SET next_attempt_at = clock_timestamp()
    WHERE reason = '{BEHIND}' AND letter_id = (
        SELECT letter_id FROM dead_letter
        WHERE consumer_group = :group AND source_topic = :topic AND sha256(key) = sha256(CAST(:key AS bytea))
              AND blocks AND status = 'open'
        ORDER BY source_partition, source_offset LIMIT 1
    )
""")  # noqa: S608 - a constant of ours


async def note_failure(session: AsyncSession, group: str, letter: DueLetter, reason: str, error: str) -> None:
    """Note that a retry failed. What may succeed later is due again after a while, some times; a verdict blocks nobody.

    Call under `lock_for_settling`.
    """
    delays = dict(enumerate(RETRY_AFTER_SECONDS, 1))
    verdict = reason != HANDLER_FAILED
    row = (
        await session.execute(
            _NOTE_FAILURE,
            {
                "letter_id": letter.letter_id,
                "reason": storable(reason),
                "error": storable(error),
                "blocks": letter.blocks and not verdict,
                "retry_after": delays.get(letter.attempts) if letter.blocks and not verdict else None,
            },
        )
    ).one()
    if letter.blocks and verdict:
        await session.execute(_NEXT_OF_KEY, {"group": group, "topic": row.source_topic, "key": row.key})


_NOTE_FAILURE = text("""
    UPDATE dead_letter
    SET reason = CASE WHEN reason = 'payload_mismatch' THEN reason ELSE :reason END, error = :error, blocks = :blocks,
        retrying = false, last_failed_at = clock_timestamp(),
        next_attempt_at = clock_timestamp() + make_interval(secs => CAST(:retry_after AS double precision))
    WHERE letter_id = :letter_id
    RETURNING source_topic, key
""")


async def put_back(session: AsyncSession, letter: DueLetter, seconds: float) -> None:
    """Take an attempt back that never got to the event: it is due again later."""
    await session.execute(_PUT_BACK, {"letter_id": letter.letter_id, "attempts": letter.attempts, "seconds": seconds})


_PUT_BACK = text("""
    UPDATE dead_letter
    SET attempts = attempts - 1, retrying = false,
        next_attempt_at = clock_timestamp() + make_interval(secs => :seconds)
    WHERE letter_id = :letter_id AND attempts = :attempts AND status = 'open'
""")


async def stop_request(session: AsyncSession, group: str, letter_id: int) -> int:
    """Let what was requested together with a letter wait for a person again; return how many that are."""
    result = await session.execute(_STOP_REQUEST, {"group": group, "letter_id": letter_id})
    return int(result.rowcount)  # type: ignore[attr-defined]  # an UPDATE's result is a CursorResult


_STOP_REQUEST = text("""
    UPDATE dead_letter SET next_attempt_at = NULL
    WHERE consumer_group = :group AND status = 'open' AND next_attempt_at IS NOT NULL AND NOT retrying
          AND decided_at = (SELECT decided_at FROM dead_letter WHERE letter_id = :letter_id)
""")


async def open_letters(session: AsyncSession, group: str) -> tuple[dict[str, int], float]:
    """Return how many letters are open by reason, and the age of the oldest in seconds; counted up to COUNTED_AT_MOST.

    For metrics: by index, and bounded however many there are.
    """
    rows = (await session.execute(_OPEN, {"group": group, "most": COUNTED_AT_MOST})).all()
    return {str(row.reason): int(row.letters) for row in rows}, max((float(row.age) for row in rows), default=0.0)


COUNTED_AT_MOST = 10_000

_OPEN = text("""
    SELECT reason, count(*) AS letters, extract(epoch FROM clock_timestamp() - min(first_failed_at)) AS age
    FROM (
        SELECT reason, first_failed_at FROM dead_letter WHERE consumer_group = :group AND status = 'open' LIMIT :most
    ) AS l
    GROUP BY reason
""")


# ----------------------------------------------------------------------------------------------------- operators


@dataclass(frozen=True, slots=True)
class Selection:
    """Which letters are meant: all conditions that are given hold. Times are compared with the first failure."""

    letter_ids: Sequence[int] = ()
    reason: str | None = None
    topic: str | None = None
    event_id: UUID | None = None
    key: str | None = None
    since: datetime | None = None
    status: str | None = "open"

    @property
    def is_everything(self) -> bool:
        """Whether nothing narrows it down but the status."""
        return self == Selection(status=self.status)

    def parameters(self) -> dict[str, Any]:
        """Return the binds of the condition."""
        fields = asdict(self)
        fields["letter_ids"] = list(self.letter_ids) or None
        fields["key"] = None if self.key is None else self.key.encode()
        return fields


_SELECTED = """
    consumer_group = :group
    AND (CAST(:letter_ids AS bigint[]) IS NULL OR letter_id = ANY (CAST(:letter_ids AS bigint[])))
    AND (CAST(:reason AS text) IS NULL OR reason = :reason)
    AND (CAST(:topic AS text) IS NULL OR source_topic = :topic)
    AND (CAST(:event_id AS uuid) IS NULL OR event_id = :event_id)
    AND (CAST(:key AS bytea) IS NULL OR key = :key)
    AND (CAST(:since AS timestamptz) IS NULL OR first_failed_at >= :since)
    AND (CAST(:status AS text) IS NULL OR status = :status)
"""


@dataclass(frozen=True, slots=True)
class LetterLine:
    """A letter as a list shows it."""

    letter_id: int
    event_id: UUID | None
    key: str | None
    topic: str
    partition: int
    offset: int
    reason: str
    error: str
    attempts: int
    first_failed_at: datetime
    next_attempt_at: datetime | None
    status: str
    blocks: bool


async def list_letters(session: AsyncSession, group: str, chosen: Selection, limit: int) -> list[LetterLine]:
    """Return letters in the order of their first failure."""
    rows = await session.execute(_LIST, {**chosen.parameters(), "group": group, "limit": limit})
    return [LetterLine(row.letter_id, row.event_id, _readable(row.key), *row[3:]) for row in rows]


_LIST = text(f"""
    SELECT letter_id, event_id, key, source_topic, source_partition, source_offset, reason, error, attempts,
           first_failed_at, next_attempt_at, status, blocks
    FROM dead_letter WHERE {_SELECTED} ORDER BY letter_id LIMIT :limit
""")  # noqa: S608 - a constant of ours


async def count_letters(session: AsyncSession, group: str, chosen: Selection) -> dict[str, int]:
    """Return how many letters are meant, by reason."""
    rows = await session.execute(_COUNT, {**chosen.parameters(), "group": group})
    return {str(reason): int(count) for reason, count in rows}


_COUNT = text(f"""
    SELECT reason, count(*) FROM dead_letter WHERE {_SELECTED} GROUP BY reason ORDER BY reason
""")  # noqa: S608 - a constant of ours


@dataclass(frozen=True, slots=True)
class LetterDetails:
    """Everything about a letter."""

    line: LetterLine
    headers: Sequence[tuple[str, str | None]]
    payload: bytes | None
    last_failed_at: datetime
    decided_at: datetime | None
    decided_by: str | None
    decision_reason: str | None
    settled_at: datetime | None
    waiting_behind: int


async def show_letter(session: AsyncSession, group: str, letter_id: int) -> LetterDetails | None:
    """Return a letter, or None when the group has no such one."""
    lines = await list_letters(session, group, Selection((letter_id,), status=None), 1)
    if not lines:
        return None
    row = (await session.execute(_SHOW, {"group": group, "letter_id": letter_id})).one()
    return LetterDetails(
        lines[0],
        [(name, value) for name, value in row.headers],
        None if row.payload is None else bytes(row.payload),
        row.last_failed_at,
        row.decided_at,
        row.decided_by,
        row.decision_reason,
        row.settled_at,
        row.waiting_behind,
    )


_SHOW = text("""
    SELECT d.headers, d.payload, d.last_failed_at, d.decided_at, d.decided_by, d.decision_reason, d.settled_at,
           (SELECT count(*) FROM dead_letter later
            WHERE d.blocks AND d.status = 'open' AND later.consumer_group = :group
                  AND later.source_topic = d.source_topic AND sha256(later.key) = sha256(d.key)
                  AND later.blocks AND later.status = 'open'
                  AND (later.source_partition, later.source_offset) > (d.source_partition, d.source_offset)
           ) AS waiting_behind
    FROM dead_letter d WHERE d.letter_id = :letter_id
""")


@dataclass(frozen=True, slots=True)
class Decision:
    """Who decided what about letters, and why; recorded with each."""

    by: str
    because: str


async def request_retry(
    session: AsyncSession, group: str, chosen: Selection, decision: Decision, per_second: float
) -> list[int]:
    """Make letters due, so many a second, in the order of the log; return those that were.

    Letters without contents cannot be retried and are left out.
    """
    rows = await session.execute(
        _REQUEST,
        {
            **chosen.parameters(),
            "group": group,
            "status": "open",
            "by": storable(decision.by),
            "because": storable(decision.because),
            "interval": 1 / per_second,
        },
    )
    return list(rows.scalars())


# Rows are locked before they are numbered, so that what a retry settles meanwhile is left out.
_REQUEST = text(f"""
    WITH chosen AS (
        SELECT letter_id, source_partition, source_offset FROM dead_letter
        WHERE {_SELECTED} AND payload IS NOT NULL
        ORDER BY letter_id FOR UPDATE
    ), numbered AS (
        SELECT letter_id, row_number() OVER (ORDER BY source_offset, source_partition, letter_id) - 1 AS number
        FROM chosen
    )
    UPDATE dead_letter d
    SET next_attempt_at = now() + make_interval(secs => n.number * CAST(:interval AS double precision)),
        decided_at = now(), decided_by = :by, decision_reason = :because
    FROM numbered n WHERE d.letter_id = n.letter_id
    RETURNING d.letter_id
""")  # noqa: S608 - a constant of ours


async def discard_letters(session: AsyncSession, group: str, chosen: Selection, decision: Decision) -> list[int]:
    """Give letters up for ever and let those behind them follow; return those that were."""
    await session.execute(_HOLD_LETTERS, {"name": letters_lock(group)})
    rows = await session.execute(
        _DECIDE,
        {
            **chosen.parameters(),
            "group": group,
            "status": "open",
            "by": storable(decision.by),
            "because": storable(decision.because),
        },
    )
    decided = sorted(rows.scalars())
    return [letter_id for letter_id in decided if await settle_letter(session, group, letter_id, "discarded")]


_DECIDE = text(f"""
    UPDATE dead_letter SET decided_at = now(), decided_by = :by, decision_reason = :because
    WHERE letter_id IN (SELECT letter_id FROM dead_letter WHERE {_SELECTED} ORDER BY letter_id FOR UPDATE)
    RETURNING letter_id
""")  # noqa: S608 - a constant of ours


@dataclass(frozen=True, slots=True)
class RequestProgress:
    """How far a requested retry is."""

    waiting: int
    resolved: int
    failed: int
    not_tried: int


async def request_progress(session: AsyncSession, letter_ids: Sequence[int]) -> RequestProgress:
    """Return what became of letters whose retry was requested: `waiting` will be tried, `not_tried` were given up."""
    row = (await session.execute(_PROGRESS, {"letter_ids": list(letter_ids)})).one()
    return RequestProgress(row.waiting, row.resolved, row.failed, row.not_tried)


_PROGRESS = text("""
    SELECT count(*) FILTER (WHERE status <> 'open') AS resolved,
           count(*) FILTER (WHERE status = 'open' AND tried) AS failed,
           count(*) FILTER (WHERE status = 'open' AND NOT tried AND due) AS waiting,
           count(*) FILTER (WHERE status = 'open' AND NOT tried AND NOT due) AS not_tried
    FROM (
        SELECT status, retrying OR next_attempt_at IS NOT NULL AS due,
               NOT retrying AND last_failed_at >= decided_at AS tried
        FROM dead_letter WHERE letter_id = ANY (CAST(:letter_ids AS bigint[]))
    ) AS l
""")


def _readable(key: bytes | None) -> str | None:
    return None if key is None else bytes(key).decode("utf-8", "backslashreplace")[:200]
