"""Both benchmarks work: every row is there, in its shape. What they measure is never asserted."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from chargeonce.stack import Stack
from tests.benchmarks import billing, relay
from tests.benchmarks.harness import Measures
from tests.benchmarks.processes import ROOT

BILLING = {
    "fresh events": "ratio >= 1.3",
    "duplicates, the whole topic again": "ratio >= 2",
    "1 % poison": "ratio >= 0.6",
    "two consumers": "ratio >= 0.9",
    "resident memory of the consumer": "value <= 200",
}
RELAY = {
    "drain against naive": "ratio >= 4",
    "drain against limit": "ratio >= 0.5",
    "commit to ack at 100/s, p50": "ratio <= 1.2",
    "commit to ack at 100/s, p99": "ratio <= 1.2",
    "CPU of the relay at 100/s": "ratio <= 0.8",
    "drain during held transactions": "ratio >= 0.95",
    "1,000/s during held transactions": "ratio >= 0.95",
    "two relays on one backlog": "ratio >= 0.9",
    "resident memory, backlog of a million": "value <= 150",
    "CPU when idle": "value <= 2",
    "writers": "ratio >= 0.75",
}


@pytest.fixture
def directory() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="chargeonce-bench-"))
    directory.chmod(0o711)
    yield directory
    Stack(directory / "run").remove()  # nothing, unless the benchmark was killed
    for path in sorted(directory.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    directory.rmdir()


@pytest.mark.parametrize(
    ("name", "measures", "with_targets"), [("relay", relay.MEASURES, RELAY), ("billing", billing.MEASURES, BILLING)]
)
async def test_a_benchmark_tells_every_row_with_its_target(
    directory: Path, name: str, measures: Measures, with_targets: dict[str, str]
) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"tests.benchmarks.{name}", "--quick", "--directory", str(directory)),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output = (await asyncio.wait_for(process.communicate(), 240))[0].decode()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    assert process.returncode == 0, output
    result = json.loads((directory / f"{name}.json").read_text())
    rows = {row["measure"]: row for row in result["rows"]}
    targets = {measure: row["target"] for measure, row in rows.items() if row["target"]}
    assert with_targets.items() <= targets.items()
    for row in rows.values():
        assert row["unit"]
        assert row["rounds"]
        assert math.isfinite(row["value"])
        assert row["met"] in ((True, False) if row["target"] else (None,))
        if row["baseline"] is not None:
            assert row["ratio"] == pytest.approx(row["value"] / row["baseline"])
        assert row["measure"][:12] in output
    assert result["seconds"].keys() == measures.keys()
    assert {"cpu", "cores", "memory_mb", "python", "postgres", "kafka"} <= result["machine"].keys()
    assert result["event_loop"]
    assert result["summary"] in " ".join(output.split())
    assert (directory / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert not (directory / "run").exists(), "data of the run is gone"
