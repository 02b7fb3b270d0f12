"""Is what the inbox remembers longer than what Kafka may deliver again? Compared with the broker's own settings (F24).

A record can come again as long as its topic keeps it: `retention.ms`, and up to `segment.ms` more until the segment
that it lies in is closed. Once the marks of its day are gone it would look new.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass

import structlog

from shared.errors import KafkaFailure
from shared.kafka.topics import TopicRetention
from shared.lifecycle import READY, Readiness, State
from shared.schedule import PeriodicService

log = structlog.get_logger(__name__)

_DAY_SECONDS = 86_400
MARGIN_DAYS = 1
"""Event ids are as old as their order, which is older than its record by its time in the outbox; an id may also be from
a clock that is behind."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is wrong with the window: nothing when `problem` is empty. `forbids`: events could take effect twice."""

    problem: str = ""
    forbids: bool = False


def judge(window_days: int, topics: Sequence[TopicRetention], *, permanent_key: bool) -> Verdict:
    """Compare the window with the topics.

    A handler with a permanent unique key finds old events by itself: for it a short window is only to be said loudly.
    """
    for topic in topics:
        kept = topic.redelivery_seconds
        needed = None if kept is None else -(-kept // _DAY_SECONDS) + MARGIN_DAYS
        if needed is not None and needed <= window_days:
            continue
        how_long = "for ever" if kept is None else f"for up to {kept / _DAY_SECONDS:.1f} days"
        remedy = (
            "set the topic's cleanup.policy to delete and its retention.ms below the window"
            if needed is None
            else f"set …_DEDUP_WINDOW_DAYS to {needed} or more and run migrate, or lower the topic's retention.ms"
        )
        problem = f"topic {topic.name} keeps records {how_long} and the inbox remembers events for {window_days} days"
        if permanent_key:
            return Verdict(f"{problem}; older ones are told apart by the handler's own keys. {remedy}")
        return Verdict(f"{problem}: what comes again after that would take effect twice. {remedy}", forbids=True)
    return Verdict()


class WindowCheck(PeriodicService):
    """Asks the broker for the topics' retention, at the start and every few minutes; the consumer obeys `verdict`.

    `looked` is set when it was asked for the first time, whether it told or not. What cannot be found out is degraded
    and logged: an outage of Kafka must not keep a consumer from starting.
    """

    name = "dedup-window"

    def __init__(
        self,
        retention: Callable[[], Coroutine[None, None, Sequence[TopicRetention]]],
        *,
        window_days: int,
        permanent_key: bool,
        interval_seconds: float = 300.0,
    ) -> None:
        super().__init__(interval_seconds)
        self._retention = retention
        self._window_days = window_days
        self._permanent_key = permanent_key
        self.verdict = Verdict()
        self.looked = asyncio.Event()

    async def do(self) -> None:
        topics = await self._told()
        while topics is None:
            await self.pause(self.backoff.next_seconds())
            if self.stopping.is_set():
                return
            topics = await self._told()
        self.backoff.reset()
        self.verdict = judge(self._window_days, topics, permanent_key=self._permanent_key)
        if self.verdict.problem:
            log.error("inbox.window_too_short", problem=self.verdict.problem, stops_consuming=self.verdict.forbids)
        self.looked.set()
        self.readiness = Readiness(State.DEGRADED, self.verdict.problem) if self.verdict.problem else READY

    async def _told(self) -> Sequence[TopicRetention] | None:
        try:
            return await self._retention()
        except KafkaFailure as failure:
            reason = f"nobody told how long Kafka keeps the topics ({failure.detail}), so the window is not checked"
            log.warning("inbox.window_unknown", reason=reason)
            self.readiness = Readiness(State.DEGRADED, reason)
            self.looked.set()
            return None
