"""Whether an event or our code is at fault when the handler fails."""

from __future__ import annotations

import pytest

from shared.inbox.blame import LONE_ATTEMPTS, Blame, HandlerFails
from shared.kafka.records import ConsumedRecord

BUG = KeyError("bug")


def failed(*offsets: int) -> list[tuple[ConsumedRecord, Exception]]:
    return [(ConsumedRecord("t", 0, offset, None, b"", (), 0), BUG) for offset in offsets]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def blame(clock: Clock) -> Blame:
    return Blame(60.0, clock)


def test_a_lone_event_after_successes_is_at_fault_at_once(blame: Blame) -> None:
    for offset in range(20):
        blame.handler_took_events()
        blame.judge(failed(offset))


def test_all_events_of_a_batch_are_our_codes_fault_however_often(blame: Blame, clock: Clock) -> None:
    blame.handler_took_events()
    for _ in range(50):
        clock.now += 60
        with pytest.raises(HandlerFails, match=r"every event \(KeyError\); this is our code.*nothing is dead-lettered"):
            blame.judge(failed(1, 2))
    with pytest.raises(HandlerFails):
        blame.judge(failed(1))  # only one of them was read this time
    blame.handler_took_events()
    blame.judge(failed(1))


def test_the_third_different_event_in_a_row_is_our_codes_fault(blame: Blame) -> None:
    blame.handler_took_events()
    blame.judge(failed(1))
    blame.judge(failed(1))  # the same one again: its letter could not be written
    blame.judge(failed(2))
    for _ in range(50):
        with pytest.raises(HandlerFails, match="our code"):
            blame.judge(failed(3))


def test_a_lone_event_of_a_fresh_process_is_tried_for_a_while_and_then_at_fault(blame: Blame, clock: Clock) -> None:
    for _ in range(LONE_ATTEMPTS * 2):
        with pytest.raises(HandlerFails, match="only event"):
            blame.judge(failed(1))
    clock.now += 60
    blame.judge(failed(1))


def test_a_lone_event_needs_its_attempts_however_long_they_take(blame: Blame, clock: Clock) -> None:
    for _ in range(LONE_ATTEMPTS - 1):
        with pytest.raises(HandlerFails):
            blame.judge(failed(1))
        clock.now += 1000
    blame.judge(failed(1))
