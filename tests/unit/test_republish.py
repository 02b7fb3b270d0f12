"""What an operator may write for a time, which events are too old to be published again, and the pace."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from shared.errors import InvalidInput, Refused
from shared.moments import parse_moment
from shared.outbox.republish import Pace, refuse_outside_window

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
    assert parse_moment(given, NOW).tzinfo is UTC, "messages say Z"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("yesterday", "is no time"),
        ("3 days", "is no time"),
        ("2026-11-30T10:00:00", r"no offset from UTC; write 2026-11-30T10:00:00Z"),
        ("2026-11-30", r"no offset from UTC; write 2026-11-30T00:00:00Z"),
        ("999999d", "is no time"),
        ("0001-01-01T00:00:00+14:00", "is no time"),
        ("-3d", "is no time"),
    ],
)
def test_f32_anything_else_is_refused_with_how_to_write_it(given: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        parse_moment(given, NOW)


def test_f24_events_older_than_what_consumers_remember_are_refused() -> None:
    refuse_outside_window(NOW - timedelta(days=29), 30, NOW)
    with pytest.raises(Refused, match=r"would not know them as duplicates\. Say --since 2026-11-01T12:01Z"):
        refuse_outside_window(NOW - timedelta(days=29, seconds=1), 30, NOW)


def test_f24_events_that_consumers_forget_before_the_last_of_them_is_sent_are_refused() -> None:
    since = NOW - timedelta(days=28)
    refuse_outside_window(since, 30, NOW, timedelta(days=1))
    with pytest.raises(Refused, match=r"sending them takes 2 days, 0:00:00; a higher --rate helps"):
        refuse_outside_window(since, 30, NOW, timedelta(days=2))


class Clock:
    """A clock that only sleeping and the test move."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


async def send(pace: Pace, events: int) -> None:
    await pace.wait()
    pace.spend(events)


async def test_the_pace_is_kept_however_long_sending_takes() -> None:
    clock = Clock()
    pace = Pace(50.0, clock, clock.sleep)
    for _ in range(10):
        await pace.wait()
        clock.now += 1.5  # of the two seconds that a hundred events may take
        pace.spend(100)
    assert clock.now == pytest.approx(100.0 + 900 / 50 + 1.5)


async def test_f34_what_a_stall_kept_back_is_not_sent_in_a_burst_afterwards() -> None:
    clock = Clock()
    pace = Pace(50.0, clock, clock.sleep)
    await send(pace, 100)
    clock.now += 600
    for _ in range(3):
        await send(pace, 100)
    assert clock.now == pytest.approx(700.0 + 200 / 50)


@pytest.mark.parametrize(("rate", "most"), [(0.1, 1), (1, 1), (20.5, 20), (100, 100), (5000, 100)])
def test_no_more_is_sent_at_once_than_a_second_allows(rate: float, most: int) -> None:
    assert Pace(rate).most_at_once == most
