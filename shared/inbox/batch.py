"""One batch, one transaction: dedup marks, the handler's effects, dead letters and the tally commit together.

Each record of a batch ends as exactly one of: handled (its mark and effects are new), duplicate (its event was settled
before), dead (a letter says why), or outside the window (older than any mark that is kept, and given to a handler whose
own key finds duplicates). R-KFK-IDEM-2 and -3; nothing here knows of offsets (R-KFK-IDEM-X2).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Generic
from uuid import UUID

import asyncpg
import structlog
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession

from shared import failpoints
from shared.errors import MessageRejected, Refused, Unavailable, constraint_name, is_transient, sqlstate
from shared.identifiers import lowest_id_at
from shared.inbox.dead_letters import HANDLER_FAILED, KILLS, Letter, failure_text, insert_letters
from shared.inbox.messages import Handler, Incoming, M, M_co, stated_event_id
from shared.kafka.records import ConsumedRecord
from shared.unit_of_work import UnitOfWork, UnitsOfWork

log = structlog.get_logger(__name__)

FUTURE_TOLERANCE = timedelta(days=1)
"""How far an event id's time may lie ahead of the database's clock. Partitions reach further (upkeep.DAYS_AHEAD)."""

# SQLSTATE classes (PostgreSQL docs, appendix A) that tell of a row's own contents.
_DATA_EXCEPTION, _INTEGRITY_VIOLATION = "22", "23"


@dataclass(frozen=True, slots=True)
class Readable(Generic[M_co]):
    """A record and the event that it carries."""

    record: ConsumedRecord
    event_id: UUID
    message: M_co
    digest: bytes


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A record that the handler cannot read, and the event id where its payload states one.

    `failure` is what reading it raised, where that was no rejection: perhaps our code, and not the record, is at fault.
    `blocks` is for a valid event whose handling failed: later ones of its key wait behind it.
    """

    record: ConsumedRecord
    event_id: UUID | None
    rejection: MessageRejected
    digest: bytes
    failure: Exception | None = None
    blocks: bool = False


Received = Readable[M_co] | Unreadable


@dataclass(slots=True)
class Settled:
    """How many records of a batch became what; dead letters also by reason."""

    handled: int = 0
    duplicates: int = 0
    outside_window: int = 0
    dead: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def shows_a_working_handler(self) -> bool:
        """Whether the handler took at least one event: duplicates and unreadable records never reach it."""
        return self.handled + self.outside_window > 0

    def add(self, other: Settled) -> None:
        """Add the counts of another part of the same batch."""
        self.handled += other.handled
        self.duplicates += other.duplicates
        self.outside_window += other.outside_window
        self.dead += other.dead
        self.reasons.update(other.reasons)


def receive(handler: Handler[M], record: ConsumedRecord) -> Received[M]:
    """Read one record. Whatever is wrong with it is an outcome, never an error."""
    digest = hashlib.sha256(record.value or b"").digest()
    if record.damage:
        return Unreadable(record, None, MessageRejected("unreadable_record", record.damage), digest)
    try:
        message = handler.decode(record)
    except MessageRejected as rejection:
        return Unreadable(record, stated_event_id(record), rejection, digest)
    except Exception as error:
        failed = MessageRejected(HANDLER_FAILED, failure_text(error))
        return Unreadable(record, stated_event_id(record), failed, digest, error)
    return Readable(record, message.event_id, message, digest)


def is_events_fault(error: BaseException) -> bool:
    """Tell whether an event may have caused a failure, rather than the surroundings.

    Of what a database tells only data exceptions (class 22) and violated constraints with a name (class 23) may: all
    else, such as a missing column or right, befalls every event of a deployment. Of other errors all may that are not
    transient; whether they do, consumer.py finds out by comparing events.
    """
    if _is_refused_by_driver(error):
        return True
    if is_transient(error) or isinstance(error, Refused):
        return False
    if isinstance(error, DBAPIError | asyncpg.PostgresError):
        state = sqlstate(error)
        named = constraint_name(error) or getattr(error, "constraint_name", None)
        return state[:2] == _DATA_EXCEPTION or (state[:2] == _INTEGRITY_VIOLATION and named is not None)
    return True


