"""What happened in a demo, counted while it happened: the source of the report."""

from __future__ import annotations

import os
import platform
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

import psutil

from chargeonce.audit import AuditResult
from chargeonce.demo.measure import Snapshot


@dataclass(slots=True)
class PhaseRecord:
    """A phase that has begun; `seconds` is set when it has ended."""

    number: int
    title: str
    began_at_seconds: float
    seconds: float | None = None
    lines: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Kill:
    """A process that was killed, and what was in flight in it at that moment."""

    process: str
    pid: int
    at_seconds: float
    in_flight: int
    in_flight_words: str
    back_after_seconds: float


@dataclass(frozen=True, slots=True)
class Outage:
    """A time without broker, and the orders that were accepted in it."""

    began_at_seconds: float
    ended_at_seconds: float
    orders_accepted: int
    events_waiting: int


@dataclass(slots=True)
class Story:
    """Everything that the report tells. Times are seconds since the beginning."""

    orders_wanted: int
    began: datetime
    phases: list[PhaseRecord] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    outages: list[Outage] = field(default_factory=list)
    samples: deque[Snapshot] = field(default_factory=lambda: deque(maxlen=20_000))
    copies_sent: int = 0
    poison_sent: int = 0
    answers_lost: int = 0
    answers_repeated: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    audit: AuditResult | None = None

    @property
    def passed(self) -> bool:
        """Whether everything happened that should, and the audit proved every order charged once."""
        return self.audit is not None and self.audit.clean and not self.failures

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.audit is None:
            return f"Not proved: {'; '.join(self.failures) or 'the demo ended before its audit'}"
        if self.failures:
            return f"{self.audit.verdict()} The demo failed: {'; '.join(self.failures)}"
        return self.audit.verdict()

    def as_json(self) -> dict[str, Any]:
        """The report for machines: what the audit found, and what was counted on the way."""
        found = self.audit.as_json() if self.audit else {}
        totals: dict[str, dict[str, str]] = found.get("totals", {})
        return {
            "verdict": self.verdict,
            "passed": self.passed,
            "failures": self.failures,
            "orders_wanted": self.orders_wanted,
            **{name: found.get(name) for name in _FROM_AUDIT},
            "copies_sent": self.copies_sent,
            "poison_sent": self.poison_sent,
            "kills": len(self.kills),
            "broker_restarts": len(self.outages),
            "answers_lost": self.answers_lost,
            "answers_repeated": self.answers_repeated,
            "orders_total": {currency: sums["orders"] for currency, sums in totals.items()},
            "charges_total": {currency: sums["charges_captured"] for currency, sums in totals.items()},
            "provider_total": {currency: sums["provider_captured"] for currency, sums in totals.items()},
            "kill_details": [asdict(kill) for kill in self.kills],
            "outages": [asdict(outage) for outage in self.outages],
            "phases": [asdict(phase) for phase in self.phases],
            "timings": {
                "began": self.began.isoformat(timespec="seconds"),
                "seconds": round(self.seconds, 1),
                "phases": {phase.title: phase.seconds for phase in self.phases},
            },
            "machine": machine(),
            "audit": found,
            "samples": [asdict(sample) for sample in thinned(tuple(self.samples), 400)],
        }


_FROM_AUDIT = (
    "orders_confirmed",
    "charges_captured",
    "payments_captured",
    "duplicates_absorbed",
    "dead_letters",
    "double_charges",
    "missing_charges",
)


def thinned(samples: Sequence[Snapshot], most: int) -> Sequence[Snapshot]:
    """At most about this many samples, evenly chosen, the last one always among them."""
    step = -(-len(samples) // most) or 1
    return samples if step == 1 else [*samples[:-1:step], samples[-1]]


def machine() -> dict[str, Any]:
    """What a reader must know to judge the times."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_mb": psutil.virtual_memory().total // 2**20,
        "load_average": round(os.getloadavg()[0], 1),
    }
