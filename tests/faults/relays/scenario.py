"""What every fault of the relay is tested in: an outbox under load, relays as processes, a consumer that records."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from chargeonce.stack import Stack
from tests.faults.relays.fleet import Fleet
from tests.support.load import Committed, Load, load
from tests.support.outbox import OutboxUnderTest, outbox_under_test
from tests.support.recording import Recording, Told, recording


@dataclass
class Scenario:
    """One outbox with its own topic. `load` writes from `write()` on; `servers` may be broken."""

    servers: Stack
    outbox: OutboxUnderTest
    fleet: Fleet
    records: Recording
    told: Told | None = None
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    _load: Load | None = None

    @property
    def load(self) -> Load:
        assert self._load is not None, "write() first"
        return self._load

    async def write(self, events_per_second: float = 400.0, keys: Sequence[str] | None = None) -> Load:
        """Begin to write, for as long as the scenario lasts."""
        self._load = await self._stack.enter_async_context(load(self.outbox, events_per_second, keys))
        return self._load

    async def complete(self, committed: Committed, deadline_seconds: float = 60.0) -> None:
        """Wait until all these events have arrived."""
        try:
            await self.records.complete(committed, deadline_seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.fleet.logs()}") from None

    async def ends_well(self, deadline_seconds: float = 60.0) -> Told:
        """Stop the load, then assert: no event lost, first copies of every key in order, every relay still running."""
        await self.load.stop()
        await self.complete(self.load.committed, deadline_seconds)
        await self.outbox.drained()
        await self.fleet.end()
        await self.complete(self.load.committed, deadline_seconds)
        self.told = self.records.check(self.load.committed)
        return self.told


@asynccontextmanager
async def scenario(servers: Stack, name: str, partitions: int = 12) -> AsyncIterator[Scenario]:
    """Begin with an empty outbox; whatever is left of the scenario is ended and dropped."""
    async with AsyncExitStack() as stack:
        await servers.postgres.create_database(name)
        stack.push_async_callback(servers.postgres.drop_database, name)
        url, kafka = servers.postgres.url(name), servers.kafka.bootstrap_servers
        outbox = await stack.enter_async_context(outbox_under_test(url, kafka, name, partitions))
        records = await stack.enter_async_context(recording(kafka, outbox.topic))
        fleet = Fleet(outbox)
        stack.push_async_callback(fleet.close)
        yield Scenario(servers, outbox, fleet, records, _stack=stack)
