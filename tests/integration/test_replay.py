"""Records that are sent again are the same bytes, whatever is in them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chargeonce.stack import KafkaBroker
from shared.errors import KafkaFailure
from shared.kafka.records import ConsumedRecord
from shared.kafka.replay import read_topic, send_copies
from shared.kafka.settings import KafkaSettings
from shared.kafka.topics import TopicSpec, ensure_topics


@pytest.fixture
def settings(kafka: KafkaBroker) -> KafkaSettings:
    return KafkaSettings(kafka.bootstrap_servers, client_id="test")


async def test_copies_carry_key_value_and_headers_byte_for_byte(settings: KafkaSettings, unique_name: str) -> None:
    await ensure_topics(settings, [TopicSpec(unique_name, 3, 1, 1)])
    plain = ConsumedRecord(unique_name, 1, 0, b"key", b"value", (("event_id", b"1"),), 1_700_000_000_000)
    strange = [
        plain,
        replace(plain, value=None),
        replace(plain, key=None, value=b"", headers=()),
        replace(plain, partition=2, value=b"\xff\x00", headers=(("twice", b"1"), ("twice", None), ("twice", b"\xff"))),
    ]
    await send_copies(settings, strange)
    read = await read_topic(settings, unique_name)
    assert [replace(record, offset=0) for record in read] == strange
    await send_copies(settings, read)
    assert len(await read_topic(settings, unique_name)) == 2 * len(strange)


async def test_more_than_fits_into_a_batch_is_sent_in_order(settings: KafkaSettings, unique_name: str) -> None:
    await ensure_topics(settings, [TopicSpec(unique_name, 1, 1, 1)])
    records = [
        ConsumedRecord(unique_name, 0, number, b"k", b"%d" % number * 30_000, (), 1_700_000_000_000)
        for number in range(100, 120)
    ]
    await send_copies(settings, records)
    assert [record.value for record in await read_topic(settings, unique_name)] == [each.value for each in records]


async def test_an_empty_topic_has_no_records_and_a_missing_one_is_an_error(
    settings: KafkaSettings, unique_name: str
) -> None:
    await ensure_topics(settings, [TopicSpec(unique_name, 2, 1, 1)])
    assert await read_topic(settings, unique_name) == []
    with pytest.raises(KafkaFailure):
        await read_topic(settings, f"{unique_name}-missing", deadline_seconds=5)
