"""The charge executor: claims due charges, asks the provider, records what came of it.

Claim and commit; call, with no transaction open; settle and publish in one transaction. A crash at any point leaves a
lease that ends, and then the same bytes go out again with the same key: the provider moves the money once.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import structlog
from opentelemetry.trace import SpanKind

from billing_service import metrics, repository
from billing_service.breaker import BreakerState, CircuitBreaker
from billing_service.charge import (
    Aborted,
    ClaimedCharge,
    NextStep,
    Outcome,
    RetryPolicy,
    Review,
    Settle,
    TryAgain,
    Unknown,
    next_step,
)
from billing_service.events import PaymentEvent
from billing_service.gateway import PaymentGateway
from shared import failpoints
from shared.errors import Refused
from shared.inbox.batch import is_events_fault
from shared.lifecycle import READY, BackgroundService, Backoff, Readiness, State, describe
from shared.telemetry import continued_from, tracer
from shared.unit_of_work import UnitsOfWork

log = structlog.get_logger(__name__)

CHANNEL = "charge_requested"
"""What the inbox notifies after it committed new charges."""

LEASE_MARGIN_SECONDS = 5.0
"""A lease outlives the call's deadline by at least this, so that an answer can be recorded before it ends."""


@dataclass(frozen=True, slots=True)
class ExecutorSettings:
    """Limits of one executor. A call's deadline is shorter than the lease, the window shorter than the provider's."""

    calls_at_once: int = 16
    call_deadline_seconds: float = 10.0
    lease_seconds: float = 30.0
    idempotency_window_seconds: float = 23 * 3600.0
    poll_seconds: float = 0.5
    drain_seconds: float = 5.0
    retry: RetryPolicy = field(default_factory=RetryPolicy)

    def __post_init__(self) -> None:
        if self.lease_seconds < self.call_deadline_seconds + LEASE_MARGIN_SECONDS:
            raise Refused(
                f"a lease of {self.lease_seconds:g} s may end during a call of {self.call_deadline_seconds:g} s; "
                f"set the lease at least {LEASE_MARGIN_SECONDS:g} s longer than the call's deadline"
            )


@dataclass(frozen=True, slots=True)
class _Answer:
    """What to record of one attempt, and who waits for it."""

    claimed: ClaimedCharge
    step: NextStep
    recorded: asyncio.Future[None]


