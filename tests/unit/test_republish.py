"""What an operator may write for a time, which events are too old to be published again, and the pace."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from shared.errors import InvalidInput, Refused
from shared.outbox.republish import Pace, parse_moment, refuse_outside_window

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("given", "moment"),
    [
        ("90s", NOW - timedelta(seconds=90)),
        ("12h", NOW - timedelta(hours=12)),
        ("3d", NOW - timedelta(days=3)),
        ("2026-11-30T10:00:00Z", NOW - timedelta(hours=2)),
        ("2026-11-30T11:00:00+01:00", NOW - timedelta(hours=2)),
    ],
)
def test_a_moment_is_a_time_with_offset_or_a_duration(given: str, moment: datetime) -> None:
    assert parse_moment(given, NOW) == moment


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("yesterday", "is no time"),
        ("3 days", "is no time"),
        ("2026-11-30T10:00:00", "no offset"),
        ("-3d", "is no time"),
    ],
)
def test_f32_anything_else_is_refused_with_how_to_write_it(given: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        parse_moment(given, NOW)


def test_f24_events_older_than_what_consumers_remember_are_refused() -> None:
    refuse_outside_window(NOW - timedelta(days=29), 30, NOW)
    with pytest.raises(Refused, match=r"would not know them as duplicates\. Say --since 2026-11-01T12:00Z"):
        refuse_outside_window(NOW - timedelta(days=29, seconds=1), 30, NOW)


async def test_the_pace_is_kept_on_average() -> None:
    clock = 100.0

    async def sleep(seconds: float) -> None:
        nonlocal clock
        clock += seconds

    pace = Pace(50.0, lambda: clock, sleep)
    for _ in range(10):
        await pace.admit(100)
    assert clock == pytest.approx(100.0 + 900 / 50)
