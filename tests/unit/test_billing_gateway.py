"""What each answer of the provider is taken for."""

import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from email.utils import format_datetime
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing_service.charge import (
    AnswerContradicts,
    Captured,
    ClaimedCharge,
    Declined,
    Forbidden,
    KeyReused,
    Outcome,
    RequestRefused,
    SlowDown,
    StillRunning,
    Unknown,
    canonical_request,
)
from billing_service.gateway import LONGEST_RETRY_AFTER_SECONDS, read_answer, retry_after_seconds
from shared.identifiers import new_event_id

CLAIMED = ClaimedCharge(
    charge_id=uuid4(),
    order_id=5,
    event_id=new_event_id(),
    amount=Decimal("19.9000"),
    currency="EUR",
    attempt=1,
    request=canonical_request(5, Decimal("19.90"), "EUR"),
)


def payment(**changes: Any) -> bytes:
    body = {
        "payment_id": "p-1",
        "order_id": 5,
        "amount": "19.90",
        "currency": "EUR",
        "status": "captured",
        "idempotency_key": str(CLAIMED.event_id),
        "created_at": "2025-01-02T03:04:05+00:00",
        **changes,
    }
    return json.dumps(body).encode()


def read(status: int, body: bytes = b"", **headers: str) -> Outcome:
    return read_answer(CLAIMED, status, {name.replace("_", "-"): value for name, value in headers.items()}, body)


def test_the_confirmed_payment_is_captured() -> None:
    assert read(201, payment()) == Captured("p-1")


def test_a_decline_is_a_result_with_its_reason() -> None:
    assert read(402, payment(status="declined", decline_reason="card_declined")) == Declined("p-1", "card_declined")


@pytest.mark.parametrize(
    ("changes", "different"),
    [
        ({"amount": "19.91"}, "amount"),
        ({"currency": "USD"}, "currency"),
        ({"order_id": 6}, "order_id"),
        ({"idempotency_key": "another"}, "idempotency_key"),
        ({"status": "declined", "decline_reason": "x"}, "status"),
    ],
)
def test_a_confirmation_of_another_payment_settles_nothing(changes: dict[str, Any], different: str) -> None:
    assert read(201, payment(**changes)) == AnswerContradicts((different,))


def test_a_decline_that_says_captured_settles_nothing() -> None:
    assert read(402, payment()) == AnswerContradicts(("status",))


@pytest.mark.parametrize(
    "body", [b"", b"ok", b'{"result": "ok"}', b"[]", payment(payment_id="a\0b"), payment(payment_id="x" * 500)]
)
@pytest.mark.parametrize("status", [200, 201, 402])
def test_an_answer_that_cannot_be_read_leaves_the_outcome_unknown(status: int, body: bytes) -> None:
    assert read(status, body) == Unknown("unreadable_answer")


def test_a_key_used_with_another_body_is_told_from_a_refused_request() -> None:
    assert read(422, b'{"type": "urn:payment-provider:problem:idempotency-key-reused"}') == KeyReused()
    assert read(422, b'{"type": "urn:payment-provider:problem:invalid-request"}') == RequestRefused(422)
    assert read(422, b"no problem+json") == RequestRefused(422)


@pytest.mark.parametrize("status", [400, 413, 415])
def test_a_request_that_can_never_be_accepted_goes_to_a_person(status: int) -> None:
    assert read(status) == RequestRefused(status)


@pytest.mark.parametrize("status", [301, 307, 401, 403, 404, 405])
def test_a_provider_that_does_not_know_us_is_no_fault_of_the_charge(status: int) -> None:
    assert read(status) == Forbidden(status)


@pytest.mark.parametrize("status", [500, 502, 503, 504, 599])
def test_a_server_error_leaves_the_outcome_unknown(status: int) -> None:
    assert read(status, Retry_After="7") == Unknown("server_error", 7.0)


def test_a_running_request_and_too_many_requests_wait_as_asked() -> None:
    assert read(409, Retry_After="2") == StillRunning(2.0)
    assert read(429, Retry_After="3") == SlowDown(3.0)


@given(status=st.integers(200, 599), body=st.one_of(st.binary(max_size=200), st.just(payment())))
def test_no_answer_raises_and_only_its_own_payment_captures(status: int, body: bytes) -> None:
    outcome = read(status, body)
    if isinstance(outcome, Captured):
        assert 200 <= status < 300
        assert body == payment()


@pytest.mark.parametrize("text", ["", "soon", "-1", "1.5", "\u0663", "Wed, 99 Foo"])
def test_a_retry_after_that_cannot_be_read_is_as_if_it_was_not_there(text: str) -> None:
    assert retry_after_seconds(text) is None


def test_retry_after_takes_seconds_and_dates_up_to_an_hour() -> None:
    assert retry_after_seconds(" 12 ") == 12.0
    assert retry_after_seconds("9" * 50) == LONGEST_RETRY_AFTER_SECONDS
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    assert 27.0 <= (retry_after_seconds(soon) or 0) <= 31.0
    assert retry_after_seconds(format_datetime(datetime.now(UTC) - timedelta(days=1), usegmt=True)) == 0.0
