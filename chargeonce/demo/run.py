"""One run of the demo: the system from nothing, the phases, the checks, the report, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import asyncpg
from rich.console import Console

from chargeonce.audit_view import audit_tables
from chargeonce.demo.board import Board
from chargeonce.demo.load import DemoFailedError, Load
from chargeonce.demo.measure import Observer
from chargeonce.demo.phases import PHASES, Phase, Stage
from chargeonce.demo.story import PhaseRecord, Story
from chargeonce.ledgers import LedgerAwayError
from chargeonce.report import write_report
from chargeonce.stack import StackError
from chargeonce.system import PROCESSES, System
from shared.errors import KafkaFailure

_SAMPLE_SECONDS = 0.25
_LEAST_RATE_PER_SECOND = 40.0
_LOAD_SECONDS = 20.0

# Shorter than in production, so that a minute shows what takes leases and deadlines to run out.
_ENVIRONMENT = {
    "ORDER_SERVICE_RELAY_LEASE_SECONDS": "3",
    "ORDER_SERVICE_RELAY_DELIVERY_DEADLINE_SECONDS": "5",
    "BILLING_SERVICE_RELAY_LEASE_SECONDS": "3",
    "BILLING_SERVICE_RELAY_DELIVERY_DEADLINE_SECONDS": "5",
    "BILLING_SERVICE_EXECUTOR_CALL_DEADLINE_SECONDS": "1.5",
    "BILLING_SERVICE_EXECUTOR_LEASE_SECONDS": "6.5",
}


class Demo:
    """Runs in `directory`: the system in `run`, which is made anew, and the reports beside it.

    `keep` leaves the system's data also after a demo that passed. `before_audit` is called when all is settled.
    """

    def __init__(
        self,
        directory: Path,
        orders: int = 1000,
        *,
        keep: bool = False,
        console: Console | None = None,
        phases: Sequence[Phase] = PHASES,
        before_audit: Callable[[System], Awaitable[None]] | None = None,
    ) -> None:
        self.directory = directory.absolute()
        self._orders = orders
        self._keep = keep
        self._console = console or Console()
        self._phases = phases
        self._before_audit = before_audit
        self._story = Story(orders, datetime.now(UTC))
        self._board = Board(self._console, orders, len(phases) + 1)
        self._began = time.monotonic()
        self._system = System(self.directory / "run", restart=True, environment=dict.fromkeys(PROCESSES, _ENVIRONMENT))

    async def run(self) -> Story:
        """Run all phases, write `report.json` and `report.html`, and return what happened; `passed` is the result.

        Raises StackError when the system cannot be started. Cancelled, it stops every process first.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        try:
            with self._board:
                await self._start()
                await self._run_phases()
            self._story.seconds = time.monotonic() - self._began
            self._judge()
            self._tell()
        finally:
            await self._system.stop()
        if self._story.passed and not self._keep:
            await self._system.remove()
        self._console.print("Everything is stopped; no process is left.")
        return self._story

    async def _start(self) -> None:
        with self._phase("Start PostgreSQL, Kafka and 8 processes"):
            self._system.empty()
            began = time.monotonic()
            await self._system.start(
                told=lambda step: self._board.say(f"{step} after {time.monotonic() - began:.1f} s")
            )
            self._board.show(broker="up")

    async def _run_phases(self) -> None:
        rate = max(_LEAST_RATE_PER_SECOND, self._orders / _LOAD_SECONDS)
        async with (
            Observer(self._system) as observer,
            Load(self._system.orders_url, self._orders, rate) as load,
            self._sampling(observer),
        ):
            stage = Stage(self._system, load, observer, self._board, self._story)
            try:
                for phase in self._phases:
                    if phase is self._phases[-1] and self._before_audit:
                        await self._before_audit(self._system)
                    with self._phase(phase.title):
                        await phase.act(stage)
            except DemoFailedError as failure:
                self._story.failures.append(str(failure))
            except (StackError, LedgerAwayError, KafkaFailure, aiohttp.ClientError, asyncpg.PostgresError) as failure:
                self._story.failures.append(f"{type(failure).__name__}: {failure}")

    @contextmanager
    def _phase(self, title: str) -> Iterator[None]:
        record = PhaseRecord(len(self._story.phases) + 1, title, time.monotonic() - self._began)
        self._story.phases.append(record)
        self._board.phase(record.number, title, record.lines)
        yield
        record.seconds = round(time.monotonic() - self._began - record.began_at_seconds, 2)
        self._board.done(record.seconds)

    @asynccontextmanager
    async def _sampling(self, observer: Observer) -> AsyncIterator[None]:
        """Count several times a second, for the board and the report's timeline."""

        async def sample() -> None:
            while True:
                snapshot = await observer.snapshot()
                self._story.samples.append(snapshot)
                self._board.show(snapshot)
                await asyncio.sleep(_SAMPLE_SECONDS)

        sampling = asyncio.create_task(sample(), name="demo samples")
        try:
            yield
        finally:
            with contextlib.suppress(asyncpg.PostgresError, OSError):
                self._story.samples.append(await observer.snapshot())
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)

    def _judge(self) -> None:
        """Add to the failures what should have happened and did not. The audit judges the money."""
        story, audit = self._story, self._story.audit
        if audit is None or story.failures:
            return
        expected = {
            f"{audit.orders_confirmed} orders were confirmed instead of {self._orders}": audit.orders_confirmed
            == self._orders,
            f"{audit.charges_captured} charges were captured for {self._orders} orders": audit.charges_captured
            == self._orders,
            f"the provider has {audit.payments_captured} payments for {self._orders} orders": audit.payments_captured
            == self._orders,
            f"{audit.results_pending} orders do not know their payment": audit.results_pending == 0,
            f"{audit.duplicates_absorbed} duplicates were absorbed and {story.copies_sent} were sent": (
                audit.duplicates_absorbed >= story.copies_sent
            ),
            f"{audit.dead_letters.total()} dead letters stand against {story.poison_sent} poisonous messages": (
                audit.dead_letters.total() == story.poison_sent
            ),
        }
        story.failures += [failure for failure, holds in expected.items() if not holds]

    def _tell(self) -> None:
        """Write the reports and print the result."""
        story, console = self._story, self._console
        pages = write_report(story, self.directory)
        if story.audit is not None:
            console.print(audit_tables(story.audit))
        console.print(
            f"\n{story.verdict}", style="bold green" if story.passed else "bold red", highlight=False, soft_wrap=True
        )
        facts = f"{story.seconds:.0f} s, kills: {len(story.kills)}, broker outages: {len(story.outages)}"
        console.print(facts, highlight=False)
        for page in pages:
            console.print(f"report  {page}", soft_wrap=True, highlight=False)
        if not story.passed:
            console.print(f"Everything is kept for a look: data and logs in {self._system.directory}", soft_wrap=True)
        console.print(_WHAT_NEXT, highlight=False, soft_wrap=True)


_WHAT_NEXT = """
What to try next
  .venv/bin/chargeonce up                    run it all in the foreground, create orders with curl, kill what you like
  .venv/bin/chargeonce demo --orders 5000    the same with more of everything
  .venv/bin/chargeonce demo --keep           keep databases, ledger and logs for a look
  docs/guarantees.md                         what is promised, and what happens on a crash at each step"""
