"""`python -m tests.benchmarks.subjects NAME OPTIONS`."""

from __future__ import annotations

import json
import sys
from importlib import import_module

from shared import telemetry
from tests.benchmarks import loop

SUBJECTS = ("relay", "naive", "limit", "writer", "orders", "consumer", "naive_consumer")
_BASELINES = ("naive", "limit", "naive_consumer")

if __name__ == "__main__":
    name, options = sys.argv[1:]
    if name not in SUBJECTS:
        sys.exit(f"unknown subject {name!r}; one of: {' '.join(SUBJECTS)}")
    chosen = json.loads(options)
    settled = chosen.pop("settled", name not in _BASELINES)
    telemetry.configure("benchmark", json_lines=True)
    subject = import_module(f"tests.benchmarks.subjects.{name}")
    loop.run(subject.main(**chosen), settled=settled)
