"""Background services: each starts, stops and tells whether it is ready. A process is a set of them.

A neighbour's failure is a state of the loop, never an exit: what `run` raises is logged and `run` begins again after a
backoff with jitter. Stopping sets a flag that `run` looks at between units of work; nothing is cancelled in mid-query.
"""

from __future__ import annotations

import asyncio
import enum
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

import structlog

from shared.errors import Refused, is_transient, sqlstate

log = structlog.get_logger(__name__)


class State(enum.StrEnum):
    """What a service can say of itself. Degraded still takes work; down does not."""

    READY = "ready"
    DEGRADED = "degraded"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class Readiness:
    """A state, and for other states than ready the reason in a sentence for the person on call."""

    state: State
    reason: str = ""


READY = Readiness(State.READY)


class Service(Protocol):
    """What a process starts and stops."""

    name: str

    async def start(self) -> None:
        """Return when the service runs; never fails because a neighbour is away."""

    async def stop(self) -> None:
        """Finish or roll back the unit in hand, within the service's own deadline."""

    def ready(self) -> Readiness:
        """Tell the current state without waiting for anything."""


class Backoff:
    """Seconds to wait before the next try: exponential with full jitter, from `first` to `most`, until `reset`."""

    def __init__(self, first_seconds: float = 0.1, most_seconds: float = 5.0) -> None:
        self._first = first_seconds
        self._most = most_seconds
        self._failures = 0

    def next_seconds(self) -> float:
        """Return the next wait and count one more failure."""
        ceiling = min(self._most, self._first * 2**self._failures)
        self._failures = min(self._failures + 1, 30)
        return random.uniform(ceiling / 2, ceiling)  # noqa: S311 - spreads retries, guards no secret

    def reset(self) -> None:
        """Forget the failures: work succeeded."""
        self._failures = 0


class BackgroundService:
    """A service whose work is one coroutine, `run`, that returns when `stopping` is set."""

    name = "background"
    stop_deadline_seconds = 20.0

    def __init__(self) -> None:
        self.stopping = asyncio.Event()
        self.readiness = Readiness(State.DOWN, "not started yet")
        self.backoff = Backoff()
        self._task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Do the work until `stopping` is set. Whatever it raises is logged, and it is called again."""
        raise NotImplementedError

    def wake(self) -> None:
        """Interrupt a wait; services that sleep on something else than `stopping` override it."""

    async def start(self) -> None:
        self.stopping.clear()
        self._task = asyncio.create_task(self._supervise(), name=self.name)

    async def stop(self) -> None:
        self.stopping.set()
        self.wake()
        if self._task is None:
            return
        done, _ = await asyncio.wait({self._task}, timeout=self.stop_deadline_seconds)
        if not done:
            # The process is about to end, and with it its connections: PostgreSQL rolls back what was open.
            log.error("service.stop_deadline_passed", service=self.name, deadline_seconds=self.stop_deadline_seconds)
            self._task.cancel()
            with suppress(asyncio.CancelledError, TimeoutError):
                await asyncio.wait_for(self._task, 2.0)
        self.readiness = Readiness(State.DOWN, "stopped")

    def ready(self) -> Readiness:
        if self._task is not None and self._task.done() and not self.stopping.is_set():
            return Readiness(State.DOWN, "ended unexpectedly; restart this process and report the error in its log")
        return self.readiness

    async def pause(self, seconds: float) -> None:
        """Wait, or return at once when the service is stopping."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.stopping.wait()

    async def _supervise(self) -> None:
        while not self.stopping.is_set():
            try:
                await self.run()
            except Refused as refusal:
                self.readiness = Readiness(State.DOWN, refusal.detail)
                log.error("service.refused", service=self.name, reason=refusal.detail)
                await self.pause(max(1.0, self.backoff.next_seconds()))
            except asyncio.CancelledError as error:
                if is_cancelled():
                    raise
                # A library let the cancellation of a task of its own out; nobody asked this service to end.
                await self._failed(error)
            except Exception as error:
                await self._failed(error)

    async def _failed(self, error: BaseException) -> None:
        wait = self.backoff.next_seconds()
        self.readiness = Readiness(State.DEGRADED, f"{type(error).__name__}; trying again")
        try:
            passing = is_transient(error)
        except Exception:  # a verdict on an error must never end the service
            passing = False
        if passing:
            log.warning("service.failed", service=self.name, error=describe(error), retry_in_seconds=round(wait, 2))
        else:
            log.error("service.failed", service=self.name, retry_in_seconds=round(wait, 2), exc_info=error)
        await self.pause(wait)


def is_cancelled() -> bool:
    """Tell whether somebody asked the current task to end, when a CancelledError may also be a library's own."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def describe(error: BaseException) -> str:
    """Return class and first line of an error, with a remedy where that is plain; no statements and parameters."""
    first_line = (str(error).splitlines() or [""])[0]
    remedy = _LOST_PREPARED_STATEMENT if sqlstate(error) in _PREPARED_STATEMENT_STATES else ""
    return f"{type(error).__name__}: {first_line[:300]}{remedy}"


# Of a statement that the session does not know, and of one that it has already: another session's.
_PREPARED_STATEMENT_STATES = ("26000", "42P05")
_LOST_PREPARED_STATEMENT = (
    ". The address leads through a proxy that does not carry prepared statements: PgBouncer 1.21 or newer with "
    "max_prepared_statements above 0 does; or set the …_DATABASE_URL to the database's direct address"
)


@asynccontextmanager
async def running(services: Sequence[Service]) -> AsyncIterator[None]:
    """Start services in order; stop all of them together at the end."""
    try:
        for service in services:
            await service.start()
        yield
    finally:
        results = await asyncio.gather(*(service.stop() for service in services), return_exceptions=True)
        for service, result in zip(services, results, strict=True):
            if isinstance(result, Exception):
                log.error("service.stop_failed", service=service.name, error=describe(result))
