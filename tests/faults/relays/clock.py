"""A process whose clock is wrong: what Python tells of the time of day is off, the machine's clock is left alone."""

from __future__ import annotations

import datetime
import time
from datetime import datetime as real_datetime
from typing import Any


def shift(seconds: float) -> None:
    """Let `time` and `datetime` be off, for modules that are imported afterwards; the monotonic clock stays right."""
    real_time, real_time_ns = time.time, time.time_ns

    class _Instances(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, real_datetime)

    class Shifted(real_datetime, metaclass=_Instances):
        """datetime whose `now` is off."""

        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            return real_datetime.now(tz) + datetime.timedelta(seconds=seconds)

        @classmethod
        def utcnow(cls) -> Any:
            return real_datetime.now(datetime.UTC).replace(tzinfo=None) + datetime.timedelta(seconds=seconds)

    time.time = lambda: real_time() + seconds
    time.time_ns = lambda: real_time_ns() + int(seconds * 1e9)
    setattr(datetime, "datetime", Shifted)  # noqa: B010
