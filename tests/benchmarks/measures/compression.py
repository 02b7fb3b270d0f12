"""What the setting `…_RELAY_COMPRESSION` saves on the wire and costs in time, with real events of the product."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta

from order_service.events import OrderConfirmedEvent
from shared.identifiers import new_event_id
from shared.outbox.append import OutgoingEvent, bucket_of
from tests.benchmarks.databases import until_drained
from tests.benchmarks.lab import Lab
from tests.benchmarks.rows import Row
from tests.benchmarks.sizes import Sizes
from tests.benchmarks.topic import check_complete

CODECS = ("none", "lz4", "zstd")
_MOST_ROUNDS = 3
_BACKLOG = "backlog_of_orders"


async def measure(lab: Lab, sizes: Sizes) -> AsyncIterator[Row]:
    """Yield bytes an event and drain rate for each codec, against none. These rows have no target: it is a choice."""
    await _fill(lab, sizes.compression_events)
    wire: dict[str, list[float]] = defaultdict(list)
    rates: dict[str, list[float]] = defaultdict(list)
    for number in range(min(sizes.rounds, _MOST_ROUNDS)):
        for codec in CODECS[number:] + CODECS[:number]:
            rate, stored = await _drain(lab, codec, sizes.compression_events)
            rates[codec].append(rate)
            wire[codec].append(stored / sizes.compression_events)
    await lab.databases.server.drop_database(_BACKLOG)
    note = f"{sizes.compression_events:,} order.confirmed events as the order service makes them"
    for codec in CODECS:
        yield Row(f"bytes an event, compression {codec}", "bytes", wire[codec], None, "none", wire["none"], note)
    for codec in CODECS:
        yield Row(f"drain, compression {codec}", "events/s", rates[codec], None, "none", rates["none"], note)


async def _fill(lab: Lab, count: int) -> None:
    await lab.databases.make_product(_BACKLOG)
    async with lab.databases.connected(_BACKLOG) as connection:
        await connection.copy_records_to_table(
            "outbox_event",
            records=((e.event_id, bucket_of(e.key), e.topic, e.key, e.event_type, e.payload) for e in _orders(count)),
            columns=["event_id", "bucket", "topic", "key", "event_type", "payload"],
        )
    await lab.databases.settle(_BACKLOG)


def _orders(count: int) -> Iterator[OutgoingEvent]:
    choose = random.Random(8)
    began = datetime(2026, 3, 2, 8, tzinfo=UTC)
    for number in range(count):
        yield OrderConfirmedEvent(
            event_id=new_event_id(),
            occurred_at=began + timedelta(microseconds=1_700 * number + choose.randrange(1_700)),
            order_id=1_000_000 + number,
            customer_id=choose.randrange(1, 90_000),
            total_amount=f"{choose.randrange(100, 50_000) / 100:.2f}",
            currency=choose.choice(("EUR", "EUR", "EUR", "USD", "CHF")),
            aggregate_version=1,
        ).to_outgoing()


async def _drain(lab: Lab, codec: str, count: int) -> tuple[float, int]:
    await lab.new_topic()
    async with (
        lab.databases.copy(_BACKLOG) as database,
        lab.relay(database, relay_compression=codec) as relay,
        lab.databases.connected(database) as observer,
    ):
        started_at: float = (await relay.ask("start"))["started_at"]
        rate = count / (await until_drained(observer) - started_at)
    await check_complete(lab.kafka, count)
    return rate, lab.log_bytes()