def _is_refused_by_driver(error: BaseException) -> bool:
    """Tell whether a value does not fit its parameter, such as 2**64 a bigint: a data exception before the server."""
    cause = getattr(getattr(error, "orig", None), "__cause__", None) or error
    return isinstance(cause, asyncpg.InterfaceError) and isinstance(cause, ValueError)


class BatchSettler(Generic[M]):
    """Settles batches of one consumer group, each in one transaction."""

    def __init__(self, *, group: str, units: UnitsOfWork, handler: Handler[M], deadline_seconds: float) -> None:
        self._group = group
        self._units = units
        self._handler = handler
        self._deadline_seconds = deadline_seconds

    async def settle(self, batch: Sequence[Received[M]]) -> Settled:
        """Settle all records of the batch and commit, or raise what failed with everything rolled back."""
        for received in batch:
            if isinstance(received, Unreadable) and received.failure is not None:
                raise received.failure
        return await self._settle(batch)

    async def bury(self, received: Received[M], error: Exception) -> Settled:
        """Dead-letter a record whose handling failed when it was alone. Its mark says `dead`."""
        rejection = (
            error if isinstance(error, MessageRejected) else MessageRejected(HANDLER_FAILED, failure_text(error))
        )
        blocks = isinstance(received, Readable) and rejection.reason in (HANDLER_FAILED, KILLS)
        dead = Unreadable(received.record, received.event_id, rejection, received.digest, blocks=blocks)
        try:
            return await self._settle([dead])
        except Exception as refusal:
            if is_transient(refusal):
                raise
            log.exception("inbox.dead_letter_reduced", group=self._group, **_place(received.record))
        return await self._settle([dead], with_contents=False)

    async def _settle(self, batch: Sequence[Received[M]], *, with_contents: bool = True) -> Settled:
        deadline = _Deadline(self._deadline_seconds)
        try:
            async with self._units.begin() as work:
                await deadline.watch(work.session)
                return await self._settle_in(work, batch, with_contents=with_contents)
        finally:
            deadline.end()

    async def _settle_in(
        self, work: UnitOfWork, batch: Sequence[Received[M]], *, with_contents: bool = True
    ) -> Settled:
        session = work.session
        sorting = _Sorting[M](permanent_key=self._handler.has_permanent_key)
        floor, ceiling, some_block = await window(session, self._group)
        sorting.sort(batch, floor, ceiling)
        blocked = await self._blocked_keys(session, batch) if some_block else set()
        fresh = await self._insert_marks(session, sorting.marks)
        if len(fresh) < len(sorting.marks):
            await self._classify_known(session, sorting, fresh)
        failpoints.hit("B2")
        new = [received for received in sorting.marks.values() if received.event_id in fresh]
        rejected = await self._handle(work, sorting, new, blocked)
        failpoints.hit("B3")
        await self._flip_marks(session, rejected)
        settled = sorting.settled
        written = await insert_letters(session, self._group, sorting.letters, with_contents=with_contents)
        for letter in sorting.letters:
            record = letter.record
            place = (record.topic, record.partition, record.offset)
            if place in written:
                written.remove(place)
                settled.dead += 1
                settled.reasons[letter.reason] += 1
            else:
                settled.duplicates += 1
        await self._count(session, settled)
        return settled

    async def _insert_marks(self, session: AsyncSession, marks: dict[UUID, Received[M]]) -> set[UUID]:
        """Insert the marks, sorted so that two consumers cannot deadlock (F50); return the ids that were new."""
        if not marks:
            return set()
        ids = sorted(marks)
        rows = await session.execute(
            _INSERT_MARKS,
            {
                "group": self._group,
                "ids": ids,
                "digests": [marks[event_id].digest for event_id in ids],
                "outcomes": ["done" if isinstance(marks[event_id], Readable) else "dead" for event_id in ids],
            },
        )
        return set(rows.scalars())

    async def _classify_known(self, session: AsyncSession, sorting: _Sorting[M], fresh: set[UUID]) -> None:
        """Tell duplicates from second payloads under a known id (a producer's fault, never handled)."""
        known = {event_id: received for event_id, received in sorting.marks.items() if event_id not in fresh}
        rows = await session.execute(_SELECT_DIGESTS, {"group": self._group, "ids": sorted(known)})
        digests = {event_id: bytes(digest) for event_id, digest in rows}
        for event_id, received in known.items():
            if event_id not in digests:
                # Its partition was dropped between the two statements: the floor has risen, so look again.
                raise Unavailable("a dedup partition was dropped under this batch")
            sorting.repeated(received, digests[event_id])

    async def _blocked_keys(self, session: AsyncSession, batch: Sequence[Received[M]]) -> set[tuple[str, bytes | None]]:
        """Return topics and keys of which an earlier event failed, so that new ones have to wait behind it.

        Under the group's lock, which who settles such a letter holds alone: it sees all that wait behind it, and what
        finds the key free comes after it.
        """
        await session.execute(_SHARE_LETTERS, {"name": letters_lock(self._group)})
        places = {(received.record.topic, received.record.key) for received in batch if received.record.key is not None}
        rows = await session.execute(
            _BLOCKED,
            {
                "group": self._group,
                "topics": [topic for topic, _ in places],
                "keys": [key for _, key in places],
            },
        )
        return {(topic, bytes(key)) for topic, key in rows}

    async def _handle(
        self,
        work: UnitOfWork,
        sorting: _Sorting[M],
        new: Iterable[Received[M]],
        blocked: set[tuple[str, bytes | None]],
    ) -> list[UUID]:
        """Give new events to the handler, count its results, and return the ids that are dead letters instead."""
        settled = sorting.settled
        readable = {received.event_id: received for received in new if isinstance(received, Readable)}
        for received in new:
            if isinstance(received, Unreadable):
                sorting.letters.append(_letter(received))
        chosen = {**readable, **sorting.unmarked}
        behind = [id_ for id_, event in chosen.items() if (event.record.topic, event.record.key) in blocked]
        for event_id in behind:
            sorting.letters.append(Letter.behind(chosen.pop(event_id).record, event_id))
        held_up = [event_id for event_id in behind if event_id in readable]
        if not chosen:
            return held_up
        events = [Incoming(event_id, chosen[event_id].message, chosen[event_id].record) for event_id in sorted(chosen)]
        rejections = await self._handler.handle(work, events)
        for event in events:
            rejection = rejections.get(event.event_id)
            if rejection is not None:
                sorting.letters.append(Letter.rejected(event.record, event.event_id, rejection))
            elif event.event_id in readable:
                settled.handled += 1
            else:
                settled.outside_window += 1
        return sorted({*held_up, *(readable.keys() & rejections.keys())})

    async def _flip_marks(self, session: AsyncSession, event_ids: Sequence[UUID]) -> None:
        if event_ids:
            await session.execute(_FLIP_MARKS, {"group": self._group, "ids": event_ids})

    async def _count(self, session: AsyncSession, settled: Settled) -> None:
        """Count the batch: in this transaction, so that the sums are exact whatever is killed when."""
        await session.execute(
            _COUNT,
            {
                "group": self._group,
                "handled": settled.handled,
                "duplicates": settled.duplicates,
                "dead": settled.dead,
                "outside_window": settled.outside_window,
            },
        )


