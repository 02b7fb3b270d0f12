"""No default of a client or a broker decides about loss or order: each is set (field report F17)."""

from __future__ import annotations

from typing import Any

import pytest

from shared.kafka import consumer as consumer_module
from shared.kafka import producer as producer_module
from shared.kafka.consumer import ConsumerSettings, GroupConsumer
from shared.kafka.producer import IdempotentProducer
from shared.kafka.settings import KafkaSettings
from shared.kafka.topics import TopicSpec

KAFKA = KafkaSettings("broker:9092", client_id="test", request_timeout_seconds=30)


class Options(dict[str, Any]):
    """Stands in for a client and keeps what it was given."""

    def __init__(self, *topics: str, **options: Any) -> None:
        super().__init__(options)

    def subscribe(self, **_: Any) -> None:
        pass


def test_f17_the_producer_waits_for_all_replicas_and_is_idempotent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_module, "AIOKafkaProducer", Options)
    options = IdempotentProducer(KAFKA, max_batch_bytes=1, max_request_bytes=1)._producer
    assert options["acks"] == "all"
    assert options["enable_idempotence"] is True
    assert options["request_timeout_ms"] == 30_000


async def test_f17_the_consumer_commits_by_hand_and_starts_at_the_earliest_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(consumer_module, "AIOKafkaConsumer", Options)
    settings = ConsumerSettings(
        group="billing-order-confirmed",
        topics=("t",),
        instance_id="one",
        session_timeout_seconds=10,
        rebalance_timeout_seconds=40,
        max_poll_interval_seconds=300,
        commit_deadline_seconds=10,
        leave_deadline_seconds=5,
    )

    async def nothing() -> None:
        pass

    options: Any = GroupConsumer(KAFKA, settings, before_rebalance=nothing, after_rebalance=lambda: None)._consumer
    assert options["enable_auto_commit"] is False
    assert options["auto_offset_reset"] == "earliest"
    assert options["group_id"] == "billing-order-confirmed"
    assert options["group_instance_id"] == "one"
    assert options["key_deserializer"] is options["value_deserializer"] is None
    assert options["rebalance_timeout_ms"] == 40_000
    assert options["request_timeout_ms"] > options["rebalance_timeout_ms"]
    assert options["heartbeat_interval_ms"] * 3 <= options["session_timeout_ms"]


def test_f17_topics_are_made_for_safety() -> None:
    config = TopicSpec("t", 12, 3, 2, retention_days=7).config()
    assert config["min.insync.replicas"] == "2"
    assert config["unclean.leader.election.enable"] == "false"
    assert config["cleanup.policy"] == "delete"
    assert int(config["retention.ms"]) == 7 * 86_400_000


def test_credentials_stay_out_of_the_representation() -> None:
    settings = KafkaSettings("broker:9092", "test", "SASL_SSL", sasl_username="u", sasl_password="hunter2")
    assert "hunter2" not in repr(settings)
    assert settings.connection_options()["sasl_plain_password"] == "hunter2"
