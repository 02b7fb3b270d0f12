"""The one place that commits: a business transaction and, as its last statement, the events it publishes.

Returning from the `async with` block commits; raising rolls back. Events wait in memory until the block ends, for
appending takes the lock of their bucket, and that lock should be held for one WAL flush and no longer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from sqlalchemy.ext.asyncio import AsyncSession

from shared import failpoints
from shared.database import Database
from shared.outbox.append import EventWriter, OutgoingEvent


class UnitOfWork:
    """A transaction in progress: its session, the events it will publish, and what to do around its commit.

    `before_commit` runs when the events are appended and nothing but COMMIT is left; `after_commit` when it is done.
    """

    def __init__(self, session: AsyncSession, writer: EventWriter | None) -> None:
        self.session = session
        self.events: list[OutgoingEvent] = []
        self.before_commit: list[Callable[[], None]] = []
        self.after_commit: list[Callable[[], None]] = []
        self._writer = writer

    def publish(self, event: OutgoingEvent) -> None:
        """Publish the event if, and only if, this transaction commits.

        Checks topic, size and headers now, so that what could never leave fails the request: raises TooLarge or
        InvalidInput. The aggregate's row must be locked or inserted by this transaction before (field report F2).
        """
        if self._writer is None:
            raise RuntimeError(
                "this unit of work has no outbox; build UnitsOfWork with an EventWriter to publish events"
            )
        self._writer.check(event)
        self.events.append(event)


class UnitsOfWork:
    """Begins units of work on one database."""

    def __init__(self, database: Database, writer: EventWriter | None = None) -> None:
        self._database = database
        self._writer = writer

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[UnitOfWork]:
        """Yield a unit of work; commit when the block returns, roll back when it raises."""
        buckets: Sequence[int] = ()
        async with self._database.session() as session, session.begin():
            work = UnitOfWork(session, self._writer)
            yield work
            await session.flush()
            if work.events and self._writer is not None:
                buckets = await self._writer.append(session, work.events)
                failpoints.hit("O2")
            for callback in work.before_commit:
                callback()
        if buckets and self._writer is not None:
            self._writer.signal(buckets)
        for callback in work.after_commit:
            callback()
