"""How much each measure does: as docs/performance.md describes it, or just enough to see that everything works."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of events, and lengths of the timed parts."""

    rounds: int = 5
    events: int = 500_000
    consumed_events: int = 200_000
    memory_events: int = 1_000_000
    burst_events: int = 100_000
    compression_events: int = 200_000
    rates_per_second: tuple[int, ...] = (200, 1000)
    window_seconds: float = 10.0
    warm_up_seconds: float = 2.0
    hold_warm_up_seconds: float = 60.0
    hold_seconds: float = 60.0
    idle_seconds: float = 20.0
    writers_seconds: float = 5.0


QUICK = Sizes(
    rounds=1,
    events=3000,
    consumed_events=3000,
    memory_events=3000,
    burst_events=500,
    compression_events=3000,
    rates_per_second=(100,),
    window_seconds=1.0,
    warm_up_seconds=0.3,
    hold_warm_up_seconds=0.1,
    hold_seconds=1.0,
    idle_seconds=1.0,
    writers_seconds=1.0,
)
"""For a test that the benchmark itself works: its figures mean nothing."""
