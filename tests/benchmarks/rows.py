"""A row of the result: what was measured, against what, and whether it reached its target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True)
class Target:
    """A bound of a row's ratio (to its baseline) or of its value."""

    of: str
    relation: str
    bound: float

    @classmethod
    def ratio_at_least(cls, bound: float) -> Target:
        return cls("ratio", ">=", bound)

    @classmethod
    def ratio_at_most(cls, bound: float) -> Target:
        return cls("ratio", "<=", bound)

    @classmethod
    def value_at_most(cls, bound: float) -> Target:
        return cls("value", "<=", bound)

    def met(self, value: float, ratio: float | None) -> bool:
        """Tell whether the bound holds. A ratio that could not be formed holds no bound."""
        measured = value if self.of == "value" else ratio
        if measured is None:
            return False
        return measured >= self.bound if self.relation == ">=" else measured <= self.bound

    def __str__(self) -> str:
        return f"{self.of} {self.relation} {self.bound:g}"


@dataclass(frozen=True, slots=True)
class Row:
    """One measure. `value` and `baseline` are the medians of the rounds, `ratio` is value / baseline.

    `target` is None for a figure that is only reported. `note` says what a reader must know to read the row.
    """

    measure: str
    unit: str
    rounds: Sequence[float]
    target: Target | None = None
    baseline_name: str = ""
    baseline_rounds: Sequence[float] = ()
    note: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def value(self) -> float:
        return median(self.rounds)

    @property
    def baseline(self) -> float | None:
        return median(self.baseline_rounds) if self.baseline_rounds else None

    @property
    def ratio(self) -> float | None:
        return self.value / self.baseline if self.baseline else None

    @property
    def met(self) -> bool | None:
        """Whether the target was reached; None where there is none."""
        return self.target.met(self.value, self.ratio) if self.target else None

    def as_json(self) -> dict[str, Any]:
        """Return the row as it stands in the file."""
        return {
            **asdict(self),
            "rounds": list(self.rounds),
            "baseline_rounds": list(self.baseline_rounds),
            "value": self.value,
            "baseline": self.baseline,
            "ratio": self.ratio,
            "target": str(self.target) if self.target else None,
            "met": self.met,
        }


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least `percent` of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("a percentile needs values, and nothing was measured")
    return ordered[max(0, -int(-len(ordered) * percent // 100) - 1)]
