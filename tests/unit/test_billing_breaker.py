"""When the provider is called, and how many calls run at once."""

import pytest

from billing_service.breaker import Admitted, BreakerState, CircuitBreaker
from billing_service.charge import Aborted, Captured, Declined, Forbidden, Outcome, SlowDown, StillRunning, Unknown


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> CircuitBreaker:
    return CircuitBreaker(8, failures_to_open=3, first_pause_seconds=1.0, most_pause_seconds=30.0, clock=clock)


def admitted(breaker: CircuitBreaker) -> Admitted:
    """A call that begins now."""
    call = breaker.begin()
    assert call is not None
    return call


def call(breaker: CircuitBreaker, outcome: Outcome) -> None:
    """A whole call."""
    breaker.record(outcome, admitted(breaker))


def opened(breaker: CircuitBreaker) -> None:
    for _ in range(3):
        call(breaker, Unknown("timeout"))
    assert breaker.state is BreakerState.OPEN


def test_a_run_of_failures_pauses_claiming(breaker: CircuitBreaker) -> None:
    call(breaker, Unknown("timeout"))
    call(breaker, Unknown("timeout"))
    assert breaker.allowance(0) == 8
    call(breaker, Unknown("connection"))
    assert breaker.state is BreakerState.OPEN
    assert breaker.allowance(0) == 0
    assert "3 calls failed (connection)" in breaker.reason


def test_one_answer_ends_a_run_of_failures(breaker: CircuitBreaker) -> None:
    for _ in range(10):
        call(breaker, Unknown("timeout"))
        call(breaker, Unknown("timeout"))
        call(breaker, Declined("p", "card_declined"))
    assert breaker.state is BreakerState.CLOSED


@pytest.mark.parametrize("status", [401, 403])
def test_a_provider_that_does_not_know_us_opens_at_once(breaker: CircuitBreaker, status: int) -> None:
    call(breaker, Forbidden(status))
    assert breaker.state is BreakerState.OPEN
    assert str(status) in breaker.reason


def test_half_open_allows_one_call_at_a_time(breaker: CircuitBreaker, clock: Clock) -> None:
    opened(breaker)
    clock.now += 31
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.allowance(5) == 1
    assert admitted(breaker).is_probe
    assert breaker.allowance(0) == 0
    assert breaker.begin() is None, "exactly one probe"


def test_a_probe_that_is_answered_closes(breaker: CircuitBreaker, clock: Clock) -> None:
    opened(breaker)
    clock.now += 31
    call(breaker, Captured("p"))
    assert breaker.state is BreakerState.CLOSED
    assert breaker.allowance(0) == 8
    assert breaker.reason == ""


def test_a_probe_that_fails_opens_again_for_longer(breaker: CircuitBreaker, clock: Clock) -> None:
    opened(breaker)
    first = breaker.seconds_until_allowed()
    for _ in range(3):
        clock.now += 31
        call(breaker, Unknown("timeout"))
    assert breaker.state is BreakerState.OPEN
    assert first < breaker.seconds_until_allowed() <= 30


def test_calls_from_before_do_not_lengthen_the_pause(breaker: CircuitBreaker, clock: Clock) -> None:
    before = [admitted(breaker) for _ in range(20)]
    opened(breaker)
    wait = breaker.seconds_until_allowed()
    assert wait <= 1.0
    for old in before[:10]:
        breaker.record(Unknown("timeout"), old)
    assert breaker.seconds_until_allowed() == wait
    clock.now += 31
    probe = admitted(breaker)
    breaker.record(Unknown("timeout"), before[10])
    assert breaker.allowance(0) == 0, "the probe is still under way"
    breaker.record(Captured("p"), probe)
    for old in before[11:]:
        breaker.record(Forbidden(401), old)
    assert breaker.state is BreakerState.CLOSED, "they began before the provider was found well again"


def test_a_claim_that_the_opening_overtook_is_not_admitted(breaker: CircuitBreaker) -> None:
    assert breaker.allowance(0) == 8
    opened(breaker)
    assert breaker.begin() is None


@pytest.mark.parametrize("end", [StillRunning(), Aborted()])
def test_a_probe_that_tells_nothing_lets_the_next_one_try(
    breaker: CircuitBreaker, clock: Clock, end: StillRunning | Aborted
) -> None:
    opened(breaker)
    clock.now += 31
    call(breaker, end)
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.allowance(0) == 1


def test_slow_down_halves_the_calls_and_pauses_then_recovers_step_by_step(
    breaker: CircuitBreaker, clock: Clock
) -> None:
    call(breaker, SlowDown(5.0))
    assert breaker.state is BreakerState.CLOSED
    assert breaker.allowance(0) == 0
    clock.now += 5
    assert breaker.allowance(0) == 4
    assert breaker.allowance(3) == 1
    for _ in range(3):
        call(breaker, Captured("p"))
    assert breaker.allowance(0) == 7
    for _ in range(20):
        call(breaker, Captured("p"))
    assert breaker.allowance(0) == 8


def test_slow_down_never_stops_for_good(breaker: CircuitBreaker, clock: Clock) -> None:
    for begun in [admitted(breaker) for _ in range(20)]:
        breaker.record(SlowDown(), begun)
    clock.now += 1
    assert breaker.allowance(0) == 1


def test_a_long_retry_after_of_one_charge_does_not_stop_the_others_for_long(
    breaker: CircuitBreaker, clock: Clock
) -> None:
    call(breaker, SlowDown(3600.0))
    clock.now += 30
    assert breaker.allowance(0) == 4
