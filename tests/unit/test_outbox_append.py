"""What could never leave the outbox fails the request that made it (field report F12)."""

from __future__ import annotations

import pytest

from shared.errors import InvalidInput, TooLarge
from shared.identifiers import new_event_id
from shared.outbox.append import MAX_EVENT_BYTES, EventWriter, OutgoingEvent


def event(**changes: object) -> OutgoingEvent:
    fields: dict[str, object] = {
        "event_id": new_event_id(),
        "topic": "order-service.order.confirmed",
        "key": b"1",
        "event_type": "order.confirmed.v1",
        "payload": b"{}",
    }
    return OutgoingEvent(**{**fields, **changes})  # type: ignore[arg-type]


def test_an_ordinary_event_passes() -> None:
    EventWriter().check(event(headers={"traceparent": "00-ab"}))


def test_f12_an_event_that_fits_into_no_batch_is_refused_with_413() -> None:
    with pytest.raises(TooLarge, match=str(MAX_EVENT_BYTES)) as refused:
        EventWriter().check(event(payload=b"x" * MAX_EVENT_BYTES))
    assert refused.value.status == 413


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"key": b""}, "key"),
        ({"topic": "no blanks"}, "topic"),
        ({"topic": "x" * 250}, "topic"),
        ({"headers": {"bad name": "x"}}, "header"),
        ({"headers": {"name": "x\0"}}, "header"),
        ({"headers": {"name": "x" * 1025}}, "header"),
    ],
)
def test_what_kafka_or_postgresql_would_refuse_later_is_refused_now(change: dict[str, object], names: str) -> None:
    with pytest.raises(InvalidInput, match=names):
        EventWriter().check(event(**change))
