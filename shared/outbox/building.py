"""Building record batches from events: the few microseconds an event that a relay's speed is made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import groupby
from operator import itemgetter

import orjson

from shared.errors import Refused
from shared.kafka.producer import IdempotentProducer
from shared.outbox.gate import Batch, Bucket, Gate, RefusedBatch
from shared.outbox.log import POSTGRES_EPOCH_US, Row
from shared.outbox.parking import Place, Suspects

_BUCKET_AND_TOPIC = itemgetter(0, 3)
_UNLIMITED = 1 << 62


class BatchBuilding:
    """Fills one batch after the other for each partition, and puts the full ones through the gate."""

    def __init__(
        self, producer: IdempotentProducer, gate: Gate, partitions: Mapping[str, int], suspects: Suspects
    ) -> None:
        self._producer = producer
        self._gate = gate
        self._partitions = partitions
        self._suspects = suspects
        self._open: dict[Place, Batch] = {}

    def add(self, rows: Iterable[Row], buckets: Mapping[int, Bucket], *, released: bool = False) -> None:
        """Add events of these buckets, in order; `released` ones are parked rows, behind the cursor of their bucket.

        Raises Refused when a topic is not registered.
        """
        for (number, topic), run in groupby(rows, _BUCKET_AND_TOPIC):
            self._add_run(run, buckets[number], self._place(number, topic), released=released)

    def close(self) -> None:
        """Send what was begun, however small it is: nothing waits for more events to come."""
        for batch in self._open.values():
            self._send(batch)
        self._open.clear()

    def _add_run(self, run: Iterable[Row], bucket: Bucket, place: Place, *, released: bool) -> None:
        """Add events of one bucket and one topic."""
        most = self._suspects.most_records(place) or _UNLIMITED
        batch = self._open.get(place) or self._begin(place)
        add, created_at = batch.records.add, batch.created_at
        reached = 0  # by events of this run in this batch
        for _, position, event_id, _, key, event_type, payload, headers, created in run:
            try:
                record_headers = kafka_headers(str(event_id), event_type, headers)
            except Exception as error:  # whatever a row written past the kit may hold: it alone must step aside
                event = f"{event_id} ({type(error).__name__})"
                raise self._impossible(bucket, place, position, event, released=released) from error
            if len(created_at) >= most or not add((created + POSTGRES_EPOCH_US) // 1000, key, payload, record_headers):
                if reached and not released:
                    batch.reaches(bucket, reached)
                self._send(batch)
                batch = self._begin(place)
                add, created_at = batch.records.add, batch.created_at
                if not add((created + POSTGRES_EPOCH_US) // 1000, key, payload, record_headers):
                    raise self._impossible(
                        bucket, place, position, f"{event_id} (it fits into no batch)", released=released
                    )
            created_at.append(created)
            reached = position
            if released:
                batch.released.append((bucket, position))
        if not released:
            batch.reaches(bucket, reached)

    def _impossible(self, bucket: Bucket, place: Place, position: int, event: str, *, released: bool) -> RefusedBatch:
        """Return the refusal of an event of which no record can be made."""
        alone = Batch(self._producer.new_batch(*place))
        if released:
            alone.released.append((bucket, position))
        else:
            alone.reaches(bucket, position)
        return RefusedBatch(alone, f"no record for {place[0]} can be made of event {event}")

    def _place(self, number: int, topic: str) -> Place:
        count = self._partitions.get(topic)
        if count is None:
            raise Refused(f"topic {topic} is not registered in outbox_topic; run the service's migrate command")
        return topic, number % count

    def _begin(self, place: Place) -> Batch:
        topic, partition = place
        records = self._producer.new_batch(topic, partition, self._suspects.batch_bytes(topic))
        batch = self._open[place] = Batch(records)
        return batch

    def _send(self, batch: Batch) -> None:
        if batch.created_at:
            batch.size_bytes = batch.records.size_bytes
            self._gate.put(batch)


def kafka_headers(event_id: str, event_type: str, headers: str) -> list[tuple[str, bytes]]:
    """Return the record's headers: the event's id and type, then what the writer gave, a JSON object as text."""
    event_id_header = "event_id", event_id.encode()
    if len(headers) == _TRACE_ONLY_LENGTH and headers.startswith(_TRACE_ONLY):
        return [event_id_header, _type_header(event_type), ("traceparent", headers[_TRACE].encode())]
    own = [event_id_header, _type_header(event_type)]
    if headers != "{}":
        own += [(name, _header_value(value)) for name, value in orjson.loads(headers).items()]
    return own


def _header_value(value: object) -> bytes:
    """Return a string's bytes; of anything else, which `append` never writes, its JSON: it must not stop the others."""
    return value.encode() if isinstance(value, str) else orjson.dumps(value)


@lru_cache(maxsize=1000)
def _type_header(event_type: str) -> tuple[str, bytes]:
    return "event_type", event_type.encode()


# Nearly every event has this one header and no other: PostgreSQL's text of a jsonb object, and W3C's fixed length.
_TRACE_ONLY = '{"traceparent": "'
_TRACE = slice(len(_TRACE_ONLY), len(_TRACE_ONLY) + 55)
_TRACE_ONLY_LENGTH = _TRACE.stop + len('"}')
