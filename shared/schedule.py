"""Services that do one thing every interval."""

from __future__ import annotations

import asyncio

from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.triggers.interval import IntervalTrigger

from shared.lifecycle import BackgroundService


class PeriodicService(BackgroundService):
    """Does one thing every interval. The scheduler only sets an event: APScheduler cancels running jobs when it shuts
    down, and no query may be cut off.
    """

    def __init__(self, interval_seconds: float) -> None:
        super().__init__()
        self._interval_seconds = interval_seconds
        self._due = asyncio.Event()

    def wake(self) -> None:
        self._due.set()

    async def do(self) -> None:
        """Do it once."""
        raise NotImplementedError

    async def run(self) -> None:
        scheduler = AsyncIOScheduler()
        trigger = IntervalTrigger(seconds=self._interval_seconds, jitter=self._interval_seconds / 10)
        scheduler.add_job(self._due.set, trigger)
        scheduler.start()
        self._due.set()
        try:
            while not self.stopping.is_set():
                await self._due.wait()
                self._due.clear()
                if not self.stopping.is_set():
                    await self.do()
                    self.backoff.reset()
        finally:
            scheduler.shutdown(wait=False)
