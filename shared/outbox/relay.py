"""The relay of one outbox: a service that holds leases, and one that publishes through one producer after the other.

A failed producer is abandoned, never awaited, and a new one starts from the durable progress (field reports F14, F15).
A broker outage is not a message's fault: nothing is counted against it, parked or lost, however long it lasts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import asyncpg
import structlog
from prometheus_client import Counter, Enum, Gauge
from sqlalchemy.exc import SQLAlchemyError

from shared.database import Database
from shared.errors import KafkaFailure, Refused
from shared.kafka.producer import IdempotentProducer
from shared.kafka.settings import KafkaSettings
from shared.lifecycle import READY, BackgroundService, Readiness, State, describe
from shared.outbox.backlog import refusal
from shared.outbox.calls import Calls
from shared.outbox.gate import RefusedBatch
from shared.outbox.leases import BucketLeases
from shared.outbox.log import OutboxLog
from shared.outbox.parking import RefusedEvent, Suspects, park_refused, refused_waiting
from shared.outbox.publisher import LOST, Publisher, PublisherSettings, partition_count_changed
from shared.outbox.tables import BUCKETS
from shared.outbox.topics import registered_topics

log = structlog.get_logger(__name__)

SESSIONS = Counter("outbox_producer_sessions", "Producers started by the relay.")
FAILURES = Counter("outbox_publish_failures", "Producers abandoned after a failure.", ["kind"])
LEASES = Gauge("outbox_leases_held", "Buckets that this relay may publish.")
PARKED = Counter("outbox_parked_refused", "Events parked because the broker refuses them for good.")
STATE = Enum(
    "outbox_relay_state",
    "What the relay does: `waiting` is a backoff after a failure, `refused` waits for a person.",
    states=["starting", "publishing", "waiting", "refused"],
)

MAX_BATCH_BYTES = 900_000
MAX_REQUEST_BYTES = 1_048_576
_START_DEADLINE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class RelaySettings:
    """How a relay publishes. Past `park_limit` parked events that were refused, it parks no more and waits."""

    publishing: PublisherSettings = field(default_factory=PublisherSettings)
    compression: str = "none"
    park_limit: int = 1000


class LeaseKeeper(BackgroundService):
    """Renews the leases of a relay that publishes, three times a lease, and takes its fair share of what is free."""

    name = "relay-leases"

    def __init__(self, leases: BucketLeases, calls: Calls) -> None:
        super().__init__()
        self._leases = leases
        self._calls = calls

    def ready(self) -> Readiness:
        told = super().ready()
        if told.state is State.READY and self._leases.held and not self._leases.valid:
            return Readiness(State.DEGRADED, "leases ran out, the database does not renew them: nothing is published")
        return told

    async def run(self) -> None:
        while not self.stopping.is_set():
            before = set(self._leases.held)
            lost = await self._leases.refresh()
            if lost:
                LOST.inc(len(lost))
                log.warning("relay.leases_lost", buckets=sorted(lost))
            gained = set(self._leases.held) - before
            if gained:
                log.info("relay.leases_gained", buckets=len(gained), held=len(self._leases.held))
            if gained or lost or self._leases.surplus():
                self._calls.call()
            LEASES.set(len(self._leases.held))
            self.readiness = READY
            self.backoff.reset()
            await self.pause(self._leases.lease_seconds / 3)


class Relay(BackgroundService):
    """Publishes the outbox of one database. Any number may run; each has its share of the buckets."""

    name = "relay"

    def __init__(
        self,
        database: Database,
        kafka: KafkaSettings,
        leases: BucketLeases,
        calls: Calls,
        settings: RelaySettings,
    ) -> None:
        super().__init__()
        self.stop_deadline_seconds = settings.publishing.stop_deadline_seconds + 10.0
        self._outbox = OutboxLog(database)
        self._database = database
        self._kafka = kafka
        self._leases = leases
        self._calls = calls
        self._settings = settings
        self._suspects = Suspects()
        self._failing = False
        STATE.state("starting")

    def wake(self) -> None:
        """Look for new events now."""
        self._calls.call()

    async def run(self) -> None:
        """Publish until stopping, with a new producer after each failure."""
        try:
            await self._publish_until_stopping()
        except Refused:
            STATE.state("refused")
            raise
        except Exception:
            self._failing = True  # or a producer that starts well would end the backoff before it published anything
            STATE.state("waiting")
            raise

    async def _publish_until_stopping(self) -> None:
        async with self._outbox.connect() as connection:
            problem = await refusal(connection)
        if problem:
            raise Refused(problem)
        partitions = await registered_topics(self._database)
        try:
            while not self.stopping.is_set():
                try:
                    await self._publish(partitions)
                except RefusedBatch as refused:
                    if not await self._isolated(refused):
                        await self._after(refused)
                except KafkaFailure as failure:
                    await self._after(failure)
        finally:
            await self._leave()

    async def _publish(self, partitions: dict[str, int]) -> None:
        """Publish through one producer, until it fails or the relay stops."""
        producer = IdempotentProducer(
            self._kafka,
            max_batch_bytes=MAX_BATCH_BYTES,
            max_request_bytes=MAX_REQUEST_BYTES,
            compression=self._settings.compression,
        )
        try:
            await producer.start(_START_DEADLINE_SECONDS)
            await _check_topics(producer, partitions)
            SESSIONS.inc()
            await self._leases.join()
            self._suspects.forget(set(range(BUCKETS)) - set(self._leases.held))  # another relay will find out
            log.info("relay.publishing", buckets=len(self._leases.held), topics=sorted(partitions))
            if not self._failing:
                self._healthy()
            STATE.state("publishing")
            await Publisher(
                producer=producer,
                outbox=self._outbox,
                leases=self._leases,
                partitions=partitions,
                settings=self._settings.publishing,
                stopping=self.stopping,
                calls=self._calls,
                suspects=self._suspects,
                on_healthy=self._healthy,
            ).run()
        finally:
            await producer.abandon()

    def _healthy(self) -> None:
        """A first producer has started, or one after a failure has lived for a while."""
        self._failing = False
        self.readiness = READY
        self.backoff.reset()

    async def _isolated(self, refused: RefusedBatch) -> bool:
        """Go on without waiting after a refused batch: with smaller ones, or without its one record, which is parked.

        False when it cannot be parked: so many are that the topic must be at fault and not the events.
        """
        FAILURES.labels(refused.kind).inc()
        batch, records = refused.batch, len(refused.batch.created_at)
        self._suspects.refused(batch.place, batch.positions(), records, batch.size_bytes)
        if records > 1:
            log.info("relay.batch_refused", error=refused.detail, events=records, next="smaller batches")
            return True
        [bucket] = {*batch.up_to, *(bucket for bucket, _ in batch.released)}
        [position] = batch.positions().values()
        event = RefusedEvent(bucket.lease.bucket, position, bucket.lease.epoch, refused.detail)
        async with self._outbox.connect() as connection:
            # What was released is parked already: when it is refused again it waits for a person again.
            if not batch.released and await refused_waiting(connection) >= self._settings.park_limit:
                return False
            owned = await park_refused(connection, self._leases.owner, event)
        if owned:
            self._suspects.parked(event.bucket, event.position)
            if batch.released:  # it lies behind the cursor, which would never pass it
                self._suspects.forget({event.bucket})
            PARKED.inc()
            log.error(
                "relay.event_parked",
                bucket=event.bucket,
                position=event.position,
                error=refused.detail,
                meaning="Kafka does not take this event; it and later ones of its key wait in outbox_parked, "
                "all others are published; see `outbox parked list`",
            )
        return True

    async def _after(self, failure: KafkaFailure) -> None:
        """Give the buckets to relays that can publish, say what is the matter, and wait."""
        self._failing = True
        STATE.state("waiting")
        wait = self.backoff.next_seconds()
        if not isinstance(failure, RefusedBatch):
            FAILURES.labels(failure.kind).inc()
        meaning = "events wait in the outbox and none is lost; orders are still accepted"
        if failure.permanent:
            meaning = (
                f"the broker refuses an event for good and {self._settings.park_limit} are parked already, so the "
                "topic must be at fault: look at its max.message.bytes, then release them (`outbox parked`). Those "
                "behind it in its partition wait, none is lost"
            )
        remedy = f". {failure.remedy[0].upper()}{failure.remedy[1:]}" if failure.remedy else ""
        self.readiness = Readiness(State.DEGRADED, f"Kafka did not take events ({failure.detail}); {meaning}{remedy}")
        log.warning(
            "relay.producer_abandoned",
            error=failure.detail,
            kind=failure.kind,
            meaning=meaning,
            remedy=failure.remedy,
            retry_in_seconds=round(wait, 2),
        )
        await self._leave()
        await self.pause(wait)

    async def _leave(self) -> None:
        """Give the buckets back; without a database they become free when the leases end."""
        try:
            LOST.inc(len(await self._leases.leave()))
        except (SQLAlchemyError, asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError) as error:
            log.info("relay.leases_left_to_expire", error=describe(error))


async def _check_topics(producer: IdempotentProducer, partitions: dict[str, int]) -> None:
    for topic, registered in partitions.items():
        try:
            found = await producer.partition_count(topic, deadline_seconds=5.0)
        except KafkaFailure as failure:
            remedy = failure.remedy or "if the topic does not exist, run the service's `topics` command"
            raise KafkaFailure(f"topic {topic} cannot be written ({failure.detail})", remedy=remedy) from failure
        if found != registered:
            raise Refused(partition_count_changed(topic, registered, found))
