"""Backpressure: refuse new work while too much of what was accepted waits in the outbox.

Off unless a limit is set. Without it an outage of Kafka costs disk space and nothing else; with it, new orders are
refused before the disk fills. Work that has moved money is never refused: billing's settlements do not ask here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import Counter

from shared.errors import Unavailable
from shared.outbox.backlog import Backlog

REFUSED = Counter("outbox_backpressure_refusals", "Requests refused because too much waits in the outbox.")

RETRY_AFTER_SECONDS = 5


@dataclass(frozen=True, slots=True)
class BacklogLimits:
    """How many unpublished events there may be, and how old the oldest may be. None is no limit."""

    events: int | None = None
    age_seconds: float | None = None

    def excess(self, backlog: Backlog) -> str:
        """Return which limit the backlog is past, in words; an empty string when it is past none."""
        if self.events is not None and backlog.events > self.events:
            return f"more than {self.events} events wait to be published"
        if self.age_seconds is not None and backlog.oldest_age_seconds > self.age_seconds:
            return f"the oldest event has waited to be published for more than {self.age_seconds:g} s"
        return ""


class Admission:
    """Asks the last measurement of the backlog. Where there is none, work is admitted: its own insert will tell."""

    def __init__(self, limits: BacklogLimits, latest: Callable[[], Backlog | None]) -> None:
        self._limits = limits
        self._latest = latest

    def check(self) -> None:
        """Raise Unavailable, with Retry-After, while the backlog is past a limit."""
        backlog = self._latest()
        problem = self._limits.excess(backlog) if backlog else ""
        if problem:
            REFUSED.inc()
            raise Unavailable(
                f"no new orders are accepted for now: {problem}. Nothing was stored and no money moved; try again "
                "later. What was accepted before is safe",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