class _Sorting(Generic[M]):
    """The records of a batch, sorted by what is to be done with them before any mark is made."""

    def __init__(self, *, permanent_key: bool) -> None:
        self._permanent_key = permanent_key
        self.marks: dict[UUID, Received[M]] = {}
        self.unmarked: dict[UUID, Readable[M]] = {}
        self.letters: list[Letter] = []
        self.settled = Settled()

    def sort(self, batch: Sequence[Received[M]], floor: UUID, ceiling: UUID) -> None:
        """Sort a batch; event ids below `floor` have no partition any more, those from `ceiling` on none yet."""
        for received in batch:
            event_id = received.event_id
            if event_id is not None and floor <= event_id < ceiling:
                first = self.marks.setdefault(event_id, received)
                if first is not received:
                    self.repeated(received, first.digest)
            elif isinstance(received, Unreadable):
                self.letters.append(_letter(received))
            elif received.event_id >= ceiling:
                self._reject(received, "event_id_in_future", "the event id's time is more than a day ahead")
            elif not self._permanent_key:
                self._reject(received, "outside_dedup_window", "older than the marks that are kept")
            else:
                older = self.unmarked.setdefault(received.event_id, received)
                if older is not received:
                    self.repeated(received, older.digest)

    def repeated(self, received: Received[M], known_digest: bytes) -> None:
        """Sort a record whose event id is known: the same payload is a duplicate, another one is a fault."""
        if received.digest == known_digest:
            self.settled.duplicates += 1
        else:
            self._reject(received, "payload_mismatch", "this event id came before with another payload")

    def _reject(self, received: Received[M], reason: str, detail: str) -> None:
        self.letters.append(Letter(received.record, received.event_id, reason, detail))


