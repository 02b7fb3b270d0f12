"""What an inbox accepts: the event message, how its bytes are read, and the port that a service's handler fills.

Headers of our events, written by the relay as UTF-8: `event_id`, `event_type`, `traceparent`. The payload decides; a
header only confirms it. An `event_id` header that contradicts the payload makes the record invalid, a null one says
nothing, and everything else in headers is data (field report F30).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar
from uuid import UUID

from pydantic import UUID7, AwareDatetime, BaseModel, ConfigDict, ValidationError

from shared.errors import MessageRejected
from shared.kafka.records import ConsumedRecord
from shared.unit_of_work import UnitOfWork

__all__ = ["ConsumedRecord", "EventMessage", "Handler", "Incoming", "MessageRejected", "decode_json", "stated_event_id"]

EVENT_ID_HEADER = "event_id"
_DETAIL_CHARACTERS = 300


class EventMessage(BaseModel):
    """The fields that every event has (R-KFK-IDEM-1). Strict types; unknown fields are passed over, so that a producer
    may add some before its consumers know them."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    event_id: UUID7
    event_type: str
    occurred_at: AwareDatetime


M = TypeVar("M", bound=EventMessage)
M_co = TypeVar("M_co", bound=EventMessage, covariant=True)


@dataclass(frozen=True, slots=True)
class Incoming(Generic[M_co]):
    """An event that this consumer group has not handled yet."""

    event_id: UUID
    message: M_co
    record: ConsumedRecord


class Handler(Protocol[M]):
    """What a service does with the events of some topics, inside the inbox's transaction."""

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics to subscribe to."""

    @property
    def has_permanent_key(self) -> bool:
        """Whether the service's own tables keep every event id for ever under a unique key.

        Only such a handler is given events older than the dedup window, and must then find duplicates itself.
        """

    def decode(self, record: ConsumedRecord) -> M:
        """Read a record. Raises MessageRejected with a reason code; the record is then dead-lettered."""

    async def handle(self, work: UnitOfWork, events: Sequence[Incoming[M]]) -> Mapping[UUID, MessageRejected]:
        """Apply events that are new, unique and sorted by event id; return those to dead-letter and why.

        Works on `work.session` only and neither commits nor waits for anything but the database. What it raises rolls
        the whole batch back: a transient error (errors.is_transient) is tried again, any other is narrowed down to the
        event that causes it.
        """


class _Envelope(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    event_type: str


class _Identity(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    event_id: UUID7


def decode_json(record: ConsumedRecord, models: Mapping[str, type[M]]) -> M:
    """Read a JSON payload with the model of its event type.

    Raises MessageRejected with one of the reasons tombstone, not_json, unknown_event_type, invalid_event_id,
    invalid_message, event_id_mismatch. Details name fields and never repeat values.
    """
    if record.value is None:
        raise MessageRejected("tombstone", "the record has no value")
    for name, likely in models.items():
        # Nearly every record is of the type that its bytes name. The model decides: its event_type is a literal.
        if name.encode() in record.value:
            with suppress(ValidationError):
                message = likely.model_validate_json(record.value)
                if message.event_type == name:
                    _confirm_by_headers(record, message.event_id)
                    return message
    try:
        model = models.get(_Envelope.model_validate_json(record.value).event_type)
        if model is None:
            raise MessageRejected("unknown_event_type", "event_type: no such type is accepted here")
        message = model.model_validate_json(record.value)
    except ValidationError as error:
        raise _rejection(error) from None
    _confirm_by_headers(record, message.event_id)
    return message


def stated_event_id(record: ConsumedRecord) -> UUID | None:
    """Return the event id of a record that could not be read, when its payload states one and no header denies it."""
    if record.value is None:
        return None
    try:
        event_id = _Identity.model_validate_json(record.value).event_id
        _confirm_by_headers(record, event_id)
    except (ValidationError, MessageRejected):
        return None
    return event_id


def _confirm_by_headers(record: ConsumedRecord, event_id: UUID) -> None:
    for name, value in record.headers:
        if name == EVENT_ID_HEADER and value is not None and _header_id(value) != event_id:
            raise MessageRejected("event_id_mismatch", "the event_id header and the payload's event_id differ")


def _header_id(value: bytes) -> UUID | None:
    try:
        return UUID(value.decode("ascii"))
    except ValueError:
        return None


def _rejection(error: ValidationError) -> MessageRejected:
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    if any(problem["type"] == "json_invalid" for problem in problems):
        return MessageRejected("not_json", "the payload is not JSON")
    fields = [(".".join(map(str, problem["loc"])) or "payload", problem["type"]) for problem in problems]
    reason = "invalid_event_id" if any(field == "event_id" for field, _ in fields) else "invalid_message"
    return MessageRejected(reason, "; ".join(f"{field}: {kind}" for field, kind in fields)[:_DETAIL_CHARACTERS])
