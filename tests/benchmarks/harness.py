"""What `make bench-relay` and `make bench-billing` share: options, the lab, and the result after each measure.

A missed target is told and is no failure: exit status 0. What makes the figures void, such as a lost event, one out of
order or one charged twice, is: exit status 1.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from chargeonce.foreground import Interrupted, run_until_signalled
from chargeonce.stack import StackError
from shared import telemetry
from tests.benchmarks import report
from tests.benchmarks.lab import Lab, running_lab
from tests.benchmarks.machine import OtherPrograms, machine
from tests.benchmarks.processes import BenchmarkError
from tests.benchmarks.rows import Row
from tests.benchmarks.sizes import Sizes

Measures = Mapping[str, Callable[[Lab, Sizes], AsyncIterator[Row]]]

_BUSY_PERCENT = 10
"""A larger share of the machine for other programs is told: the figures are then worth little."""


def run(name: str, measures: Measures, only: Sequence[str] | None, sizes: Sizes, directory: Path | None) -> None:
    """Run the measures, or those that were chosen; writes `<name>.json` and `<name>.png` to var/bench."""
    if unknown := sorted(set(only or ()) - set(measures)):
        raise typer.BadParameter(f"{unknown[0]!r} is none of: {' '.join(measures)}", param_hint="--only")
    into = directory or Path(os.environ.get("CHARGEONCE_VAR") or "var") / "bench"
    telemetry.configure("benchmark", level="WARNING")
    try:
        run_until_signalled(_benchmark(name, into, measures, tuple(only or measures), sizes))
    except Interrupted as interrupted:
        raise typer.Exit(interrupted.exit_status) from None
    except (BenchmarkError, StackError) as error:
        sys.stderr.write(f"bench: {error}\n")
        raise typer.Exit(1) from error


async def _benchmark(name: str, directory: Path, measures: Measures, chosen: Sequence[str], sizes: Sizes) -> None:
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
        for measure in chosen:
            console.print(f"[dim]{time.monotonic() - began:5.0f} s  {measure}[/dim]", highlight=False)
            before, others = time.monotonic(), OtherPrograms(lab)
            rows += [row async for row in measures[measure](lab, sizes)]
            seconds[measure] = round(time.monotonic() - before, 1)
            disturbed[measure] = round(others.percent(), 1)
            if disturbed[measure] > _BUSY_PERCENT:
                told = f"[red]{measure}: other programs used {disturbed[measure]:g} % of this machine meanwhile[/red]"
                console.print(told, highlight=False)
            result |= {
                "event_loop": ", ".join(sorted(lab.loops)),
                "seconds": seconds,
                "other_programs_percent": disturbed,
                "summary": report.summary(rows),
                "rows": [row.as_json() for row in rows],
            }
            report.write_json(directory / f"{name}.json", result)
    report.draw(rows).savefig(directory / f"{name}.png", dpi=110)
    console.print(report.table(name, rows))
    console.print(f"{report.summary(rows)}. {directory / name}.json, {name}.png; {time.monotonic() - began:.0f} s")
