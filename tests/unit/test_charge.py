"""The charge's states, and what each answer of the provider means for it."""

import json
from decimal import Decimal
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing_service.charge import (
    TRANSITIONS,
    Aborted,
    AnswerContradicts,
    Captured,
    ChargeState,
    Declined,
    Forbidden,
    KeyReused,
    Outcome,
    RequestRefused,
    RetryPolicy,
    Review,
    ReviewReason,
    Settle,
    SlowDown,
    StillRunning,
    TryAgain,
    Unknown,
    canonical_request,
    may_follow,
    next_step,
)
from shared.money import exponent, parse_amount

POLICY = RetryPolicy(first_seconds=0.5, most_seconds=60.0)
OUTCOMES: list[Outcome] = [
    Captured("p-1"),
    Declined("p-1", "card_declined"),
    Unknown("timeout"),
    StillRunning(),
    SlowDown(3.0),
    Forbidden(401),
    KeyReused(),
    RequestRefused(400),
    AnswerContradicts(("amount",)),
    Aborted(),
]


def test_every_outcome_has_its_case_here() -> None:
    assert {type(outcome) for outcome in OUTCOMES} == set(get_args(Outcome))


@pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda outcome: type(outcome).__name__)
def test_only_a_definite_answer_settles(outcome: Outcome) -> None:
    step = next_step(outcome, 1, POLICY)
    match outcome:
        case Captured():
            assert step == Settle(ChargeState.CAPTURED, "p-1")
        case Declined():
            assert step == Settle(ChargeState.DECLINED, "p-1", "card_declined")
        case KeyReused():
            assert step == Review(ReviewReason.KEY_REUSED)
        case RequestRefused():
            assert step == Review(ReviewReason.REQUEST_REFUSED)
        case AnswerContradicts():
            assert step == Review(ReviewReason.ANSWER_CONTRADICTS)
        case _:
            assert isinstance(step, TryAgain)


@pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda outcome: type(outcome).__name__)
def test_every_step_is_a_transition_of_a_requested_charge(outcome: Outcome) -> None:
    match next_step(outcome, 1, POLICY):
        case Settle(state):
            assert may_follow(ChargeState.REQUESTED, state)
        case Review():
            assert may_follow(ChargeState.REQUESTED, ChargeState.NEEDS_REVIEW)
        case TryAgain(after):
            assert after >= 0


def test_final_states_stay_final() -> None:
    final = {state for state, following in TRANSITIONS.items() if not following}
    assert final == {ChargeState.DECLINED, ChargeState.CANCELLED, ChargeState.REFUNDED}
    assert set(TRANSITIONS) == set(ChargeState)
    assert not any(may_follow(state, ChargeState.REQUESTED) for state in ChargeState)


@given(attempt=st.integers(1, 10_000))
def test_backoff_grows_to_its_cap_and_no_further(attempt: int) -> None:
    ceiling = min(60.0, 0.5 * 2 ** min(attempt - 1, 30))
    assert 0 <= POLICY.delay_seconds(attempt) <= ceiling


def test_backoff_is_spread_over_the_whole_interval() -> None:
    delays = [POLICY.delay_seconds(8) for _ in range(400)]
    assert min(delays) < 10
    assert max(delays) > 50


@given(attempt=st.integers(1, 100), wanted=st.floats(0, 3600))
def test_retry_after_is_never_undercut(attempt: int, wanted: float) -> None:
    for outcome in (Unknown("server_error", wanted), SlowDown(wanted), StillRunning(wanted)):
        step = next_step(outcome, attempt, POLICY)
        assert isinstance(step, TryAgain)
        assert wanted <= step.after_seconds <= wanted + 6.0


CURRENCIES = ("EUR", "JPY", "KWD", "CLF")


@given(order_id=st.integers(1, 2**63 - 1), units=st.integers(1, 999_999_999_999), currency=st.sampled_from(CURRENCIES))
def test_f31_the_request_has_one_spelling_and_loses_nothing(order_id: int, units: int, currency: str) -> None:
    amount = Decimal(units).scaleb(-exponent(currency))
    request = canonical_request(order_id, amount, currency)
    # As it comes back from NUMERIC(19,4): equal, with other trailing zeros.
    assert request == canonical_request(order_id, amount.quantize(Decimal("0.0001")), currency)
    body = json.loads(request)
    assert body.keys() == {"order_id", "amount", "currency"}
    assert (body["order_id"], body["currency"]) == (order_id, currency)
    assert parse_amount(body["amount"], currency) == amount


def test_a_request_does_not_depend_on_todays_list_of_currencies() -> None:
    assert canonical_request(1, Decimal("10.5000"), "ZZZ") == b'{"order_id":1,"amount":"10.5","currency":"ZZZ"}'
    assert canonical_request(1, Decimal("10.5000"), "JPY") == b'{"order_id":1,"amount":"10.5","currency":"JPY"}'


def test_an_amount_that_is_no_number_makes_no_request() -> None:
    with pytest.raises(ValueError, match="finite"):
        canonical_request(1, Decimal("NaN"), "EUR")
