"""Where a key goes: Kafka's own default hash, so that every client in every language agrees on the partition."""

from __future__ import annotations

from aiokafka.partitioner import murmur2

_POSITIVE = 0x7FFFFFFF  # Kafka's Utils.toPositive


def key_hash(key: bytes) -> int:
    """Return Kafka's default hash of a record key: murmur2 masked to 31 bits."""
    hashed: int = murmur2(key)
    return hashed & _POSITIVE


def partition_of(key: bytes, partitions: int) -> int:
    """Return the partition where Kafka's default partitioner puts a record with this key."""
    return key_hash(key) % partitions
