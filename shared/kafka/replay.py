"""Reading a topic from its beginning and sending records exactly as they are: for demonstrations and tests of faults.

Records go out with any key, value and headers, also those that no service of ours would ever write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from shared.errors import KafkaFailure
from shared.kafka.producer import IdempotentProducer, Record, RecordBatch
from shared.kafka.records import ConsumedRecord
from shared.kafka.settings import KafkaSettings

_MAX_BATCH_BYTES = 900_000
_MAX_REQUEST_BYTES = 1_048_576


async def read_topic(settings: KafkaSettings, topic: str, deadline_seconds: float = 30.0) -> Sequence[ConsumedRecord]:
    """Return every record that lies in a topic now, by partition and offset. Commits nothing, joins no group.

    Raises KafkaFailure when the topic does not exist or the broker does not answer in time.
    """
    consumer = AIOKafkaConsumer(
        topic,
        **settings.connection_options(),
        group_id=None,  # no group: every partition is assigned to this client
        enable_auto_commit=False,
        auto_offset_reset="earliest",
    )
    try:
        async with asyncio.timeout(deadline_seconds):
            await consumer.start()
            partitions = sorted(consumer.assignment())
            if not partitions:
                raise KafkaFailure(f"topic {topic} does not exist", permanent=True)
            ends: Mapping[TopicPartition, int] = await consumer.end_offsets(partitions)
            records: list[ConsumedRecord] = []
            for partition in partitions:
                while await consumer.position(partition) < ends[partition]:
                    fetched = await consumer.getmany(partition, timeout_ms=500)
                    records += [_plain(message) for batch in fetched.values() for message in batch]
            return records
    except TimeoutError:
        raise KafkaFailure(f"topic {topic} could not be read within {deadline_seconds:g} s") from None
    except KafkaError as error:
        raise KafkaFailure(f"{type(error).__name__}: {error}"[:300]) from error
    finally:
        await consumer.stop()


def _plain(message: object) -> ConsumedRecord:
    return ConsumedRecord(
        topic=message.topic,  # type: ignore[attr-defined]  # aiokafka ships no types
        partition=message.partition,  # type: ignore[attr-defined]
        offset=message.offset,  # type: ignore[attr-defined]
        key=message.key,  # type: ignore[attr-defined]
        value=message.value,  # type: ignore[attr-defined]
        headers=tuple(message.headers),  # type: ignore[attr-defined]
        timestamp_ms=message.timestamp,  # type: ignore[attr-defined]
    )


async def send_copies(
    settings: KafkaSettings, records: Sequence[ConsumedRecord], deadline_seconds: float = 30.0
) -> None:
    """Send each record once more to its topic and partition, byte for byte; return when all are acknowledged.

    Raises KafkaFailure; some of them may then have been sent.
    """
    producer = IdempotentProducer(settings, max_batch_bytes=_MAX_BATCH_BYTES, max_request_bytes=_MAX_REQUEST_BYTES)
    try:
        await producer.start(deadline_seconds)
        open_batches: dict[tuple[str, int], RecordBatch] = {}
        for record in records:
            place = (record.topic, record.partition)
            batch = open_batches.get(place) or open_batches.setdefault(place, producer.new_batch(*place))
            if not batch.append(_as_sent(record)):
                await _send(producer, batch, deadline_seconds)
                batch = open_batches[place] = producer.new_batch(*place)
                if not batch.append(_as_sent(record)):
                    raise KafkaFailure(f"a record of {record.topic} fits into no batch", permanent=True)
        for batch in open_batches.values():
            await _send(producer, batch, deadline_seconds)
    finally:
        await producer.abandon()


def _as_sent(record: ConsumedRecord) -> Record:
    created_at = datetime.fromtimestamp(record.timestamp_ms / 1000, UTC)
    # Null keys, values and header values are data here; the outbox never writes them, so Record does not know them.
    return Record(record.key, record.value, list(record.headers), created_at)  # type: ignore[arg-type]


async def _send(producer: IdempotentProducer, batch: RecordBatch, deadline_seconds: float) -> None:
    await producer.acknowledged(await producer.hand_over(batch, deadline_seconds), deadline_seconds)
