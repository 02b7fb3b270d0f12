"""Moments as an operator writes them."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from shared.errors import InvalidInput

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def parse_moment(given: str, now: datetime) -> datetime:
    """Return the moment, in UTC, that an operator wrote: ISO 8601 with an offset, or a duration back like 3d or 12h.

    Raises InvalidInput. A time without offset is refused (field report F32).
    """
    duration = re.fullmatch(r"(\d{1,6})([smhd])", given, re.ASCII)
    try:
        if duration:
            return now - timedelta(**{_UNITS[duration[2]]: int(duration[1])})
        moment = datetime.fromisoformat(given)
        if moment.tzinfo is not None:
            return moment.astimezone(UTC)
    except (ValueError, OverflowError):
        raise InvalidInput(f"{given!r} is no time; write 2026-11-30T12:00:00Z, or a duration like 12h or 3d") from None
    raise InvalidInput(f"{given!r} has no offset from UTC; write {moment.isoformat()}Z, or with +01:00")
