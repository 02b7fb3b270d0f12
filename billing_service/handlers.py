"""A confirmed order becomes a charge that is requested; the executor does the rest."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from uuid import UUID

from billing_service import repository
from billing_service.charge import ChargeState, NewCharge
from billing_service.messages import ORDER_CONFIRMED_TOPIC, ORDER_CONFIRMED_TYPE, OrderConfirmedMessage
from billing_service.repository import ExistingCharge
from shared.errors import MessageRejected
from shared.inbox.messages import ConsumedRecord, Incoming, decode_json
from shared.unit_of_work import UnitOfWork

# W3C Trace Context, version 00; another version would have to be understood before it is handed on.
_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII)


class OrderConfirmedHandler:
    """Inserts the charges of a batch in one statement, in the transaction that marks their events as handled.

    `signal` tells the executor, after the commit, that charges are due (a hint: it polls as well).
    """

    topics = (ORDER_CONFIRMED_TOPIC,)
    has_permanent_key = True  # UNIQUE (event_id) and UNIQUE (order_id) hold however old an event is

    def __init__(self, signal: Callable[[], None] = lambda: None) -> None:
        self._signal = signal

    def decode(self, record: ConsumedRecord) -> OrderConfirmedMessage:
        """Return the message of a record. Raises MessageRejected."""
        return decode_json(record, {ORDER_CONFIRMED_TYPE: OrderConfirmedMessage})

    async def handle(
        self, work: UnitOfWork, events: Sequence[Incoming[OrderConfirmedMessage]]
    ) -> Mapping[UUID, MessageRejected]:
        """Request the charges of these events; return those events that a person must see (field report F49)."""
        if not events:
            return {}
        inserted = await repository.insert_charges(work.session, [_new_charge(event) for event in events])
        if inserted:
            work.after_commit.append(self._signal)
        left = [event for event in events if event.event_id not in inserted]
        if not left:
            return {}
        existing = await repository.find_conflicting(
            work.session, [event.message.order_id for event in left], [event.event_id for event in left]
        )
        verdicts = ((event.event_id, _verdict(event, existing)) for event in left)
        return {event_id: verdict for event_id, verdict in verdicts if verdict is not None}


def _new_charge(event: Incoming[OrderConfirmedMessage]) -> NewCharge:
    message = event.message
    return NewCharge(
        order_id=message.order_id,
        event_id=event.event_id,
        customer_id=message.customer_id,
        amount=message.total_amount,
        currency=message.currency,
        traceparent=_traceparent(event.record.headers),
    )


def _traceparent(headers: Iterable[tuple[str, bytes | None]]) -> str | None:
    """Return the first well-formed traceparent: a broken one costs a trace, never a charge."""
    for name, value in headers:
        if name.lower() == "traceparent" and value is not None:
            text = value.decode("ascii", errors="replace")
            if _TRACEPARENT.fullmatch(text):
                return text
    return None


def _verdict(event: Incoming[OrderConfirmedMessage], existing: Sequence[ExistingCharge]) -> MessageRejected | None:
    """Classify an event whose charge was not inserted. None means that nothing is left to do."""
    message = event.message
    same_event = next((found for found in existing if found.event_id == event.event_id), None)
    if same_event is not None:
        stored = (same_event.order_id, same_event.amount, same_event.currency)
        if stored == (message.order_id, message.total_amount, message.currency):
            return None
        return MessageRejected(
            "payload_mismatch", f"event {event.event_id} is charged already, with another order, amount or currency"
        )
    same_order = next((found for found in existing if found.order_id == message.order_id), None)
    if same_order is None:
        raise RuntimeError(f"the charge of event {event.event_id} was not inserted and nothing is in its place")
    if same_order.event_id is None and same_order.state is ChargeState.CANCELLED:
        return None  # the cancellation came first, and stays
    return MessageRejected(
        "order_already_charged",
        f"order {message.order_id} has a charge from event {same_order.event_id}; this event would charge it again",
    )
