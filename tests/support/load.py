"""Writers under load: numbered events of many keys, committed at a steady rate whatever happens to the database."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from uuid import UUID

from sqlalchemy import text

from shared.errors import is_transient
from shared.identifiers import new_event_id
from shared.outbox.append import EventWriter, OutgoingEvent, bucket_of
from shared.outbox.calls import call_for
from shared.outbox.tables import BUCKETS
from shared.unit_of_work import UnitsOfWork
from shared.wakeup import Notifier
from tests.support.outbox import OutboxUnderTest

_WRITERS = 4
_RETRY_SECONDS = 0.1


class RolledBackError(Exception):
    """Raised after the events were appended, so that their transaction rolls back."""


def keys_of_every_bucket(each: int, without: Sequence[int] = ()) -> list[str]:
    """Return so many keys of each bucket, but for some buckets."""
    wanted = {bucket: each for bucket in range(BUCKETS) if bucket not in without}
    keys: list[str] = []
    for number in itertools.count():
        key = f"order-{number}"
        if wanted.get(bucket := bucket_of(key.encode()), 0):
            wanted[bucket] -= 1
            keys.append(key)
        if len(keys) == each * len(wanted):
            return keys
    raise AssertionError


class Load:
    """Commits events of one to four keys a transaction, some twice, and rolls back every tenth transaction.

    Each key belongs to one writer, so its numbers are its commit order. `committed` tells key and number of every
    event of which the database said, at once or when asked later, that it is committed.
    """

    def __init__(self, outbox: OutboxUnderTest, events_per_second: float, keys: Sequence[str]) -> None:
        self.committed: dict[UUID, tuple[str, int]] = {}
        self.rolled_back = 0
        self.retries = 0
        self._outbox = outbox
        self._keys = keys
        self._pause_seconds = 3.0 * _WRITERS / events_per_second
        self._notifier = Notifier(outbox.dsn, "outbox_event", text_of=call_for)
        self._units = UnitsOfWork(outbox.database, EventWriter(self._notifier.signal))
        self._numbers = dict.fromkeys(keys, 0)
        self._stopping = asyncio.Event()
        self._writers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to write."""
        await self._notifier.start()
        for first in range(_WRITERS):
            own = self._keys[first::_WRITERS]
            self._writers.append(asyncio.create_task(self._write(own, random.Random(first)), name=f"writer {first}"))

    async def stop(self) -> None:
        """Let each writer finish its transaction. Raises what one of them failed of."""
        self._stopping.set()
        results = await asyncio.gather(*self._writers, return_exceptions=True)
        self._writers.clear()
        await self._notifier.stop()
        for result in results:
            if result is not None:
                raise result

    async def more(self, events: int, deadline_seconds: float = 30.0) -> None:
        """Return when so many more events are committed."""
        wanted = len(self.committed) + events
        async with asyncio.timeout(deadline_seconds):
            while len(self.committed) < wanted:
                for writer in self._writers:
                    if writer.done():
                        writer.result()
                await asyncio.sleep(0.02)

    async def _write(self, own: Sequence[str], chance: random.Random) -> None:
        keys = itertools.cycle(own)
        due = time.monotonic()
        for transaction in itertools.count():
            if self._stopping.is_set():
                return
            chosen = [next(keys) for _ in range(chance.randint(1, 4))]
            if chance.random() < 0.2:
                chosen.append(chosen[0])
            await self._transact(chosen, roll_back=transaction % 10 == 9)
            due = max(due + self._pause_seconds, time.monotonic() - self._pause_seconds)
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    async def _transact(self, keys: Sequence[str], *, roll_back: bool) -> None:
        """Commit one event of each key, however often the database goes away meanwhile; or roll it back."""
        events = self._next_events(keys)
        while True:
            try:
                await self._commit(events, roll_back=roll_back)
                break
            except RolledBackError:
                self.rolled_back += 1
                return
            except Exception as error:
                if not is_transient(error):
                    raise
                self.retries += 1
                if await self._is_committed(events):
                    break
        for event in events:
            key = event.key.decode()
            self.committed[event.event_id] = key, self._numbers[key]
            self._numbers[key] += 1

    def _next_events(self, keys: Sequence[str]) -> list[OutgoingEvent]:
        ahead = dict.fromkeys(keys, 0)
        events = []
        for key in keys:
            events.append(self._outbox.event(key, self._numbers[key] + ahead[key], event_id=new_event_id()))
            ahead[key] += 1
        return events

    async def _commit(self, events: Sequence[OutgoingEvent], *, roll_back: bool) -> None:
        async with self._units.begin() as work:
            for event in events:
                work.publish(event)
            if roll_back:
                work.before_commit.append(_roll_back)

    async def _is_committed(self, events: Sequence[OutgoingEvent]) -> bool:
        """Ask what became of a transaction whose answer was lost, until the database tells."""
        while True:
            try:
                async with self._outbox.database.engine.connect() as connection:
                    found = await connection.execute(
                        text("SELECT count(*) FROM outbox_event WHERE event_id = ANY (CAST(:ids AS uuid[]))"),
                        {"ids": [event.event_id for event in events]},
                    )
                    stored = found.scalar_one()
            except Exception as error:
                if not is_transient(error):
                    raise
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                assert stored in (0, len(events)), "a transaction was committed in part"
                return bool(stored)


def _roll_back() -> None:
    raise RolledBackError


@asynccontextmanager
async def load(
    outbox: OutboxUnderTest, events_per_second: float = 400.0, keys: Sequence[str] | None = None
) -> AsyncIterator[Load]:
    """Write until the block ends; by default to two keys of every bucket."""
    writing = Load(outbox, events_per_second, keys or keys_of_every_bucket(2))
    await writing.start()
    try:
        yield writing
    finally:
        await writing.stop()


Committed = Mapping[UUID, tuple[str, int]]
"""Key and number of each committed event."""
