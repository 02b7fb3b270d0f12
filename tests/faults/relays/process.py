"""A relay in a process of its own: what `run relay` of a service runs and serves, on whatever outbox a test has.

`python -m tests.faults.relays.process OPTIONS`, the options as one JSON object (`Options`).
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tests.faults.relays import clock

if TYPE_CHECKING:
    from fastapi import FastAPI


@dataclass(frozen=True)
class Options:
    """Where the outbox is and where to serve health; limits that are short enough for a test to wait for."""

    url: str
    bootstrap_servers: str
    port: int
    lease_seconds: float = 2.0
    poll_seconds: float = 0.2
    check_seconds: float = 0.5
    metadata_age_seconds: float = 30.0
    delivery_deadline_seconds: float = 45.0
    request_timeout_seconds: float = 30.0
    clock_offset_seconds: float = 0.0


def main() -> None:
    """Serve one relay until SIGTERM."""
    options = Options(**json.loads(sys.argv[1]))
    if options.clock_offset_seconds:
        clock.shift(options.clock_offset_seconds)  # before anything else could take the right time along
    from shared import telemetry
    from shared.web import serve

    telemetry.configure("relay", json_lines=True)
    serve(lambda: _build(options), host="127.0.0.1", port=options.port)


def _build(options: Options) -> FastAPI:
    from shared.database import Database, DatabaseSettings
    from shared.kafka.settings import KafkaSettings
    from shared.outbox.bootstrap import OutboxSettings, relay_services
    from shared.outbox.log import relay_database
    from shared.outbox.relay import Relay
    from shared.settings import OUTBOX_CHANNEL
    from shared.web import create_app

    _refresh_metadata_every(options.metadata_age_seconds)
    settings = DatabaseSettings(options.url, application_name="relay", pool_size=6)
    pool = relay_database(settings, options.lease_seconds)
    outbox = OutboxSettings(
        listen_dsn=pool.dsn,
        channel=OUTBOX_CHANNEL,
        kafka=KafkaSettings(
            options.bootstrap_servers, "relay", request_timeout_seconds=options.request_timeout_seconds
        ),
        lease_seconds=options.lease_seconds,
        poll_seconds=options.poll_seconds,
        delivery_deadline_seconds=options.delivery_deadline_seconds,
        retention_hours=72.0,
    )
    services = relay_services(pool, outbox)
    [relay] = [service for service in services if isinstance(service, Relay)]
    publishing = replace(relay._settings.publishing, check_seconds=options.check_seconds)
    relay._settings = replace(relay._settings, publishing=publishing)
    return create_app(
        title="Relay", version="1", database=Database(settings), other_databases=[pool], services=services
    )


def _refresh_metadata_every(seconds: float) -> None:
    """Let producers ask for partition counts more often than a test would like to wait."""
    from shared.kafka import producer

    client = vars(producer)["AIOKafkaProducer"]
    age = {"metadata_max_age_ms": int(seconds * 1000)}
    setattr(producer, "AIOKafkaProducer", lambda **options: client(**{**options, **age}))  # noqa: B010


if __name__ == "__main__":
    main()
