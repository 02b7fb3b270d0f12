"""Messages that no retry makes acceptable: what other producers, tools and bugs put into a topic."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import replace

from shared.identifiers import new_event_id
from shared.kafka.records import ConsumedRecord


def poison(genuine: ConsumedRecord, partitions: int) -> Sequence[ConsumedRecord]:
    """Return bad copies of a genuine order event, each a dead letter of its own, spread over the topic's partitions.

    Raises ValueError when the genuine one is not an order event.
    """
    if genuine.value is None:
        raise ValueError("a genuine event is needed to make bad copies of")
    event = json.loads(genuine.value)
    values: list[bytes | None] = [
        b"{not json",
        b"",
        None,
        b"\xff\xfe\x00",
        b"[]",
        _changed(event, total_amount=19.99),
        _changed(event, total_amount="1e3"),
        _changed(event, total_amount="-1"),
        _changed(event, currency="XYZ"),
        _changed(event, event_id=str(uuid.uuid4())),
        _without(event, "event_id"),
        _without(event, "order_id"),
        _changed(event, occurred_at="2026-01-01T00:00:00"),
        _changed(event, event_type="order.confirmed.v9"),
        # A second event for an order that has its charge: valid in itself, and money if it were believed.
        _changed(event),
    ]
    made = [
        replace(genuine, key=f"poison-{number}".encode(), value=value, headers=(), partition=number % partitions)
        for number, value in enumerate(values)
    ]
    another = new_event_id()
    contradicted = replace(made[-1], value=_changed(event), headers=(("event_id", str(another).encode()),))
    # The same event id with another amount: a producer's fault, never a second charge.
    altered = replace(genuine, value=json.dumps({**event, "customer_id": event["customer_id"] + 1}).encode())
    return [*made, contradicted, altered]


def _changed(event: dict[str, object], **changes: object) -> bytes:
    return json.dumps({**event, "event_id": str(new_event_id()), **changes}).encode()


def _without(event: dict[str, object], name: str) -> bytes:
    changed = {**event, "event_id": str(new_event_id())}
    del changed[name]
    return json.dumps(changed).encode()
