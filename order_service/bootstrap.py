"""The composition root: everything a process of the order service consists of, built from its settings."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from fastapi import FastAPI

from order_service.api import orders as orders_api
from order_service.checkout import Checkout
from order_service.handlers import PaymentHandler
from order_service.settings import ROLES, OrderServiceSettings
from order_service.upkeep import KeyUpkeep
from shared.database import Database
from shared.inbox.caution import Caution
from shared.inbox.consumer import InboxConsumer
from shared.inbox.retrying import DeadLetterRetrier
from shared.inbox.upkeep import InboxUpkeep
from shared.inbox.window import WindowCheck
from shared.kafka.topics import topic_retention
from shared.lifecycle import Service
from shared.outbox.admission import Admission, BacklogLimits
from shared.outbox.append import EventWriter
from shared.outbox.bootstrap import relay_services
from shared.outbox.calls import call_for
from shared.outbox.log import relay_database
from shared.outbox.upkeep import BacklogMonitor
from shared.settings import OUTBOX_CHANNEL
from shared.unit_of_work import UnitsOfWork
from shared.wakeup import Notifier
from shared.web import create_app


def build(settings: OrderServiceSettings, roles: Collection[str] = ROLES) -> FastAPI:
    """Return the application of one process with the given roles. Connects to nothing yet."""
    database = Database(settings.database("+".join(roles)))
    relay_pool = relay_database(settings.database("relay", pool_size=6), settings.relay_lease_seconds)
    notifier = Notifier(settings.listen_dsn, OUTBOX_CHANNEL, text_of=call_for)
    units = UnitsOfWork(database, EventWriter(signal=notifier.signal))
    limits = BacklogLimits(settings.max_unpublished_events, settings.max_unpublished_age_seconds)
    monitor = BacklogMonitor(relay_pool, settings.backlog_degraded_after_seconds, limits)
    checkout = Checkout(units, Admission(limits, monitor.latest))
    services: list[Service] = []
    other_databases = [relay_pool]
    if "api" in roles:
        services += [notifier, KeyUpkeep(units, settings.idempotency_key_retention_hours)]
    if "api" in roles or "relay" in roles:
        services.append(monitor)
    if "relay" in roles:
        services += relay_services(relay_pool, settings.outbox())
    if "consumer" in roles:
        upkeep_pool = Database(settings.direct_database("upkeep", pool_size=2))
        other_databases.append(upkeep_pool)
        services += _consumer(settings, database, upkeep_pool)
    app = create_app(
        title="Order service",
        version="1",
        database=database,
        other_databases=other_databases,
        services=services,
        state={
            "checkout": checkout,
            "consumer_group": settings.consumer_group,
            "require_idempotency_key": settings.require_idempotency_key,
        },
        max_body_bytes=settings.max_body_bytes,
    )
    if "api" in roles:
        app.include_router(orders_api.router)
    return app


def _consumer(settings: OrderServiceSettings, database: Database, upkeep_pool: Database) -> list[Service]:
    """Results of payments become the orders' payment status."""
    units, handler = UnitsOfWork(database), PaymentHandler()
    kafka = settings.kafka("consumer")
    window = WindowCheck(
        partial(topic_retention, kafka, handler.topics),
        window_days=settings.dedup_window_days,
        permanent_key=handler.has_permanent_key,
    )
    inbox = settings.inbox()
    consumer = InboxConsumer(
        settings=inbox,
        kafka=kafka,
        database=database,
        units=units,
        handler=handler,
        window=window,
        caution=Caution(upkeep_pool, inbox.group, inbox.max_batch_records),
    )
    retrier = DeadLetterRetrier(group=settings.consumer_group, units=units, handler=handler)
    return [
        window,
        consumer,
        retrier,
        InboxUpkeep(
            upkeep_pool,
            window_days=settings.dedup_window_days,
            letter_retention_days=settings.dead_letter_retention_days,
        ),
    ]
