"""Who is at fault when the handler fails on an event that is alone: that event, or our code?

A deployment's bug fails every event, a poison only itself, so events are compared. An event is dead-lettered
- at once when the handler takes another event of the same batch;
- at once when it is the only one of its batch, and since the last event that the handler took at most one other failed;
- when it is the only one, and the handler took none since this process began: after LONE_ATTEMPTS tries over the lone
  patience, for nothing waits behind it meanwhile, and the next event that comes makes it another case.

Otherwise our code is at fault (DISTINCT_FAILURES events in a row, or all of a batch): nothing is dead-lettered, and the
same events are tried again together with what comes behind them, until the handler takes one. So a rolled-back
deployment goes on by itself, and a healthy event never waits for a poison.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from shared.errors import ServiceError
from shared.kafka.records import ConsumedRecord

DISTINCT_FAILURES = 3
LONE_ATTEMPTS = 5


class HandlerFails(ServiceError):
    """The handler fails, and no event shows that it works."""

    code = "handler-fails"


class Blame:
    """What one consumer knows of its handler: whether it took events, and which failed since."""

    def __init__(self, lone_patience_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lone_patience_seconds = lone_patience_seconds
        self._clock = clock
        self._works = False
        self._fails_on_all = False
        self._failed: set[tuple[str, int, int]] = set()
        self._lone: tuple[str, int, int] | None = None
        self._attempts = 0
        self._since = 0.0

    def handler_took_events(self) -> None:
        """Note that the handler works."""
        self._works = True
        self._fails_on_all = False
        self._failed.clear()
        self._lone = None

    def judge(self, failed: Sequence[tuple[ConsumedRecord, Exception]]) -> None:
        """Return when the events of a batch are at fault, of which the handler took none. Raises HandlerFails."""
        places = [(record.topic, record.partition, record.offset) for record, _ in failed]
        error = failed[-1][1]
        name = type(error).__name__
        self._failed.update(places[:DISTINCT_FAILURES])
        self._fails_on_all |= len(places) > 1 or len(self._failed) >= DISTINCT_FAILURES
        if self._fails_on_all:
            raise HandlerFails(
                f"the handler fails on every event ({name}); this is our code, not the events; nothing is "
                "dead-lettered: deploy a fix or the last version that worked"
            ) from error
        if not (self._works or self._is_out_of_patience(places[0])):
            raise HandlerFails(
                f"the handler fails on the only event that waits ({name}) and has taken none yet, so this "
                f"may be our code: the event is tried again for {self._lone_patience_seconds:g} s, or until others come"
            ) from error

    def _is_out_of_patience(self, place: tuple[str, int, int]) -> bool:
        if place != self._lone:
            self._lone, self._attempts, self._since = place, 0, self._clock()
        self._attempts += 1
        return self._attempts >= LONE_ATTEMPTS and self._clock() - self._since >= self._lone_patience_seconds