class _Deadline:
    """Ends a batch whose database does not answer, by closing the connection under it.

    The server's own limits (transaction_timeout, lock_timeout) come first; this is for a server that is frozen or a
    network that swallows packets. Cancelling a query would leave the pool in doubt (field report F37); a closed
    connection is an ordinary, transient failure.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None

    async def watch(self, session: AsyncSession) -> None:
        connection: Any = await (await session.connection()).get_raw_connection()
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._close, connection.driver_connection)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _close(self, driver_connection: Any) -> None:
        log.error("inbox.batch_deadline_passed", deadline_seconds=self._seconds)
        driver_connection.terminate()


async def window(session: AsyncSession, group: str) -> tuple[UUID, UUID, bool]:
    """Return the lowest event id that may have a mark, the lowest that is too far in the future, and whether letters
    of the group block keys."""
    floor, now, some_block = (await session.execute(_WINDOW, {"group": group})).one()
    moment: datetime = now
    return UUID(str(floor)), lowest_id_at(moment + FUTURE_TOLERANCE), bool(some_block)


def letters_lock(group: str) -> str:
    """Return the name of the lock between batches and who settles letters that block a key."""
    return f"dead letters of {group}"


def _letter(received: Unreadable) -> Letter:
    rejection = received.rejection
    return Letter(received.record, received.event_id, rejection.reason, rejection.detail, received.blocks)


def _place(record: ConsumedRecord) -> dict[str, object]:
    return {"topic": record.topic, "partition": record.partition, "offset": record.offset}


_WINDOW = text("""
    SELECT event_id, clock_timestamp(),
           EXISTS (SELECT FROM dead_letter WHERE consumer_group = :group AND blocks AND status = 'open')
    FROM dedup_floor
""")

_SHARE_LETTERS = text("SELECT pg_advisory_xact_lock_shared(hashtextextended(:name, 0))")

_BLOCKED = text("""
    SELECT DISTINCT p.topic, p.key
    FROM unnest(CAST(:topics AS text[]), CAST(:keys AS bytea[])) AS p (topic, key)
    JOIN dead_letter d ON d.consumer_group = :group AND d.source_topic = p.topic AND sha256(d.key) = sha256(p.key)
                          AND d.blocks AND d.status = 'open'
""")

_INSERT_MARKS = text("""
    INSERT INTO processed_event (event_id, consumer_group, payload_digest, outcome)
    SELECT m.event_id, :group, m.payload_digest, m.outcome
    FROM unnest(CAST(:ids AS uuid[]), CAST(:digests AS bytea[]), CAST(:outcomes AS text[]))
         AS m (event_id, payload_digest, outcome)
    ORDER BY m.event_id
    ON CONFLICT (event_id, consumer_group) DO NOTHING
    RETURNING event_id
""")

_SELECT_DIGESTS = text("""
    SELECT event_id, payload_digest FROM processed_event
    WHERE consumer_group = :group AND event_id = ANY (CAST(:ids AS uuid[]))
""")

_FLIP_MARKS = text("""
    UPDATE processed_event SET outcome = 'dead'
    WHERE consumer_group = :group AND event_id = ANY (CAST(:ids AS uuid[]))
""")

_COUNT = text("""
    INSERT INTO inbox_tally (consumer_group, handled, duplicates, dead, outside_window)
    VALUES (:group, :handled, :duplicates, :dead, :outside_window)
""")
