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
from aiokafka.producer.message_accumulator import BatchBuilder
from aiokafka.structs import TopicPartition

from shared.errors import KafkaFailure
from shared.kafka.connections import Connections
from shared.kafka.settings import KafkaSettings

log = structlog.get_logger(__name__)

# Kafka protocol error codes after which the same record can never be taken: too large (10, 18), invalid (87).
# A corrupt message (2) is not one of them: the network can do that, and Kafka's own clients send it again.
_REFUSED_RECORD_CODES = frozenset({10, 18, 87})

# Codes that neither waiting nor another record mends, and what does. A timestamp out of range (32) is here and not
# above: after a long outage every event would be refused, and none of them is at fault.
_REMEDIES = {
    3: "make the topic: run the service's `topics` command",
    17: "the topic's name is not allowed; correct it in outbox_topic",
    29: "let this client write the topic: Kafka ACLs Write, Describe and IdempotentWrite",
    31: "let this client write idempotently: Kafka ACL IdempotentWrite (brokers before 3.0: on the cluster)",
    32: "an event's time is not what the topic takes: after a long outage raise its message.timestamp.before.max.ms; "
    "if the database's clock runs ahead, mend that, and raise message.timestamp.after.max.ms until those have left",
    33: "the brokers do not offer this SASL mechanism; correct …_KAFKA_SASL_MECHANISM",
    44: "a policy of the brokers refuses this; ask who runs them",
    58: "the brokers refuse these credentials; correct …_KAFKA_SASL_USERNAME and …_KAFKA_SASL_PASSWORD",
}


# What record batches may be compressed with, and the attribute bits that say so (Kafka's protocol guide).
_COMPRESSION_CODES = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}


@dataclass(frozen=True, slots=True)
class Record:
    """One record to send."""

    key: bytes
    value: bytes
    headers: Sequence[tuple[str, bytes]]
    created_at: datetime


class RecordBatch:
    """A record batch of one partition, built before it is sent. Not thread-safe."""

    __slots__ = ("_add", "_builder", "partition", "record_count", "topic")

    def __init__(self, builder: BatchBuilder, topic: str, partition: int) -> None:
        self._builder = builder
        self._add = builder._builder.append  # past a layer of Python, a fifth of what a record costs
        self.topic = topic
        self.partition = partition
        self.record_count = 0

    def add(self, timestamp_ms: int, key: bytes, value: bytes, headers: Sequence[tuple[str, bytes]]) -> bool:
        """Add a record; return False, without adding it, when the batch is full. A first record is always taken."""
        if self._add(self.record_count, timestamp_ms, key, value, headers) is None:
            return False
        self.record_count += 1
        return True

    def append(self, record: Record) -> bool:
        """Add a record, as `add` does."""
        return self.add(int(record.created_at.timestamp() * 1000), record.key, record.value, record.headers)

    @property
    def size_bytes(self) -> int:
        """Bytes of the encoded batch so far; compressed once it was sent."""
        return int(self._builder.size())

    def close(self) -> BatchBuilder:
        """Return the client's builder, complete."""
        self._builder._relative_offset = self.record_count
        self._builder.close()
        return self._builder


class IdempotentProducer:
    """One producer session: start, send batches, and `abandon` at the end or at the first failure."""

    def __init__(
        self, settings: KafkaSettings, *, max_batch_bytes: int, max_request_bytes: int, compression: str = "none"
    ) -> None:
        self._max_batch_bytes = max_batch_bytes
        self._connections = Connections()
        self._compression = _COMPRESSION_CODES[compression]
        self._producer = AIOKafkaProducer(
            **settings.connection_options(),
            acks="all",
            enable_idempotence=True,
            linger_ms=0,  # the relay builds whole batches itself
            max_batch_size=max_batch_bytes,
            max_request_size=max_request_bytes,
            compression_type=None if compression == "none" else compression,
            retry_backoff_ms=100,
            metadata_max_age_ms=30_000,
        )

    async def start(self, deadline_seconds: float) -> None:
        """Connect and get a producer id. Raises KafkaFailure; the producer must then be abandoned."""
        try:
            with self._connections.noted():
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

    def new_batch(self, topic: str, partition: int, max_bytes: int | None = None) -> RecordBatch:
        """Return an empty batch for a partition, of at most `max_bytes` before compression where that is given."""
        # Not the producer's create_batch(): it knows one size for all topics.
        most = min(max_bytes or self._max_batch_bytes, self._max_batch_bytes)
        return RecordBatch(BatchBuilder(most, self._compression), topic, partition)

    async def hand_over(self, batch: RecordBatch, deadline_seconds: float) -> asyncio.Future[object]:
        """Give the batch to the client and return the future of its acknowledgement by all in-sync replicas.

        At most one unacknowledged batch a partition may be handed over: the caller's gate (field report F46).
        """
        builder = batch.close()
        try:
            async with asyncio.timeout(deadline_seconds):
                future: asyncio.Future[object] = await self._producer.send_batch(
                    builder, batch.topic, partition=batch.partition
                )
        except TimeoutError:
            raise KafkaFailure(f"the client took no batch for {batch.topic} within {deadline_seconds:g} s") from None
        except KafkaError as error:
            raise _failure(error) from error
        return future

    def submit(self, batch: RecordBatch) -> asyncio.Future[object]:
        """Give the batch to the client at once; the future tells its acknowledgement, or what `failure_of` reads.

        The relay's way: `hand_over` without a coroutine and a timer for each batch. The topic's partitions must be
        known (`partition_count`), and no other batch of this partition may be with the client. The caller watches
        the clock. Raises KafkaFailure.
        """
        place = TopicPartition(batch.topic, batch.partition)
        accumulator = self._producer._message_accumulator
        if accumulator._exception is not None:
            raise KafkaFailure(f"the client has failed: {accumulator._exception}"[:300])
        if accumulator._closed or accumulator._batches.get(place):
            raise KafkaFailure(f"the client takes no batch for {batch.topic}/{batch.partition} now")
        future: asyncio.Future[object] = accumulator._append_batch(batch.close(), place).future
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
        self._connections.close()
        accumulator = producer._message_accumulator
        waiting = [batch for batches in accumulator._batches.values() for batch in batches]
        for batch in [*waiting, *accumulator._pending_batches]:
            if not batch.future.done():
                batch.future.cancel()
        accumulator._closed = True


def failure_of(submitted: asyncio.Future[object]) -> KafkaFailure | None:
    """Return why a batch that was submitted failed, or None when it was acknowledged."""
    if submitted.cancelled():
        return KafkaFailure("the client cancelled a batch by itself")
    error = submitted.exception()
    if error is None:
        return None
    if isinstance(error, KafkaError):
        return _failure(error)
    return KafkaFailure(f"{type(error).__name__}: {error}"[:300])


def _failure(error: KafkaError) -> KafkaFailure:
    code = getattr(error, "errno", -1)
    return KafkaFailure(
        f"{type(error).__name__}: {error}"[:300],
        permanent=code in _REFUSED_RECORD_CODES,
        remedy=_REMEDIES.get(code, ""),
    )
