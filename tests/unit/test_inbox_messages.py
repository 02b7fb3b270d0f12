"""Reading records: every way in which one can be wrong has a reason code, and no value is repeated in an error."""

from __future__ import annotations

from uuid import uuid4

import pytest

from shared.errors import MessageRejected
from shared.identifiers import new_event_id
from shared.inbox.messages import decode_json, stated_event_id
from tests.support.inbox import Happened, payload, record

MODELS = {"test.happened.v1": Happened}
EVENT_ID = new_event_id()
OTHER_ID = new_event_id()
SECRET = "4111111111111111"


def test_a_payload_is_read_with_the_model_of_its_type() -> None:
    message = decode_json(record(payload(7, EVENT_ID), 0), MODELS)
    assert (message.event_id, message.number, message.event_type) == (EVENT_ID, 7, "test.happened.v1")


def test_fields_that_this_consumer_does_not_know_are_passed_over() -> None:
    assert decode_json(record(payload(7, new_field={"a": 1}), 0), MODELS).number == 7


@pytest.mark.parametrize(
    ("value", "reason", "named"),
    [
        (None, "tombstone", ""),
        (b"", "not_json", ""),
        (b"{", "not_json", ""),
        (b"\xff\xfe\x00", "not_json", ""),
        (b"[" * 100_000, "not_json", ""),
        (b"[]", "invalid_message", "payload"),
        (b"null", "invalid_message", "payload"),
        (payload(1, event_type=None), "invalid_message", "event_type"),
        (payload(1, event_type=5), "invalid_message", "event_type"),
        (payload(1, event_type="test.unheard.v1"), "unknown_event_type", "event_type"),
        (payload(1, number=SECRET), "invalid_message", "number"),
        (payload(1, number=1.5), "invalid_message", "number"),
        (payload(1, number=None), "invalid_message", "number"),
        (payload(1, occurred_at="2026-01-01T00:00:00"), "invalid_message", "occurred_at"),
        (payload(1, occurred_at=1_700_000_000), "invalid_message", "occurred_at"),
        (payload(1, occurred_at="yesterday " + SECRET), "invalid_message", "occurred_at"),
        (payload(1).replace(b'"event_id": "', b'"event_id": "x'), "invalid_event_id", "event_id"),
        (payload(1, uuid4()), "invalid_event_id", "event_id"),
    ],
)
def test_a_record_that_cannot_be_read_is_rejected_with_a_reason_and_the_field(
    value: bytes | None, reason: str, named: str
) -> None:
    with pytest.raises(MessageRejected) as caught:
        decode_json(record(value, 0), MODELS)
    assert caught.value.reason == reason
    assert named in caught.value.detail
    assert SECRET not in caught.value.detail


def test_a_missing_event_id_is_rejected() -> None:
    value = payload(1).replace(b"event_id", b"evnt_id")
    with pytest.raises(MessageRejected) as caught:
        decode_json(record(value, 0), MODELS)
    assert caught.value.reason == "invalid_event_id"


@pytest.mark.parametrize(
    "headers",
    [
        [("event_id", str(EVENT_ID).encode())],
        [("event_id", str(EVENT_ID).upper().encode())],
        [("event_id", str(EVENT_ID).encode()), ("event_id", str(EVENT_ID).encode())],
        [("event_id", None)],
        [("traceparent", b"\xff\x00"), ("traceparent", None), ("anything", b"\x00"), ("anything", b"")],
    ],
)
def test_f30_repeated_null_and_binary_headers_are_data(headers: list[tuple[str, bytes | None]]) -> None:
    assert decode_json(record(payload(7, EVENT_ID), 0, headers), MODELS).event_id == EVENT_ID


@pytest.mark.parametrize(
    "headers",
    [
        [("event_id", str(OTHER_ID).encode())],
        [("event_id", str(EVENT_ID).encode()), ("event_id", str(OTHER_ID).encode())],
        [("event_id", b"\xff\xff")],
        [("event_id", b"")],
    ],
)
def test_f30_an_event_id_header_that_contradicts_the_payload_is_rejected(
    headers: list[tuple[str, bytes | None]],
) -> None:
    contradicted = record(payload(7, EVENT_ID), 0, headers)
    with pytest.raises(MessageRejected) as caught:
        decode_json(contradicted, MODELS)
    assert caught.value.reason == "event_id_mismatch"
    assert stated_event_id(contradicted) is None, "a mark under a disputed id would block the event it belongs to"


def test_an_unreadable_payload_still_states_its_event_id() -> None:
    assert stated_event_id(record(payload(1, EVENT_ID, number="x"), 0)) == EVENT_ID
    assert stated_event_id(record(payload(1, uuid4()), 0)) is None
    assert stated_event_id(record(None, 0, [("event_id", str(EVENT_ID).encode())])) is None
    assert stated_event_id(record(b"garbage", 0)) is None
