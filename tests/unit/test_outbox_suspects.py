"""What a relay remembers of batches that were refused."""

from __future__ import annotations

from shared.outbox.parking import Suspects

PLACE = ("topic", 3)


def learned(suspects: Suspects, size_bytes: int) -> None:
    """A batch of ten records was refused, and in halves all of it was taken."""
    suspects.refused(PLACE, {3: 10}, 10, size_bytes)
    suspects.acknowledged(PLACE, {3: 5})
    suspects.acknowledged(PLACE, {3: 10})


def test_what_a_topic_takes_is_remembered_and_every_hour_twice_as_much_is_tried() -> None:
    now = [0.0]
    suspects = Suspects(clock=lambda: now[0])
    assert suspects.batch_bytes("topic") is None
    learned(suspects, 600_000)
    assert suspects.batch_bytes("topic") == 300_000
    now[0] = 3000.0
    assert suspects.batch_bytes("topic") == 300_000
    now[0] = 3601.0
    assert suspects.batch_bytes("topic") == 600_000
    assert suspects.batch_bytes("topic") == 600_000
    now[0] = 7300.0
    assert suspects.batch_bytes("topic") is None, "more than a producer ever sends"


def test_a_batch_with_a_guilty_event_in_it_says_nothing_of_its_topic() -> None:
    suspects = Suspects()
    suspects.refused(PLACE, {3: 10}, 2, 600_000)
    suspects.refused(PLACE, {3: 9}, 1, 300_000)
    suspects.parked(3, 9)
    suspects.acknowledged(PLACE, {3: 10})
    assert suspects.batch_bytes("topic") is None
    assert suspects.most_records(PLACE) is None
