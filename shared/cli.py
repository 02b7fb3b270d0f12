"""What the command lines of both services share: running, migrating, making topics, and errors a person can act on."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import structlog
from fastapi import FastAPI
from pydantic import ValidationError
from sqlalchemy import MetaData
from sqlalchemy.exc import SQLAlchemyError
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_delay, wait_random_exponential

from shared import failpoints, telemetry
from shared.database import Database, DatabaseSettings
from shared.errors import Refused, ServiceError, is_transient
from shared.inbox.upkeep import ensure_partitions
from shared.kafka.settings import KafkaSettings
from shared.kafka.topics import TopicSpec, ensure_topics
from shared.lifecycle import describe
from shared.migrations import alembic_config, upgrade
from shared.outbox.topics import register_topics
from shared.web import serve

log = structlog.get_logger(__name__)


@contextmanager
def readable_errors(service: str) -> Iterator[None]:
    """End the process with one readable line, and no traceback, for what a person can put right. Exit status 2."""
    try:
        yield
    except ValidationError as error:
        # Values are left out: a refused address may carry a password.
        for item in error.errors(include_input=False, include_url=False):
            name = "_".join(str(part) for part in item["loc"]).upper()
            _complain(f"{service}: setting {service.replace('-', '_').upper()}_{name}: {item['msg']}")
        sys.exit(2)
    except (ServiceError, SQLAlchemyError, OSError, TimeoutError) as error:
        _complain(f"{service}: {error.detail if isinstance(error, ServiceError) else describe(error)}")
        sys.exit(2)


def check_roles(service: str, chosen: Collection[str], known: Sequence[str]) -> tuple[str, ...]:
    """Return the chosen roles, or all of them when none was named. Raises Refused for an unknown one."""
    unknown = sorted(set(chosen) - set(known))
    if unknown:
        raise Refused(f"unknown role {unknown[0]!r}; {service} run takes any of: {' '.join(known)}")
    return tuple(role for role in known if role in chosen) or tuple(known)


def run(
    service: str, build: Callable[[], FastAPI], *, host: str, port: int, level: str, json_lines: bool | None
) -> None:
    """Serve one process until SIGTERM; returns after a clean stop."""
    telemetry.configure(service, level=level, json_lines=json_lines)
    if failpoints.armed():
        log.warning("failpoints.armed", points=failpoints.armed(), meaning="this process will kill itself")
    serve(build, host=host, port=port)


def run_to_end(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a one-shot command."""
    asyncio.run(coroutine)


async def migrate_database(
    package: str,
    settings: DatabaseSettings,
    metadata: MetaData,
    topics: Sequence[TopicSpec],
    dedup_window_days: int,
    wait_seconds: float,
) -> None:
    """Bring a database to the newest schema, register the topics it writes, and make its inbox's partitions.

    Waits up to `wait_seconds` for the database. Safe to run again and by several at once.
    """
    database = Database(settings)
    try:
        await _patiently(wait_seconds, "the database", database.ping)
        await upgrade(alembic_config(package, settings.url, metadata))
        await register_topics(database, topics)
        await ensure_partitions(database, window_days=dedup_window_days)
        log.info("migrate.done", package=package)
    finally:
        await database.close()


async def make_topics(settings: KafkaSettings, topics: Sequence[TopicSpec], wait_seconds: float) -> None:
    """Make the topics a service writes; waits up to `wait_seconds` for a broker."""

    async def make() -> None:
        await ensure_topics(settings, topics)

    await _patiently(wait_seconds, "Kafka", make)
    log.info("topics.done", topics=[topic.name for topic in topics])


async def _patiently(wait_seconds: float, what: str, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
    def say(state: RetryCallState) -> None:
        outcome = state.outcome
        error = outcome.exception() if outcome else None
        log.info("waiting", what=what, error=describe(error) if error else "")

    retrying = AsyncRetrying(
        retry=retry_if_exception(is_transient),
        wait=wait_random_exponential(multiplier=0.2, max=2),
        stop=stop_after_delay(wait_seconds),
        before_sleep=say,
        reraise=True,
    )
    await retrying(call)


def _complain(line: str) -> None:
    sys.stderr.write(line + "\n")
