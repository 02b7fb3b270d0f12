"""The relay of one outbox: a service that holds leases, and one that publishes through one producer after the other.

A failed producer is abandoned, never awaited, and a new one starts from the durable progress (field reports F14, F15).
A broker outage is not a message's fault: nothing is counted against it, parked or lost, however long it lasts.
"""

from __future__ import annotations

import asyncio

import structlog
from prometheus_client import Counter, Gauge
from sqlalchemy.exc import SQLAlchemyError

from shared.database import Database
from shared.errors import KafkaFailure, Refused
from shared.kafka.producer import IdempotentProducer
from shared.kafka.settings import KafkaSettings
from shared.lifecycle import READY, BackgroundService, Readiness, State, describe
from shared.outbox.leases import BucketLeases
from shared.outbox.log import OutboxLog, refusal
from shared.outbox.publisher import LOST, Publisher, PublisherSettings, partition_count_changed
from shared.outbox.topics import registered_topics

log = structlog.get_logger(__name__)

SESSIONS = Counter("outbox_producer_sessions", "Producers started by the relay.")
FAILURES = Counter("outbox_publish_failures", "Producers abandoned after a failure.", ["kind"])
LEASES = Gauge("outbox_leases_held", "Buckets that this relay may publish.")

MAX_BATCH_BYTES = 900_000
MAX_REQUEST_BYTES = 1_048_576
_START_DEADLINE_SECONDS = 10.0


class LeaseKeeper(BackgroundService):
    """Renews the leases of a relay that publishes, three times a lease, and takes its fair share of what is free."""

    name = "relay-leases"

    def __init__(self, leases: BucketLeases, wakeup: asyncio.Event) -> None:
        super().__init__()
        self._leases = leases
        self._wakeup = wakeup

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
                self._wakeup.set()
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
        wakeup: asyncio.Event,
        settings: PublisherSettings,
    ) -> None:
        super().__init__()
        self.stop_deadline_seconds = settings.stop_deadline_seconds + 10.0
        self._database = database
        self._outbox = OutboxLog(database)
        self._kafka = kafka
        self._leases = leases
        self._wakeup = wakeup
        self._settings = settings
        self._failing = False

    def wake(self) -> None:
        """Look for new events now."""
        self._wakeup.set()

    async def run(self) -> None:
        """Publish until stopping, with a new producer after each failure."""
        async with self._outbox.connect() as connection:
            problem = await refusal(connection)
        if problem:
            raise Refused(problem)
        partitions = await registered_topics(self._database)
        while not self.stopping.is_set():
            try:
                await self._publish(partitions)
            except KafkaFailure as failure:
                await self._after(failure)

    async def _publish(self, partitions: dict[str, int]) -> None:
        producer = IdempotentProducer(self._kafka, max_batch_bytes=MAX_BATCH_BYTES, max_request_bytes=MAX_REQUEST_BYTES)
        try:
            await producer.start(_START_DEADLINE_SECONDS)
            await _check_topics(producer, partitions)
            SESSIONS.inc()
            await self._leases.join()
            log.info("relay.publishing", buckets=len(self._leases.held), topics=sorted(partitions))
            if not self._failing:
                self._healthy()
            await Publisher(
                producer=producer,
                outbox=self._outbox,
                leases=self._leases,
                partitions=partitions,
                settings=self._settings,
                stopping=self.stopping,
                wakeup=self._wakeup,
                on_healthy=self._healthy,
            ).run()
        finally:
            await producer.abandon()
            await self._leave()

    def _healthy(self) -> None:
        """A first producer has started, or one after a failure has lived for a while."""
        self._failing = False
        self.readiness = READY
        self.backoff.reset()

    async def _after(self, failure: KafkaFailure) -> None:
        self._failing = True
        wait = self.backoff.next_seconds()
        FAILURES.labels("refused" if failure.permanent else "transient").inc()
        meaning = "events wait in the outbox and none is lost; orders are still accepted"
        if failure.permanent:
            meaning = "the broker refuses an event for good; those behind it in its partition wait, none is lost"
        self.readiness = Readiness(State.DEGRADED, f"Kafka did not take events ({failure.detail}); {meaning}")
        log.warning("relay.producer_abandoned", error=failure.detail, meaning=meaning, retry_in_seconds=round(wait, 2))
        await self.pause(wait)

    async def _leave(self) -> None:
        """Give the buckets to relays that can publish; without a database they become free when the leases end."""
        try:
            await self._leases.leave()
        except (SQLAlchemyError, OSError, TimeoutError) as error:
            log.info("relay.leases_left_to_expire", error=describe(error))


async def _check_topics(producer: IdempotentProducer, partitions: dict[str, int]) -> None:
    for topic, registered in partitions.items():
        try:
            found = await producer.partition_count(topic, deadline_seconds=5.0)
        except KafkaFailure as failure:
            raise KafkaFailure(
                f"topic {topic} cannot be written ({failure.detail}); if it does not exist, run the topics command"
            ) from failure
        if found != registered:
            raise Refused(partition_count_changed(topic, registered, found))
