"""Payment results become the orders' payment status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from uuid import UUID

from order_service import repository
from order_service.messages import PAYMENT_TOPIC, PaymentCapturedMessage, PaymentDeclinedMessage, PaymentMessage
from order_service.order import PAYMENT_TRANSITIONS, PaymentStatus
from shared.errors import MessageRejected
from shared.inbox.messages import ConsumedRecord, Incoming, decode_json
from shared.unit_of_work import UnitOfWork

_MODELS: Mapping[str, type[PaymentMessage]] = {
    "payment.captured.v1": PaymentCapturedMessage,
    "payment.declined.v1": PaymentDeclinedMessage,
}


class PaymentHandler:
    """Applies the transition table of `payment_status`; what it does not allow is classified, never ignored."""

    topics = (PAYMENT_TOPIC,)
    has_permanent_key = True  # a final status never changes, however old the event that comes again

    def decode(self, record: ConsumedRecord) -> PaymentMessage:
        """Return the message of a record. Raises MessageRejected."""
        return decode_json(record, _MODELS)

    async def handle(
        self, work: UnitOfWork, events: Sequence[Incoming[PaymentMessage]]
    ) -> Mapping[UUID, MessageRejected]:
        """Settle the orders of these events in one statement; return the events that a person must see."""
        first = {event.message.order_id: event for event in reversed(events)}
        moved = await repository.settle_payments(
            work.session,
            list(first),
            [_result(event.message) for event in first.values()],
            [event.event_id for event in first.values()],
        )
        settled = {first[order_id].event_id for order_id in moved}
        left = [event for event in events if event.event_id not in settled]
        if not left:
            return {}
        found = await repository.payment_statuses(work.session, [event.message.order_id for event in left])
        verdicts = ((event.event_id, _verdict(event.message, found.get(event.message.order_id))) for event in left)
        return {event_id: verdict for event_id, verdict in verdicts if verdict is not None}


def _result(message: PaymentMessage) -> PaymentStatus:
    match message:
        case PaymentCapturedMessage():
            return PaymentStatus.CHARGED
        case PaymentDeclinedMessage():
            return PaymentStatus.DECLINED


def _verdict(message: PaymentMessage, current: PaymentStatus | None) -> MessageRejected | None:
    result = _result(message)
    if current is None:
        return MessageRejected("unknown_order", f"there is no order {message.order_id}; was this database restored?")
    if current is result:
        return None  # the same result told by another event: nothing is left to do
    if result in PAYMENT_TRANSITIONS[current]:
        raise RuntimeError(f"order {message.order_id} is {current} and was not settled")
    return MessageRejected(
        "payment_conflict", f"order {message.order_id} is {current} for good and this event says {result}"
    )
