"""`python -m tests.benchmarks.relay`, or `make bench-relay`: the relay against a naive one and against its limit.

Writes `relay.json` and `relay.png` to var/bench. A missed target is told and is no failure: exit status 0. What makes
the figures void, such as a lost event or one out of order, is: exit status 1.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from chargeonce.foreground import Interrupted, run_until_signalled
from chargeonce.stack import StackError
from shared import telemetry
from tests.benchmarks import report
from tests.benchmarks.lab import Lab, running_lab
from tests.benchmarks.machine import OtherPrograms, machine
from tests.benchmarks.measures import compression, drain, held, latency, process, two_relays, writers
from tests.benchmarks.processes import BenchmarkError
from tests.benchmarks.rows import Row
from tests.benchmarks.sizes import QUICK, Sizes

MEASURES: dict[str, Callable[[Lab, Sizes], AsyncIterator[Row]]] = {
    "drain": drain.measure,
    "latency": latency.measure,
    "held": held.measure,
    "two-relays": two_relays.measure,
    "process": process.measure,
    "writers": writers.measure,
    "compression": compression.measure,
}

_BUSY_PERCENT = 10
"""A larger share of the machine for other programs is told: the figures are then worth little."""


def main(
    quick: Annotated[
        bool, typer.Option("--quick", help="tiny sizes: shows that it works, the figures mean nothing")
    ] = False,
    only: Annotated[list[str] | None, typer.Option(help=f"one of: {' '.join(MEASURES)}; may be repeated")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="rounds of each comparison (default: 5)")] = None,
    events: Annotated[int | None, typer.Option(min=1, help="events of a drain (default: 500,000)")] = None,
    directory: Annotated[Path | None, typer.Option(help="where the result goes (default: var/bench)")] = None,
) -> None:
    """Measure the relay, interleaved with its baselines, each subject in a fresh process."""
    if unknown := sorted(set(only or ()) - set(MEASURES)):
        raise typer.BadParameter(f"{unknown[0]!r} is none of: {' '.join(MEASURES)}", param_hint="--only")
    base = QUICK if quick else Sizes()
    sizes = replace(base, rounds=rounds or base.rounds, events=events or base.events)
    into = directory or Path(os.environ.get("CHARGEONCE_VAR") or "var") / "bench"
    telemetry.configure("benchmark", level="WARNING")
    try:
        run_until_signalled(benchmark(into, tuple(only or MEASURES), sizes))
    except Interrupted as interrupted:
        raise typer.Exit(interrupted.exit_status) from None
    except (BenchmarkError, StackError) as error:
        sys.stderr.write(f"bench: {error}\n")
        raise typer.Exit(1) from error


async def benchmark(directory: Path, measures: Sequence[str], sizes: Sizes) -> None:
    """Run the measures one after the other; what is known is written after each, so an interrupted run leaves it."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    began = time.monotonic()
    rows: list[Row] = []
    seconds: dict[str, float] = {}
    disturbed: dict[str, float] = {}
    directory.mkdir(parents=True, exist_ok=True)
    async with running_lab(directory) as lab:
        result: dict[str, Any] = {
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": await machine(lab),
            "sizes": asdict(sizes),
        }
        for name in measures:
            console.print(f"[dim]{time.monotonic() - began:5.0f} s  {name}[/dim]", highlight=False)
            before, others = time.monotonic(), OtherPrograms(lab)
            rows += [row async for row in MEASURES[name](lab, sizes)]
            seconds[name] = round(time.monotonic() - before, 1)
            disturbed[name] = round(others.percent(), 1)
            if disturbed[name] > _BUSY_PERCENT:
                told = f"[red]{name}: other programs used {disturbed[name]:g} % of this machine meanwhile[/red]"
                console.print(told, highlight=False)
            result |= {
                "event_loop": ", ".join(sorted(lab.loops)),
                "seconds": seconds,
                "other_programs_percent": disturbed,
                "summary": report.summary(rows),
                "rows": [row.as_json() for row in rows],
            }
            report.write_json(directory / "relay.json", result)
    report.draw(rows).savefig(directory / "relay.png", dpi=110)
    console.print(report.table(rows))
    console.print(f"{report.summary(rows)}. {directory / 'relay.json'}, relay.png; {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    typer.run(main)
