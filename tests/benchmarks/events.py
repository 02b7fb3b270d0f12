"""The events of every measure: 400 bytes of JSON, 36-byte keys, 5,000 keys; the same ones for all that are compared.

The payload begins with the event's number within its key, so that order can be checked from what arrived.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from uuid import UUID

from shared.kafka.partitioner import partition_of
from shared.outbox.append import bucket_of
from shared.outbox.tables import BUCKETS

PARTITIONS = 12
PAYLOAD_BYTES = 400
KEY_COUNT = 5000
EVENT_TYPE = "order.confirmed.v1"
HELD_BUCKET = BUCKETS - 1
"""No key lies in this bucket: it is where a transaction that is held open has appended its event."""

_WORDS = [
    "amber",
    "basil",
    "cedar",
    "delta",
    "ember",
    "fjord",
    "grove",
    "hazel",
    "ivory",
    "jade",
    "kelp",
    "linen",
    "maple",
    "north",
    "ochre",
    "pearl",
    "quartz",
]
_PREFIX = b'{"sequence":"'


@dataclass(frozen=True, slots=True)
class Event:
    """An event as both the product's outbox and the naive one store it."""

    event_id: UUID
    key: bytes
    payload: bytes


def _keys() -> tuple[bytes, ...]:
    choose = random.Random(1)
    keys: list[bytes] = []
    while len(keys) < KEY_COUNT:
        key = str(UUID(int=choose.getrandbits(128), version=4)).encode()
        if bucket_of(key) != HELD_BUCKET:
            keys.append(key)
    return tuple(keys)


KEYS = _keys()
BUCKET_OF = {key: bucket_of(key) for key in KEYS}
PARTITION_OF = {key: partition_of(key, PARTITIONS) for key in KEYS}


_A_TIME_IN_2025 = 0x019B_0000_0000


def events(count: int, first: int = 0, at_milliseconds: int = _A_TIME_IN_2025) -> Iterator[Event]:
    """Yield `count` events with the numbers from `first` on; the same numbers give the same events.

    Their UUIDv7 are of one millisecond and ascend.
    """
    choose = random.Random(first)
    start = at_milliseconds << 80 | 7 << 76 | 0b10 << 62
    filler = " ".join(choose.choices(_WORDS, k=4000))
    for number in range(first, first + count):
        event_id = UUID(int=start + number)
        roll = choose.getrandbits(48)
        text = (
            f'{{"sequence":"{number // KEY_COUNT:08}","event_id":"{event_id}","event_type":"{EVENT_TYPE}",'
            f'"occurred_at":"2026-03-{1 + roll % 28:02}T{roll % 24:02}:{roll % 60:02}:{roll // 7 % 60:02}Z",'
            f'"order_id":{100_000 + number},"customer_id":{1 + roll % 90_000},'
            f'"total_amount":"{(1 + roll % 99_998) / 100:.2f}",'
            f'"currency":"EUR","aggregate_version":1,"note":"'
        )
        begin = roll % 20_000
        payload = f'{text}{filler[begin : begin + PAYLOAD_BYTES - len(text) - 2]}"}}'.encode()
        yield Event(event_id, KEYS[number % KEY_COUNT], payload)


def sequence_of(payload: bytes) -> int:
    """Return the event's number within its key."""
    return int(payload[len(_PREFIX) : len(_PREFIX) + 8])