class ChargeExecutor(BackgroundService):
    """Sends due charges to the provider, a bounded number at once, each under a lease with the attempt as fence."""

    name = "executor"

    def __init__(
        self,
        units: UnitsOfWork,
        gateway: PaymentGateway,
        settings: ExecutorSettings,
        breaker: CircuitBreaker | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.owner = uuid.uuid4()
        self.breaker = breaker or CircuitBreaker(settings.calls_at_once)
        self._units = units
        self._gateway = gateway
        self._settings = settings
        self._clock = clock
        self._due = asyncio.Event()
        self._attempts: set[asyncio.Task[None]] = set()
        self._calls: set[asyncio.Task[Outcome]] = set()
        self._answers: list[_Answer] = []
        self._recorder: asyncio.Task[None] | None = None
        self._record_problem = ""
        self._last_state = BreakerState.CLOSED
        self._outside_of_spans = contextvars.copy_context()

    # ------------------------------------------------------------------------------------------ lifecycle

    def wake(self) -> None:
        """Look for due charges now: the listener's callback."""
        self._due.set()

    def ready(self) -> Readiness:
        if self.readiness.state is State.READY and self.breaker.state is not BreakerState.CLOSED:
            return Readiness(State.DEGRADED, f"charges wait and lose nothing: {self.breaker.reason}")
        if self.readiness.state is State.READY and self._record_problem:
            return Readiness(State.DEGRADED, self._record_problem)
        return self.readiness

    async def start(self) -> None:
        self._outside_of_spans = contextvars.copy_context()
        await self._gateway.open()
        await super().start()

    async def stop(self) -> None:
        """Claim no more, let calls in flight end, hang up on those that take too long, record all of them."""
        await super().stop()
        if self._calls:
            await asyncio.wait(self._calls, timeout=self._settings.drain_seconds)
        for call in self._calls:
            call.cancel()  # a wait on the network, never a query; recorded as Aborted, which ends the lease
        if self._attempts:
            _, unrecorded = await asyncio.wait(self._attempts, timeout=self.stop_deadline_seconds / 2)
            if unrecorded:
                log.warning("executor.answers_not_recorded", charges=len(unrecorded), meaning="their leases end alone")
            await _cancelled([*unrecorded, *([self._recorder] if self._recorder else [])])
        await self._gateway.close()

    async def run(self) -> None:
        """Claim whenever a call may begin; wait for a wake-up, an ended call or the poll."""
        while not self.stopping.is_set():
            self._due.clear()
            claimed = await self._claim()
            self.readiness = READY
            self.backoff.reset()
            if not claimed:
                await self._wait()

    async def _wait(self) -> None:
        self._tell_breaker()
        paused_seconds = self.breaker.seconds_until_allowed()
        if paused_seconds > 0:
            await self.pause(paused_seconds)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.poll_seconds):
                await self._due.wait()

    # ---------------------------------------------------------------------------------------------- claim

    async def _claim(self) -> Sequence[ClaimedCharge]:
        """Lease due charges for the free calls, commit, and begin the calls."""
        limit = self.breaker.allowance(len(self._attempts))
        if limit == 0:
            return ()
        # Measured before the database sets the lease: ours ends no later than what the others see.
        lease_ends = self._clock() + self._settings.lease_seconds
        async with self._units.begin() as work:
            claims = await repository.claim_due(
                work.session,
                self.owner,
                limit,
                self._settings.lease_seconds,
                self._settings.idempotency_window_seconds,
            )
        for order_id, reason in claims.reviewed:
            metrics.REVIEWS.labels(reason).inc()
            log.error("executor.needs_review", order_id=order_id, reason=reason)
        for claimed in claims.claimed:
            failpoints.hit("C1")
            attempt = asyncio.create_task(self._attempt(claimed, lease_ends))
            self._attempts.add(attempt)
            attempt.add_done_callback(self._attempt_done)
        return claims.claimed

    def _attempt_done(self, attempt: asyncio.Task[None]) -> None:
        self._attempts.discard(attempt)
        self._due.set()
        if not attempt.cancelled() and (error := attempt.exception()) is not None:
            log.error("executor.attempt_failed", error=describe(error), exc_info=error)

    # ----------------------------------------------------------------------------------------------- call

    async def _attempt(self, claimed: ClaimedCharge, lease_ends: float) -> None:
        """One call and the record of what came of it, in the trace of the order's request."""
        headers = {"traceparent": claimed.traceparent} if claimed.traceparent else {}
        with tracer.start_as_current_span("charge", context=continued_from(headers), kind=SpanKind.CLIENT) as span:
            span.set_attribute("order_id", claimed.order_id)
            span.set_attribute("attempt", claimed.attempt)
            outcome = await self._call(claimed, lease_ends)
            failpoints.hit("C3")
            self._tell_breaker()
            metrics.ATTEMPTS.labels(type(outcome).__name__).inc()
            span.set_attribute("outcome", type(outcome).__name__)
            step = next_step(outcome, claimed.attempt, self._settings.retry)
            if not isinstance(step, Settle):
                log.warning(
                    "executor.not_settled",
                    order_id=claimed.order_id,
                    event_id=str(claimed.event_id),
                    attempt=claimed.attempt,
                    outcome=str(outcome),
                    next_step=str(step),
                )
            await self._record(claimed, step)

    async def _call(self, claimed: ClaimedCharge, lease_ends: float) -> Outcome:
        """Call the provider while the lease surely holds; what waited too long, or until we stop, goes back unsent.

        So does a charge that was claimed before the breaker opened.
        """
        if self.stopping.is_set():
            return Aborted()
        if lease_ends - self._clock() < self._settings.call_deadline_seconds + LEASE_MARGIN_SECONDS / 2:
            log.warning("executor.lease_nearly_over", order_id=claimed.order_id, attempt=claimed.attempt)
            return Aborted()
        admitted = self.breaker.begin()
        if admitted is None:
            return Aborted()
        outcome: Outcome = Aborted()
        try:
            outcome = await self._ask(claimed)
        finally:
            self.breaker.record(outcome, admitted)
        return outcome

    async def _ask(self, claimed: ClaimedCharge) -> Outcome:
        call = asyncio.create_task(self._gateway.charge(claimed, self._settings.call_deadline_seconds))
        self._calls.add(call)
        try:
            await asyncio.wait({call})
        finally:
            self._calls.discard(call)
        if call.cancelled():
            return Aborted()
        if (error := call.exception()) is not None:
            log.error("executor.call_failed", order_id=claimed.order_id, error=describe(error), exc_info=error)
            return Unknown("client_fault")
        return call.result()

    # --------------------------------------------------------------------------------------------- record

    async def _record(self, claimed: ClaimedCharge, step: NextStep) -> None:
        """Wait until the step is recorded. Answers that come during a transaction share the next one."""
        recorded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answers.append(_Answer(claimed, step, recorded))
        if self._recorder is None or self._recorder.done():
            # Outside of this attempt's span: the transaction is that of many.
            self._recorder = asyncio.create_task(self._record_answers(), context=self._outside_of_spans)
        await recorded

    async def _record_answers(self) -> None:
        backoff = Backoff()
        while self._answers:
            batch, self._answers = self._answers, []
            failure = await self._record_batch(batch)
            if failure is None:
                backoff.reset()
                self._record_problem = ""
            else:
                # An answer is kept for as long as this process lives: its fence tells whether it still counts.
                self._answers = batch + self._answers
                self._record_problem = f"answers of the provider wait to be recorded: {describe(failure)}"
                log.warning("executor.record_failed", charges=len(batch), error=describe(failure))
                await asyncio.sleep(backoff.next_seconds())

    async def _record_batch(self, batch: list[_Answer]) -> Exception | None:
        """Record the answers and drop them from the batch; return why those that are left must be tried again.

        If an answer itself is at fault, it is found, and its neighbours are recorded.
        """
        try:
            await self._write(batch)
        except Exception as error:
            if not is_events_fault(error):
                return error
            if len(batch) == 1:
                _resolve(batch.pop(), error)
                return None
        else:
            while batch:
                _resolve(batch.pop())
            return None
        for answer in tuple(batch):
            failure = await self._record_batch([answer])
            if failure is not None:
                return failure
            batch.remove(answer)
        return None

    async def _write(self, batch: Sequence[_Answer]) -> None:
        """Settle charges and publish their events in one transaction; what another process has claimed is dropped."""
        settle = [(answer.claimed, answer.step) for answer in batch if isinstance(answer.step, Settle)]
        review = [(answer.claimed, answer.step) for answer in batch if isinstance(answer.step, Review)]
        again = [(answer.claimed, answer.step.after_seconds) for answer in batch if isinstance(answer.step, TryAgain)]
        recorded: set[uuid.UUID] = set()
        async with self._units.begin() as work:
            if settle:
                settled = await repository.settle(work.session, settle)
                recorded.update(charge.charge_id for charge in settled)
                for charge in settled:
                    work.publish(PaymentEvent.from_charge(charge).to_outgoing())
                work.before_commit.append(partial(failpoints.hit, "C4"))
            if review:
                recorded |= await repository.send_to_review(work.session, review)
            if again:
                recorded |= await repository.try_again_later(work.session, again)
        failpoints.hit("C5")
        self._tell_recorded(batch, recorded)

    def _tell_recorded(self, batch: Sequence[_Answer], recorded: set[uuid.UUID]) -> None:
        for answer in batch:
            claimed, step = answer.claimed, answer.step
            if claimed.charge_id not in recorded:
                metrics.FENCES_LOST.inc()
                log.warning(
                    "executor.lease_lost", order_id=claimed.order_id, attempt=claimed.attempt, dropped=str(step)
                )
            elif isinstance(step, Settle):
                metrics.SETTLED.labels(step.state).inc()
                log.info("executor.settled", order_id=claimed.order_id, state=step.state, attempt=claimed.attempt)
            elif isinstance(step, Review):
                metrics.REVIEWS.labels(step.reason).inc()
                log.error("executor.needs_review", order_id=claimed.order_id, reason=step.reason)

    def _tell_breaker(self) -> None:
        state = self.breaker.state
        metrics.tell_breaker(state)
        if state is not self._last_state:
            log.warning("executor.breaker", before=self._last_state, now=state, reason=self.breaker.reason)
            self._last_state = state


def _resolve(answer: _Answer, error: Exception | None = None) -> None:
    if answer.recorded.done():
        return  # whoever waited is gone
    if error is None:
        answer.recorded.set_result(None)
    else:
        answer.recorded.set_exception(error)


async def _cancelled(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
