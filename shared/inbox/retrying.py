"""Dead letters are retried here: by themselves after a while, or when a person asked for it (field report F34).

A retry runs through the same handler straight into this consumer group, never back to the topic, where other groups
would read it again. The attempt is counted and committed before the handler sees the event (F35); mark, effect and the
letter's end are one transaction. One at a time, in the order of a key. What passes counts no attempt, and when several
letters in a row fail, the rest of that request waits for a person again: the cause is not mended.
"""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass
from typing import Generic

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from shared import failpoints
from shared.errors import MessageRejected, is_transient
from shared.inbox import letters, metrics
from shared.inbox.batch import Readable, is_events_fault, receive, window
from shared.inbox.dead_letters import HANDLER_FAILED, failure_text
from shared.inbox.letters import DueLetter
from shared.inbox.messages import Handler, Incoming, M
from shared.lifecycle import READY, BackgroundService, Readiness, State
from shared.telemetry import continued_from, tracer
from shared.unit_of_work import UnitsOfWork

log = structlog.get_logger(__name__)

FAILURES_IN_A_ROW = 3


class Result(enum.StrEnum):
    """What became of a retry."""

    RESOLVED = "resolved"
    FAILED = "failed"
    DECIDED = "decided"  # by somebody else, meanwhile


@dataclass(frozen=True, slots=True)
class RetrySettings:
    """How letters are looked for. A retry that does not end within the lease is given to another process, once."""

    poll_seconds: float = 1.0
    lease_seconds: float = 60.0
    put_back_seconds: float = 5.0
    measure_seconds: float = 5.0


class DeadLetterRetrier(BackgroundService, Generic[M]):
    """Retries the due letters of one group. Any number may run: each letter is one process's at a time."""

    def __init__(
        self, *, group: str, units: UnitsOfWork, handler: Handler[M], settings: RetrySettings | None = None
    ) -> None:
        super().__init__()
        self.name = f"dead-letters-{group}"
        self._group = group
        self._units = units
        self._handler = handler
        self._settings = settings or RetrySettings()
        self._failures = 0
        self._stopped = ""
        self._measure_at = 0.0
        self._reasons: set[str] = set()

    async def run(self) -> None:
        while not self.stopping.is_set():
            await self._measure()
            result = await self.retry_next()
            self.backoff.reset()
            self.readiness = Readiness(State.DEGRADED, self._stopped) if self._stopped else READY
            if result is None:
                await self.pause(self._settings.poll_seconds)

    async def _measure(self) -> None:
        """Bring the gauges up to date, once in a while."""
        now = time.monotonic()
        if now < self._measure_at:
            return
        async with self._units.begin() as work:
            by_reason, oldest = await letters.open_letters(work.session, self._group)
        self._reasons |= by_reason.keys()
        for reason in self._reasons:
            metrics.LETTERS_OPEN.labels(self._group, reason).set(by_reason.get(reason, 0))
        metrics.OLDEST_LETTER.labels(self._group).set(oldest)
        self._measure_at = now + self._settings.measure_seconds

    async def retry_next(self) -> Result | None:
        """Retry the letter that has been due for longest; None when none is. Raises what is no event's fault."""
        async with self._units.begin() as work:
            letter = await letters.begin_retry(work.session, self._group, self._settings.lease_seconds)
        if letter is None:
            return None
        error: Exception | None = None
        try:
            result, error = await self._retry(letter)
        except Exception as failure:
            if not is_events_fault(failure):
                await self._put_back(letter)
                raise
            result, error = await self._note(letter, HANDLER_FAILED, failure_text(failure)), failure
        metrics.RETRIES.labels(self._group, result).inc()
        log.info(
            "inbox.dead_letter_retried",
            group=self._group,
            letter=letter.letter_id,
            attempt=letter.attempts,
            result=result,
            error="" if error is None else failure_text(error),
        )
        await self._judge(letter, result, error)
        return result

    async def _retry(self, letter: DueLetter) -> tuple[Result, MessageRejected | None]:
        """Give the letter's event to the handler and settle the letter, in one transaction."""
        received = receive(self._handler, letter.record)
        if not isinstance(received, Readable):
            if received.failure is not None:
                raise received.failure
            return await self._note(letter, received.rejection.reason, received.rejection.detail), received.rejection
        carried = {name: value.decode("ascii", "replace") for name, value in letter.record.headers if value is not None}
        with tracer.start_as_current_span("inbox.retry", context=continued_from(carried)) as span:
            span.set_attribute("letter", letter.letter_id)
            try:
                async with self._units.begin() as work:
                    if not await letters.lock_for_settling(work.session, self._group, letter):
                        return Result.DECIDED, None
                    if await self._is_new(work.session, received):
                        event = Incoming(received.event_id, received.message, received.record)
                        rejection = (await self._handler.handle(work, [event])).get(received.event_id)
                        if rejection is not None:
                            raise rejection  # takes the mark back
                    failpoints.hit("L1")
                    await letters.settle_letter(work.session, self._group, letter.letter_id, "resolved")
            except MessageRejected as rejection:
                return await self._note(letter, rejection.reason, rejection.detail), rejection
        return Result.RESOLVED, None

    async def _is_new(self, session: AsyncSession, received: Readable[M]) -> bool:
        """Mark the event as handled; False when it was already. Raises MessageRejected when it must not be handled."""
        floor, ceiling, _ = await window(session, self._group)
        if received.event_id >= ceiling:
            raise MessageRejected("event_id_in_future", "the event id's time is more than a day ahead")
        if received.event_id < floor:
            if not self._handler.has_permanent_key:
                raise MessageRejected("outside_dedup_window", "older than the marks that are kept")
            return True
        was = await letters.take_mark(session, self._group, received.event_id, received.digest)
        if was == "other":
            raise MessageRejected("payload_mismatch", "this event id came before with another payload")
        return was != "done"

    async def _note(self, letter: DueLetter, reason: str, error: str) -> Result:
        async with self._units.begin() as work:
            if not await letters.lock_for_settling(work.session, self._group, letter):
                return Result.DECIDED
            await letters.note_failure(work.session, self._group, letter, reason, error)
        return Result.FAILED

    async def _put_back(self, letter: DueLetter) -> None:
        """The surroundings failed, not the event. If this fails too, the lease's end gives the letter back."""
        try:
            async with self._units.begin() as work:
                await letters.put_back(work.session, letter, self._settings.put_back_seconds)
        except Exception as error:
            if not is_transient(error):
                raise

    async def _judge(self, letter: DueLetter, result: Result, error: Exception | None) -> None:
        """After several failures of our code in a row, leave the rest of the request to a person."""
        if result is Result.RESOLVED:
            self._failures, self._stopped = 0, ""
        if result is not Result.FAILED or isinstance(error, MessageRejected):
            return
        self._failures += 1
        if self._failures < FAILURES_IN_A_ROW:
            return
        self._failures = 0
        async with self._units.begin() as work:
            stopped = await letters.stop_request(work.session, self._group, letter.letter_id)
        if stopped:
            self._stopped = (
                f"{FAILURES_IN_A_ROW} retries of dead letters in a row failed, so the other {stopped} of that request "
                "were not tried and wait again. Nothing is lost and nothing was done twice: mend the cause (see "
                "`dead-letters show`), then retry them"
            )
            log.error("inbox.retries_stopped", group=self._group, letters=stopped, meaning=self._stopped)
