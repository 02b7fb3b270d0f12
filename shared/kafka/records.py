"""What a Kafka consumer hands on: plain values, so that nothing behind it needs the client library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Partition(NamedTuple):
    """A partition of a topic."""

    topic: str
    partition: int


@dataclass(frozen=True, slots=True)
class ConsumedRecord:
    """One record as it lies in the log. Headers are a list: a name may repeat, a value may be null or not UTF-8.

    `damage` tells why the client could not decode the record; everything but its place is then missing.
    """

    topic: str
    partition: int
    offset: int
    key: bytes | None = field(repr=False)
    value: bytes | None = field(repr=False)
    headers: tuple[tuple[str, bytes | None], ...] = field(repr=False)
    timestamp_ms: int
    damage: str = ""

    @property
    def source(self) -> Partition:
        """The partition that the record lies in."""
        return Partition(self.topic, self.partition)


@dataclass(frozen=True, slots=True)
class Fetched:
    """Records of one poll, ascending by offset within a partition, and the assignment (`epoch`) they belong to."""

    records: Sequence[ConsumedRecord]
    epoch: int

    def first_offsets(self) -> Mapping[Partition, int]:
        """Return the lowest offset of each partition: where to read again when nothing of this was settled."""
        first: dict[Partition, int] = {}
        for record in self.records:
            first.setdefault(record.source, record.offset)
        return first
