"""Named crash points (docs/guarantees.md). Armed by the environment, they kill this process as SIGKILL would.

CHARGEONCE_FAILPOINTS is a comma-separated list of `NAME` or `NAME@N`: die at the N-th time that the point is reached.
Unset, as always outside of tests and demonstrations, a point costs one dictionary look-up.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "CHARGEONCE_FAILPOINTS"

POINTS = {
    "O1": "order row inserted",
    "O2": "event appended",
    "O3": "order committed, client not answered",
    "R1": "batch read",
    "R2": "batch sent, not acknowledged",
    "R3": "batch acknowledged, progress not written",
    "B1": "records fetched",
    "B2": "marks inserted",
    "B3": "charges inserted",
    "B4": "batch committed, offsets not",
    "B5": "offsets committed",
    "L1": "dead letter handled after all, not committed",
    "C1": "charge claimed",
    "C2": "request sent",
    "C3": "provider answered, not recorded",
    "C4": "charge settled and event appended, not committed",
    "C5": "settlement committed",
}


def parse(text: str) -> dict[str, int]:
    """Return how often each named point must still be reached. Raises ValueError for an unknown point or count."""
    armed: dict[str, int] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, count = item.partition("@")
        if name not in POINTS:
            raise ValueError(f"{VARIABLE} names {name!r}; the points are {', '.join(POINTS)}")
        if count and not (count.isdigit() and int(count) > 0):
            raise ValueError(f"{VARIABLE} has {item!r}; write NAME or NAME@N with N from 1")
        armed[name] = int(count or 1)
    return armed


_armed = parse(os.environ.get(VARIABLE, ""))


def armed() -> tuple[str, ...]:
    """Return the names of the armed points, to be told loudly at start."""
    return tuple(_armed)


def hit(name: str) -> None:
    """Mark that execution reached the point; die here if it is armed and due."""
    if name in _armed:
        _armed[name] -= 1
        if _armed[name] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
