"""The dedup window against what Kafka may deliver again (field report F24)."""

from __future__ import annotations

import pytest

from shared.inbox.window import judge
from shared.kafka.topics import DAY_MILLISECONDS, TopicRetention


def topic(retention_days: float, segment_days: float = 1, policy: str = "delete") -> TopicRetention:
    config = {
        "retention.ms": str(int(retention_days * DAY_MILLISECONDS)),
        "segment.ms": str(int(segment_days * DAY_MILLISECONDS)),
        "cleanup.policy": policy,
    }
    return TopicRetention.of("orders", config)


@pytest.mark.parametrize(("retention", "segment", "enough"), [(7, 1, 9), (7, 7, 15), (0.5, 0.1, 2)])
def test_f24_the_window_must_outlast_retention_and_segment_and_a_day(
    retention: float, segment: float, enough: int
) -> None:
    topics = [topic(retention, segment)]
    assert judge(enough, topics, permanent_key=False).problem == ""
    verdict = judge(enough - 1, topics, permanent_key=False)
    assert verdict.forbids
    assert f"DEDUP_WINDOW_DAYS to {enough}" in verdict.problem
    assert "would take effect twice" in verdict.problem


@pytest.mark.parametrize("kept_for_ever", [topic(-1), topic(7, policy="compact")])
def test_f24_a_topic_that_keeps_everything_is_longer_than_any_window(kept_for_ever: TopicRetention) -> None:
    assert kept_for_ever.redelivery_seconds is None
    assert judge(400, [kept_for_ever], permanent_key=False).forbids


def test_f24_a_handler_with_a_permanent_key_goes_on_and_it_is_said_loudly() -> None:
    verdict = judge(2, [topic(7)], permanent_key=True)
    assert not verdict.forbids
    assert "keeps records for up to 8.0 days" in verdict.problem


def test_one_topic_of_several_is_enough() -> None:
    assert judge(30, [topic(7), topic(60)], permanent_key=False).forbids
    assert judge(30, [topic(7), topic(7, policy="compact,delete")], permanent_key=False).problem == ""
