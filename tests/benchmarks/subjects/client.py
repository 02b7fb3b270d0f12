"""The Kafka client of both baselines: as durable as the relay's, with large batches and no linger."""

from __future__ import annotations

from aiokafka import AIOKafkaProducer


async def started_producer(bootstrap_servers: str, topic: str) -> AIOKafkaProducer:
    """Return a producer that is connected and knows the topic's partitions."""
    producer = AIOKafkaProducer(
        bootstrap_servers=bootstrap_servers,
        acks="all",
        enable_idempotence=True,
        linger_ms=0,
        max_batch_size=1_048_576,
        max_request_size=1_048_576,
        request_timeout_ms=30_000,
    )
    await producer.start()
    await producer.partitions_for(topic)
    return producer
