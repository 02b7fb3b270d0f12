"""The services of a relay role, built from a handful of settings; both services use it."""

from __future__ import annotations

from dataclasses import dataclass

from shared.database import Database
from shared.kafka.settings import KafkaSettings
from shared.lifecycle import Service
from shared.outbox.calls import Calls
from shared.outbox.leases import BucketLeases
from shared.outbox.publisher import PublisherSettings
from shared.outbox.relay import LeaseKeeper, Relay, RelaySettings
from shared.outbox.upkeep import OutboxKeeper
from shared.wakeup import Listener


@dataclass(frozen=True, slots=True)
class OutboxSettings:
    """What a relay process needs."""

    listen_dsn: str
    channel: str
    kafka: KafkaSettings
    lease_seconds: float
    poll_seconds: float
    delivery_deadline_seconds: float
    retention_hours: float
    compression: str = "none"
    park_limit: int = 1000


def relay_services(database: Database, settings: OutboxSettings) -> list[Service]:
    """Return the services of a relay: leases, publishing, wake-up calls and cleaning.

    `database` comes from `log.relay_database`, whose sessions plan as the relay needs it; the caller closes it.
    """
    calls = Calls()
    leases = BucketLeases(database, settings.lease_seconds)
    publishing = PublisherSettings(
        poll_seconds=settings.poll_seconds, delivery_deadline_seconds=settings.delivery_deadline_seconds
    )
    relaying = RelaySettings(publishing, settings.compression, settings.park_limit)
    return [
        LeaseKeeper(leases, calls),
        Relay(database, settings.kafka, leases, calls, relaying),
        Listener(settings.listen_dsn, {settings.channel: calls.hear}),
        OutboxKeeper(database, settings.retention_hours),
    ]
