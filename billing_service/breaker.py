"""When to call the provider at all, and how many calls at once: a circuit breaker with an adaptive limit."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from billing_service.charge import (
    Aborted,
    AnswerContradicts,
    Captured,
    Declined,
    Forbidden,
    KeyReused,
    Outcome,
    RequestRefused,
    SlowDown,
    StillRunning,
    Unknown,
)
from shared.lifecycle import Backoff


class BreakerState(enum.StrEnum):
    """Closed calls, open does not, half-open calls once to see."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class Admitted:
    """A call that may run. `openings` is how often the breaker had opened before the call began."""

    openings: int
    is_probe: bool


class CircuitBreaker:
    """Opens after a run of failures, or at once when the provider does not know us; then tries one call at a time.

    "Slow down" (429) halves the number of calls at once and pauses new ones; each answer raises it by one again.
    """

    def __init__(
        self,
        calls_at_once: int,
        failures_to_open: int = 10,
        first_pause_seconds: float = 1.0,
        most_pause_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._calls_at_once = calls_at_once
        self._failures_to_open = failures_to_open
        self._most_pause_seconds = most_pause_seconds
        self._backoff = Backoff(first_pause_seconds, most_pause_seconds)
        self._clock = clock
        self._limit = calls_at_once
        self._failures = 0
        self._open = False
        self._openings = 0
        self._paused_until = 0.0
        self._probing = False
        self.reason = ""

    @property
    def state(self) -> BreakerState:
        """Where the breaker stands now."""
        if not self._open:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self.seconds_until_allowed() > 0 else BreakerState.HALF_OPEN

    def seconds_until_allowed(self) -> float:
        """Return how long no call may begin, 0 when one may."""
        return max(0.0, self._paused_until - self._clock())

    def allowance(self, in_flight: int) -> int:
        """Return how many charges to claim now. It may change until they are claimed: `begin` has the last word."""
        if self.seconds_until_allowed() > 0:
            return 0
        if self._open:
            return 0 if self._probing else 1
        return max(0, self._limit - in_flight)

    def begin(self) -> Admitted | None:
        """Admit a call that begins now, to be told to `record`; None means that it must not begin.

        While half-open one call at a time is admitted, as the probe.
        """
        if self.seconds_until_allowed() > 0 or (self._open and self._probing):
            return None
        self._probing = self._open
        return Admitted(self._openings, self._open)

    def record(self, outcome: Outcome, call: Admitted) -> None:
        """Learn from the end of a call."""
        if call.is_probe:
            self._probing = False
        match outcome:
            case Captured() | Declined() | KeyReused() | RequestRefused() | AnswerContradicts():
                self._answered()
            case Unknown(why):
                self._failed(f"the last {self._failures + 1} calls failed ({why})", call)
            case Forbidden(status):
                self._failed(f"the provider answers {status}; check its address and the API key", call, now=True)
            case SlowDown(retry_after):
                self._limit = max(1, self._limit // 2)
                # The refused charge waits as long as it was told to; the others must not wait for an hour with it.
                self._pause(min(1.0 if retry_after is None else retry_after, self._most_pause_seconds))
            case StillRunning() | Aborted():
                pass
            case _:
                assert_never(outcome)

    def _answered(self) -> None:
        self._open = False
        self._failures = 0
        self._backoff.reset()
        self._limit = min(self._calls_at_once, self._limit + 1)
        self.reason = ""

    def _failed(self, reason: str, call: Admitted, *, now: bool = False) -> None:
        """Count a failure, unless the call is older than the last opening: it tells nothing new then."""
        if call.openings < self._openings:
            return
        self._failures += 1
        if call.is_probe or now or self._failures >= self._failures_to_open:
            self._open = True
            self._openings += 1
            self.reason = reason
            self._pause(self._backoff.next_seconds())

    def _pause(self, seconds: float) -> None:
        self._paused_until = max(self._paused_until, self._clock() + seconds)
