"""Calls that wake a relay: that there is something to publish and, where the writer says so, in which buckets.

A call costs a relay one read. Told the buckets, it reads those and not all that it owns, which under a trickle of
events is a good part of what they cost. A call is only a hint: whatever was missed is found when everything is read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from shared.outbox.tables import BUCKETS

_TOLD_AT_MOST = 24  # of more buckets it is cheaper to read all


def call_for(buckets: Iterable[int]) -> str:
    """Return a call's text: the buckets, separated by commas; empty for everything."""
    told = set(buckets)
    return ",".join(map(str, sorted(told))) if len(told) <= _TOLD_AT_MOST else ""


class Calls:
    """What one publisher was called for since it last looked. Belongs to one event loop."""

    def __init__(self) -> None:
        self._everything = True
        self._buckets: set[int] = set()
        self._waiting: asyncio.Future[None] | None = None

    def call(self) -> None:
        """Call for everything."""
        self._everything = True
        self._wake()

    def hear(self, call: str) -> None:
        """Take a call's text, as `call_for` makes it. What cannot be read calls for everything."""
        if not call:
            self.call()
            return
        try:
            buckets = {int(number) for number in call.split(",")}
        except ValueError:
            self.call()
            return
        self._buckets |= {number for number in buckets if 0 <= number < BUCKETS}
        self._wake()

    def take(self) -> set[int]:
        """Return the buckets that were called for, forgetting them; empty for everything or for no call at all."""
        taken = set() if self._everything else self._buckets
        self._everything, self._buckets = False, set()
        return taken

    async def wait(self, seconds: float) -> None:
        """Wait until something was called for, so many seconds at most."""
        if self._everything or self._buckets:
            return
        # One future and one timer: asyncio.timeout around an Event's wait is a tenth of what an event costs a relay.
        loop = asyncio.get_running_loop()
        waiting = self._waiting = loop.create_future()
        timer = loop.call_later(seconds, self._wake)
        try:
            await waiting
        finally:
            timer.cancel()
            self._waiting = None

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
