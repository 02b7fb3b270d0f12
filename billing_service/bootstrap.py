"""The composition root: everything a process of the billing service consists of, built from its settings."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from datetime import timedelta
from functools import partial

from fastapi import FastAPI

from billing_service import metrics
from billing_service.api import charges as charges_api
from billing_service.breaker import CircuitBreaker
from billing_service.executor import CHANNEL as CHARGE_CHANNEL
from billing_service.executor import ChargeExecutor
from billing_service.gateway import HttpPaymentGateway
from billing_service.handlers import OrderConfirmedHandler
from billing_service.metrics import ChargeMonitor
from billing_service.reconciliation import ReconciliationService
from billing_service.repository import CLAIM_PLANNING
from billing_service.settings import ROLES, BillingServiceSettings
from shared.database import Database
from shared.inbox.caution import Caution
from shared.inbox.consumer import InboxConsumer
from shared.inbox.retrying import DeadLetterRetrier
from shared.inbox.upkeep import InboxUpkeep
from shared.inbox.window import WindowCheck
from shared.kafka.topics import topic_retention
from shared.lifecycle import Service
from shared.outbox.append import EventWriter
from shared.outbox.bootstrap import relay_services
from shared.outbox.calls import call_for
from shared.outbox.log import relay_database
from shared.outbox.upkeep import BacklogMonitor
from shared.settings import OUTBOX_CHANNEL
from shared.unit_of_work import UnitsOfWork
from shared.wakeup import Listener, Notifier
from shared.web import create_app


def build(settings: BillingServiceSettings, roles: Collection[str] = ROLES) -> FastAPI:
    """Return the application of one process with the given roles. Connects to nothing yet."""
    database = Database(settings.database("+".join(roles)))
    services: list[Service] = []
    other_databases: list[Database] = []
    if "api" in roles:
        services.append(ChargeMonitor(database))
    if "relay" in roles:
        relay_pool = relay_database(settings.database("relay", pool_size=6), settings.relay_lease_seconds)
        other_databases.append(relay_pool)
        services.append(BacklogMonitor(relay_pool, settings.backlog_degraded_after_seconds))
        services += relay_services(relay_pool, settings.outbox())
    if "consumer" in roles:
        upkeep_pool = Database(settings.direct_database("upkeep", pool_size=2))
        other_databases.append(upkeep_pool)
        services += _consumer(settings, database, upkeep_pool)
    if "executor" in roles:
        executor_pool = executor_database(settings)
        other_databases.append(executor_pool)
        services += _executor(settings, executor_pool)
        if settings.reconcile_interval_minutes:
            services.append(_reconciliation(settings, database))
    app = create_app(
        title="Billing service",
        version="1",
        database=database,
        other_databases=other_databases,
        services=services,
        state={"consumer_group": settings.consumer_group},
        max_body_bytes=settings.max_body_bytes,
    )
    if "api" in roles:
        app.include_router(charges_api.router)
    return app


def _consumer(settings: BillingServiceSettings, database: Database, upkeep_pool: Database) -> list[Service]:
    """Order events become charges; the executor is woken after each commit."""
    notifier = Notifier(settings.listen_dsn, CHARGE_CHANNEL)
    notifier.name = "charge-notifier"
    units, handler = UnitsOfWork(database), OrderConfirmedHandler(notifier.signal)
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
        notifier,
        window,
        consumer,
        retrier,
        InboxUpkeep(
            upkeep_pool,
            window_days=settings.dedup_window_days,
            letter_retention_days=settings.dead_letter_retention_days,
        ),
    ]


def executor_database(settings: BillingServiceSettings) -> Database:
    """Return the executor's own database, whose sessions plan as its claims need it."""
    return Database(replace(settings.database("executor", pool_size=4), session_settings=CLAIM_PLANNING))


def _executor(settings: BillingServiceSettings, database: Database) -> list[Service]:
    """Charges become payments, and their results events; the relay is woken after each commit."""
    notifier = Notifier(settings.listen_dsn, OUTBOX_CHANNEL, text_of=call_for)
    notifier.name = "outbox-notifier"
    executor = ChargeExecutor(
        UnitsOfWork(database, EventWriter(signal=notifier.signal)),
        gateway(settings),
        settings.executor(),
        CircuitBreaker(
            settings.executor_calls_at_once,
            settings.breaker_failures,
            most_pause_seconds=settings.breaker_most_pause_seconds,
        ),
    )
    listener = Listener(settings.listen_dsn, {CHARGE_CHANNEL: lambda _: executor.wake()})
    listener.name = "charge-listener"
    return [notifier, executor, listener]


def _reconciliation(settings: BillingServiceSettings, database: Database) -> Service:
    return ReconciliationService(
        database,
        gateway(settings),
        interval_seconds=settings.reconcile_interval_minutes * 60,
        looks_back=timedelta(hours=settings.reconcile_hours),
    )


def gateway(settings: BillingServiceSettings) -> HttpPaymentGateway:
    """Return the client of the payment provider, closed."""
    return HttpPaymentGateway(
        str(settings.payment_provider_url),
        api_key=settings.payment_provider_api_key,
        connections=settings.executor_calls_at_once,
        observe=metrics.observe_call,
    )
