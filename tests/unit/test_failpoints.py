"""Crash points are named, counted and refused when misspelt."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from shared.failpoints import POINTS, VARIABLE, parse


def test_points_are_parsed_with_their_counts() -> None:
    assert parse("B2, C3@7") == {"B2": 1, "C3": 7}
    assert parse("") == {}


@pytest.mark.parametrize("text", ["B9", "B2@0", "B2@x", "b2"])
def test_a_misspelt_point_is_refused_with_what_is_known(text: str) -> None:
    with pytest.raises(ValueError, match=VARIABLE):
        parse(text)


def test_an_armed_point_kills_the_process_at_its_count_and_not_before() -> None:
    program = "from shared import failpoints\nfor n in range(9):\n    print(n, flush=True)\n    failpoints.hit('B2')"
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, VARIABLE: "B2@3"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == -signal.SIGKILL
    assert ran.stdout.split() == ["0", "1", "2"]


def test_the_points_are_those_of_the_guarantees() -> None:
    assert list(POINTS) == [
        *("O1", "O2", "O3"),
        *("R1", "R2", "R3"),
        *(f"B{n}" for n in range(1, 6)),
        "L1",
        *(f"C{n}" for n in range(1, 6)),
    ]
