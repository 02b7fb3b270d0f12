"""UUIDv7 event ids (RFC 9562): identity and locality on disk, never an order of events (field report F33)."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID

import uuid_utils.compat as uuid_utils

_RANDOM_BITS = 80
_LAST_MILLISECOND = (1 << 48) - 1


def new_event_id() -> UUID:
    """Return a new UUIDv7 as a standard `uuid.UUID` (R-KFK-IDEM-1: the producer makes it when the event is created)."""
    return uuid_utils.uuid7()


def created_at(event_id: UUID) -> datetime:
    """Return the UTC time, to the millisecond, that a UUIDv7 carries in its first 48 bits.

    Raises ValueError for a UUID of another version, and for a time past the year 9999.
    """
    if event_id.version != 7:
        raise ValueError(f"{event_id} is a UUID of version {event_id.version}, not 7")
    milliseconds = event_id.int >> _RANDOM_BITS
    try:
        return datetime.fromtimestamp(milliseconds / 1000, tz=UTC)
    except (ValueError, OverflowError, OSError):
        raise ValueError(f"{event_id} carries a time past the year 9999") from None


def lowest_id_at(moment: datetime) -> UUID:
    """Return the smallest UUID whose first 48 bits are `moment`: the bound of a partition by event id.

    `moment` must be timezone-aware. Partition bounds compare all 128 bits, so version and variant stay zero.
    """
    if moment.tzinfo is None:
        raise ValueError("a naive time has no place on the time line; give it a timezone")
    milliseconds = min(max(int(moment.timestamp() * 1000), 0), _LAST_MILLISECOND)
    return UUID(int=milliseconds << _RANDOM_BITS)
