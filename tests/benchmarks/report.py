"""The result: a table for the terminal, JSON for machines, a picture for docs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table
from rich.text import Text

from tests.benchmarks.rows import Row

_OURS, _BASELINE = "#1f77b4", "#9a9a9a"


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write the result; a reader never sees half of it."""
    aside = path.with_suffix(".new")
    aside.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    aside.rename(path)


def table(title: str, rows: Sequence[Row]) -> Table:
    """Return the rows as a table; a target that was missed says so."""
    shown = Table(title=title, title_justify="left")
    shown.add_column("measure")
    for name in ("value", "baseline", "ratio"):
        shown.add_column(name, justify="right")
    for name in ("target", "met"):
        shown.add_column(name)
    for row in rows:
        baseline = f"{number(row.baseline)} {row.baseline_name}" if row.baseline is not None else ""
        ratio = f"{row.ratio:.2f}" if row.ratio is not None else ""
        met = {True: Text("yes", "green"), False: Text("MISSED", "bold red"), None: Text("")}[row.met]
        target = str(row.target) if row.target else ""
        shown.add_row(row.measure, f"{number(row.value)} {row.unit}", baseline, ratio, target, met)
    return shown


def summary(rows: Sequence[Row]) -> str:
    """Return the verdict in a sentence."""
    missed = [row.measure for row in rows if row.met is False]
    targets = sum(row.target is not None for row in rows)
    if missed:
        return f"{len(missed)} of {targets} targets missed: {'; '.join(missed)}"
    return f"all {targets} targets reached"


def number(value: float) -> str:
    """Return a figure with about three digits that count."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def draw(rows: Sequence[Row]) -> Figure:
    """Return a picture: rates, latencies and CPU, medians as bars and each round as a point, beside their baselines."""
    panels = [
        (unit, shown)
        for unit in ("events/s", "ms", "s/s", "commits/s", "bytes")
        if (shown := [row for row in rows if row.unit == unit and row.baseline_rounds])
    ]
    heights = [len(shown) for _, shown in panels]
    figure = Figure(figsize=(10, 1.2 * len(panels) + 0.55 * sum(heights) + 0.4), layout="constrained")
    if panels:
        for axes, (unit, shown) in zip(
            figure.subplots(len(panels), 1, height_ratios=[height + 1 for height in heights], squeeze=False).flat,
            panels,
            strict=True,
        ):
            _bars(axes, shown, unit)
    return figure


def _bars(axes: Axes, rows: Sequence[Row], unit: str) -> None:
    for place, row in enumerate(rows):
        pairs = ((row.rounds, row.value, _OURS, -0.19), (row.baseline_rounds, row.baseline or 0.0, _BASELINE, 0.19))
        for rounds, value, colour, shift in pairs:
            axes.barh(place + shift, value, height=0.36, color=colour)
            axes.plot(rounds, [place + shift] * len(rounds), ".", color="black", markersize=4)
            furthest = max((value, *rounds))
            axes.annotate(f"  {number(value)}", (furthest, place + shift), va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [f"{row.measure}\nagainst: {row.baseline_name}" for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.set_xlabel(unit)
    axes.grid(axis="x", alpha=0.3)
