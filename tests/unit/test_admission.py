"""Backpressure: what is past a limit is refused with when to come back; without a measurement nothing is."""

from __future__ import annotations

import pytest

from shared.errors import Unavailable
from shared.outbox.admission import Admission, BacklogLimits
from shared.outbox.backlog import Backlog

HUGE = Backlog(events=10**6, at_least=True, oldest_age_seconds=10**6)


def admission(backlog: Backlog | None, **limits: float) -> Admission:
    return Admission(BacklogLimits(**limits), lambda: backlog)  # type: ignore[arg-type]


@pytest.mark.parametrize("backlog", [None, Backlog(0, False, 0.0), Backlog(20, False, 5.0)])
def test_at_a_limit_work_is_admitted(backlog: Backlog | None) -> None:
    admission(backlog, events=20, age_seconds=5.0).check()


def test_without_limits_everything_is_admitted() -> None:
    admission(HUGE).check()


@pytest.mark.parametrize(
    ("backlog", "limits", "message"),
    [
        (Backlog(21, False, 0.0), {"events": 20}, "more than 20 events"),
        (Backlog(1, False, 5.1), {"age_seconds": 5.0}, "more than 5 s"),
        (HUGE, {"events": 10, "age_seconds": 10.0}, "more than 10 events"),
    ],
)
def test_past_a_limit_work_is_refused_with_when_to_come_back(
    backlog: Backlog, limits: dict[str, float], message: str
) -> None:
    with pytest.raises(Unavailable, match=message) as refusal:
        admission(backlog, **limits).check()
    assert refusal.value.retry_after_seconds > 0
    assert "Nothing was stored and no money moved" in refusal.value.detail
