"""An idempotent producer that is used until its first failure and then abandoned.

A refused or lost batch leaves an idempotent producer failing for ever or, when fresh, out of order; and its send, flush
and stop can hang while the broker is away (field reports F14, F15, F46). So nothing here waits without a deadline, and
nothing is sent through a producer that failed once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

import structlog
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError

from shared.errors import KafkaFailure
from shared.kafka.settings import KafkaSettings

log = structlog.get_logger(__name__)

# Kafka protocol error codes after which the same record can never be taken: too large (10, 18), record or timestamp
# refused (2, 32, 87). A corrupt message (2) is included: the same bytes give the same checksum.
_REFUSED_RECORD_CODES = frozenset({2, 10, 18, 32, 87})


@dataclass(frozen=True, slots=True)
class Record:
    """One record to send."""

    key: bytes
    value: bytes
    headers: Sequence[tuple[str, bytes]]
    created_at: datetime


class RecordBatch:
    """A record batch of one partition, built before it is sent. Not thread-safe."""

    __slots__ = ("_builder", "partition", "topic")

    def __init__(self, builder: object, topic: str, partition: int) -> None:
        self._builder = builder
        self.topic = topic
        self.partition = partition

    def append(self, record: Record) -> bool:
        """Add a record; return False, without adding it, when the batch is full."""
        appended = self._builder.append(  # type: ignore[attr-defined]  # aiokafka's BatchBuilder ships no types
            timestamp=int(record.created_at.timestamp() * 1000),
            key=record.key,
            value=record.value,
            headers=record.headers,
        )
        return appended is not None

    @property
    def size_bytes(self) -> int:
        """Bytes of the encoded batch so far."""
        return int(self._builder.size())  # type: ignore[attr-defined]

    @property
    def record_count(self) -> int:
        """Records in the batch."""
        return int(self._builder.record_count())  # type: ignore[attr-defined]


class IdempotentProducer:
    """One producer session: start, send batches, and `abandon` at the end or at the first failure."""

    def __init__(self, settings: KafkaSettings, *, max_batch_bytes: int, max_request_bytes: int) -> None:
        self._settings = settings
        self._producer = AIOKafkaProducer(
            **settings.connection_options(),
            acks="all",
            enable_idempotence=True,
            linger_ms=0,  # the relay builds whole batches itself
            max_batch_size=max_batch_bytes,
            max_request_size=max_request_bytes,
            retry_backoff_ms=100,
            metadata_max_age_ms=30_000,
        )

    async def start(self, deadline_seconds: float) -> None:
        """Connect and get a producer id. Raises KafkaFailure; the producer must then be abandoned."""
        try:
            async with asyncio.timeout(deadline_seconds):
                await self._producer.start()
        except TimeoutError:
            raise KafkaFailure(f"Kafka gave no producer id within {deadline_seconds:g} s") from None
        except KafkaError as error:
            raise _failure(error) from error

    async def partition_count(self, topic: str, deadline_seconds: float) -> int:
        """Return how many partitions the topic has. Raises KafkaFailure when it does not exist or nobody answers."""
        try:
            async with asyncio.timeout(deadline_seconds):
                return len(await self._producer.partitions_for(topic))
        except TimeoutError:
            raise KafkaFailure(f"Kafka did not tell the partitions of {topic} within {deadline_seconds:g} s") from None
        except KafkaError as error:
            raise _failure(error) from error

    def known_partition_count(self, topic: str) -> int | None:
        """Return the partition count of the client's cached metadata, which it refreshes every minute."""
        partitions = self._producer.client.cluster.partitions_for_topic(topic)
        return None if partitions is None else len(partitions)

    def new_batch(self, topic: str, partition: int) -> RecordBatch:
        """Return an empty batch for a partition."""
        return RecordBatch(self._producer.create_batch(), topic, partition)

    async def hand_over(self, batch: RecordBatch, deadline_seconds: float) -> asyncio.Future[object]:
        """Give the batch to the client and return the future of its acknowledgement by all in-sync replicas.

        At most one unacknowledged batch a partition may be handed over: the caller's gate (field report F46).
        """
        batch._builder.close()  # type: ignore[attr-defined]
        try:
            async with asyncio.timeout(deadline_seconds):
                future: asyncio.Future[object] = await self._producer.send_batch(
                    batch._builder, batch.topic, partition=batch.partition
                )
        except TimeoutError:
            raise KafkaFailure(f"the client took no batch for {batch.topic} within {deadline_seconds:g} s") from None
        except KafkaError as error:
            raise _failure(error) from error
        return future

    async def acknowledged(self, future: asyncio.Future[object], deadline_seconds: float) -> None:
        """Return when the broker acknowledged the batch. Raises KafkaFailure: abandon this producer then."""
        try:
            async with asyncio.timeout(deadline_seconds):
                await future
        except TimeoutError:
            raise KafkaFailure(f"no acknowledgement within {deadline_seconds:g} s") from None
        except KafkaError as error:
            raise _failure(error) from error

    async def abandon(self, deadline_seconds: float = 5.0) -> None:
        """End this producer without waiting for the broker, leaving no task, buffer or connection behind.

        Written against aiokafka 0.14: its sender task answers a first cancellation by waiting for its produce
        requests, which a dead broker never answers, and a second one by ending. Field report F53.
        """
        producer = self._producer
        producer._closed = True  # or its __del__ reports a leak
        sender = producer._sender.sender_task
        try:
            async with asyncio.timeout(deadline_seconds):
                while sender is not None and not sender.done():
                    sender.cancel()
                    await asyncio.sleep(0)
                if sender is not None:
                    with suppress(asyncio.CancelledError, Exception):
                        sender.result()
                await producer.client.close()
        except TimeoutError:
            log.error("kafka.producer_abandon_deadline_passed", deadline_seconds=deadline_seconds)
        accumulator = producer._message_accumulator
        waiting = [batch for batches in accumulator._batches.values() for batch in batches]
        for batch in [*waiting, *accumulator._pending_batches]:
            if not batch.future.done():
                batch.future.cancel()
        accumulator._closed = True


def _failure(error: KafkaError) -> KafkaFailure:
    refused = getattr(error, "errno", None) in _REFUSED_RECORD_CODES
    return KafkaFailure(f"{type(error).__name__}: {error}"[:300], permanent=refused)
