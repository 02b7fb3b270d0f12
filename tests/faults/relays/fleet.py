"""Relays, each a process of its own, that a test starts, freezes, kills and asks."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

from chargeonce.stack import Supervisor, free_ports
from shared.failpoints import VARIABLE
from shared.outbox.tables import BUCKETS
from tests.support.outbox import OutboxUnderTest

ROOT = Path(__file__).parents[3]
LEASE_SECONDS = 2.0
_POLL_SECONDS = 0.03


async def eventually(
    condition: Callable[[], Awaitable[object]], deadline_seconds: float = 30.0, what: str = "the condition"
) -> None:
    """Wait until an asynchronous condition holds. Raises AssertionError that tells which did not."""
    try:
        async with asyncio.timeout(deadline_seconds):
            while not await condition():
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError:
        raise AssertionError(f"{what}: not within {deadline_seconds:g} s") from None


class Fleet:
    """The relays of one outbox, by name. `alive` are those that nobody ended: they must still run at the end."""

    def __init__(self, outbox: OutboxUnderTest) -> None:
        self.alive: set[str] = set()
        self.lines: defaultdict[str, deque[str]] = defaultdict(lambda: deque(maxlen=300))
        self._outbox = outbox
        self._ports: dict[str, int] = {}
        self._supervisor = Supervisor(log=lambda name, line: self.lines[name].append(line), restart=False)
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=3.0))

    async def start(self, *names: str, failpoints: str = "", **options: Any) -> None:
        """Start relays, and wait until they serve their health. Options are those of the process."""
        for name in names:
            [self._ports[name]] = free_ports(1)
            given = {
                "url": self._outbox.database.settings.url,
                "bootstrap_servers": self._outbox.kafka.bootstrap_servers,
                "port": self._ports[name],
                "lease_seconds": LEASE_SECONDS,
                **options,
            }
            await self._supervisor.start(
                name,
                [sys.executable, "-m", "tests.faults.relays.process", json.dumps(given)],
                env={**os.environ, VARIABLE: failpoints},
                cwd=ROOT,
            )
            if not failpoints:
                self.alive.add(name)
        for name in names:
            await eventually(lambda name=name: self._serves(name), what=f"{name} serves")  # type: ignore[misc]

    async def sharing(self, *names: str, deadline_seconds: float = 30.0) -> None:
        """Wait until these relays publish all buckets, each its fair share."""
        fair = -(-BUCKETS // len(names))

        async def shared_out() -> bool:
            held = [await self.metric(name, "outbox_leases_held") for name in names]
            return sum(held) == BUCKETS and max(held) <= fair

        try:
            await eventually(shared_out, deadline_seconds, f"fair shares of {names}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None

    def signal(self, name: str, number: signal.Signals) -> None:
        """Signal a relay and go on."""
        self._supervisor.kill(name, number)

    async def kill(self, name: str) -> None:
        """SIGKILL."""
        self.signal(name, signal.SIGKILL)
        assert await self.ended(name) == -signal.SIGKILL

    async def terminate(self, name: str) -> None:
        """SIGTERM, as a deployment does; a relay then ends by itself, with status 0."""
        self.signal(name, signal.SIGTERM)
        assert await self.ended(name) == 0

    async def ended(self, name: str, deadline_seconds: float = 30.0) -> int:
        """Wait for the end of a relay, and return its exit status, negative for a signal."""
        self.alive.discard(name)
        async with asyncio.timeout(deadline_seconds):
            return await self._supervisor.wait(name)

    async def metric(self, name: str, sample: str) -> float:
        """Return a sample by its name with labels, as Prometheus writes it; 0 when the relay has none of that name."""
        async with self._http.get(f"http://127.0.0.1:{self._ports[name]}/metrics") as response:
            assert response.status == 200
            for line in (await response.text()).splitlines():
                found, _, value = line.rpartition(" ")
                if found == sample:
                    return float(value)
        return 0.0

    async def reasons(self, name: str) -> str:
        """Return why a relay is not ready, in its own words; empty when it is."""
        async with self._http.get(f"http://127.0.0.1:{self._ports[name]}/readyz") as response:
            checks = (await response.json())["checks"]
        return "; ".join(check["reason"] for check in checks.values() if check["status"] != "ready")

    async def ready(self, *names: str, deadline_seconds: float = 30.0) -> None:
        """Wait until these relays have nothing to complain of."""
        for name in names:

            async def is_ready(name: str = name) -> bool:
                return not await self.reasons(name)

            await eventually(is_ready, deadline_seconds, f"{name} is ready")

    async def end(self) -> None:
        """Assert that every relay that nobody ended still runs; end it. Also whoever was frozen meanwhile."""
        for name in self.alive:
            assert self._supervisor.pid(name) is not None, f"{name} ended by itself:\n" + self.log_of(name)
        for name in list(self.alive):
            await self.terminate(name)

    async def close(self) -> None:
        """End what is left, in whatever state."""
        for name in self._supervisor.names:
            if self._supervisor.pid(name) is not None:
                self.signal(name, signal.SIGCONT)
        await self._supervisor.stop()
        await self._http.close()

    def log_of(self, name: str) -> str:
        """Return the end of a relay's log."""
        return "\n".join(list(self.lines[name])[-30:])

    def logs(self) -> str:
        """Return the ends of all logs."""
        return "\n\n".join(f"{name}:\n{self.log_of(name)}" for name in self.lines)

    async def _serves(self, name: str) -> bool:
        assert self._supervisor.pid(name) is not None or name not in self.alive, self.log_of(name)
        try:
            async with self._http.get(f"http://127.0.0.1:{self._ports[name]}/livez") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return self._supervisor.pid(name) is None  # an armed one may be dead already
