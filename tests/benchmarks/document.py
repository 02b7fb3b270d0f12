"""`python -m tests.benchmarks.document RESULT…` writes results into docs/performance.md, so that no figure is typed.

Several files are the parts of one result, measured with `--only` one after the other.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.benchmarks.processes import ROOT
from tests.benchmarks.report import number

_PAGE = ROOT / "docs" / "performance.md"


def main(paths: list[str]) -> None:
    """Replace what stands between the two marks of the benchmark, whose name is the first file's."""
    results = [json.loads(Path(path).read_text()) for path in paths]
    name = Path(paths[0]).stem
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    page = _PAGE.read_text(encoding="utf-8")
    before, found, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise SystemExit(f"{_PAGE.name} has no marks of {name}")
    _PAGE.write_text(f"{before}{begin}{section(results)}{end}{after}", encoding="utf-8")


def section(results: list[dict[str, Any]]) -> str:
    """Return the paragraph about the machine, and the table."""
    machine = results[0]["machine"]
    lines = [
        f"Measured {results[-1]['measured_at'][:10]} on {machine['cores']} cores ({machine['cpu']}), "
        f"{machine['memory_mb'] / 1024:.0f} GiB, {machine['system']}; Python {machine['python']} with "
        f"{results[0]['event_loop']}, PostgreSQL {machine['postgres']}, Kafka {machine['kafka']}, "
        f"aiokafka {machine['aiokafka']}, asyncpg {machine['asyncpg']}. Meanwhile other programs used up to "
        f"{max(share for result in results for share in result['other_programs_percent'].values()):.0f} % of it.",
        "",
        "| measure | value | baseline | ratio | target | met | rounds, lowest to highest |",
        "|---|---|---|---|---|---|---|",
        *(_line(row) for result in results for row in result["rows"]),
        "",
    ]
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    cells = [
        row["measure"],
        f"{number(row['value'])} {row['unit']}",
        f"{number(row['baseline'])} {row['baseline_name']}" if row["baseline"] is not None else "",
        f"{row['ratio']:.2f}" if row["ratio"] is not None else "",
        row["target"] or "",
        {True: "yes", False: "**no**", None: ""}[row["met"]],
        f"{number(min(row['rounds']))} … {number(max(row['rounds']))}" if len(row["rounds"]) > 1 else "",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main(sys.argv[1:])
