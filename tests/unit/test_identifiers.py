"""UUIDv7 event ids: identity and locality, never an order (field report F33)."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.identifiers import created_at, lowest_id_at, new_event_id

MOMENTS = st.datetimes(datetime(1970, 1, 1), datetime(9999, 12, 31)).map(lambda moment: moment.replace(tzinfo=UTC))  # noqa: DTZ001


def test_a_new_id_is_a_standard_uuid_of_version_7_that_carries_now() -> None:
    before = datetime.now(UTC) - timedelta(milliseconds=2)
    made = new_event_id()
    assert type(made) is uuid.UUID
    assert (made.version, made.variant) == (7, uuid.RFC_4122)
    assert before <= created_at(made) <= datetime.now(UTC) + timedelta(milliseconds=2)


def test_ten_thousand_new_ids_differ() -> None:
    assert len({new_event_id() for _ in range(10_000)}) == 10_000


@given(MOMENTS, st.integers(0, 2**74 - 1))
def test_every_id_of_a_millisecond_lies_between_its_lowest_id_and_the_next(moment: datetime, random: int) -> None:
    lowest = lowest_id_at(moment)
    made = uuid.UUID(int=lowest.int | (7 << 76) | ((random >> 62) << 64) | (0b10 << 62) | (random & (2**62 - 1)))
    assert made.version == 7
    assert lowest <= made < uuid.UUID(int=min(lowest.int + (1 << 80), 2**128 - 1))
    assert abs(created_at(made) - moment) < timedelta(milliseconds=1)


def test_an_id_of_another_version_has_no_time() -> None:
    with pytest.raises(ValueError, match="version 4"):
        created_at(uuid.uuid4())


def test_an_id_past_the_calendar_is_refused_instead_of_overflowing() -> None:
    with pytest.raises(ValueError, match="9999"):
        created_at(uuid.UUID(int=(2**48 - 1) << 80 | 7 << 76 | 0b10 << 62))


def test_f32_a_naive_time_is_refused() -> None:
    with pytest.raises(ValueError, match="naive"):
        lowest_id_at(datetime(2026, 1, 1))  # noqa: DTZ001 - the naive time is the point
