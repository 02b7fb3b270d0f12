"""`python -m tests.benchmarks.billing`, or `make bench-billing`: billing's consumer and executor against plain ones.

Writes `billing.json` and `billing.png` to var/bench.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tests.benchmarks import harness
from tests.benchmarks.measures import consume
from tests.benchmarks.sizes import QUICK, Sizes

MEASURES: harness.Measures = {
    "consume": consume.measure,
}


def main(
    quick: Annotated[
        bool, typer.Option("--quick", help="tiny sizes: shows that it works, the figures mean nothing")
    ] = False,
    only: Annotated[list[str] | None, typer.Option(help=f"one of: {' '.join(MEASURES)}; may be repeated")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="rounds of each comparison (default: 5)")] = None,
    events: Annotated[int | None, typer.Option(min=1, help="events of a topic (default: 200,000)")] = None,
    directory: Annotated[Path | None, typer.Option(help="where the result goes (default: var/bench)")] = None,
) -> None:
    """Measure billing, interleaved with its baselines, each subject in a fresh process."""
    base = QUICK if quick else Sizes()
    sizes = replace(base, rounds=rounds or base.rounds, consumed_events=events or base.consumed_events)
    harness.run("billing", MEASURES, only, sizes, directory)


if __name__ == "__main__":
    typer.run(main)
