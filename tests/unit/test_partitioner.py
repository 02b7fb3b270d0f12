"""A key lies where every other Kafka client puts it (field report F17)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.kafka.partitioner import key_hash, partition_of
from shared.outbox.append import bucket_of
from shared.outbox.tables import BUCKETS, PARTITION_COUNTS

# The vectors of Apache Kafka's own UtilsTest.testMurmur2, signed as Java prints them.
KAFKAS_VECTORS = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


@pytest.mark.parametrize(("key", "signed"), KAFKAS_VECTORS.items())
def test_the_hash_is_kafkas(key: bytes, signed: int) -> None:
    assert key_hash(key) == signed & 0x7FFFFFFF


@given(st.binary(min_size=1, max_size=64), st.sampled_from(PARTITION_COUNTS))
def test_a_bucket_lies_within_the_partition_of_its_keys(key: bytes, partitions: int) -> None:
    assert bucket_of(key) % partitions == partition_of(key, partitions)


def test_every_allowed_partition_count_divides_the_buckets() -> None:
    assert [count for count in range(1, BUCKETS + 1) if BUCKETS % count == 0] == list(PARTITION_COUNTS)
