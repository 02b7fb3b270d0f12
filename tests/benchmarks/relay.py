"""`python -m tests.benchmarks.relay`, or `make bench-relay`: the relay against a naive one and against its limit.

Writes `relay.json` and `relay.png` to var/bench.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tests.benchmarks import harness
from tests.benchmarks.measures import compression, drain, held, latency, process, two_relays, writers
from tests.benchmarks.sizes import QUICK, Sizes

MEASURES: harness.Measures = {
    "drain": drain.measure,
    "latency": latency.measure,
    "held": held.measure,
    "two-relays": two_relays.measure,
    "process": process.measure,
    "writers": writers.measure,
    "compression": compression.measure,
}


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
    base = QUICK if quick else Sizes()
    sizes = replace(base, rounds=rounds or base.rounds, events=events or base.events)
    harness.run("relay", MEASURES, only, sizes, directory)


if __name__ == "__main__":
    typer.run(main)
