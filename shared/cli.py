"""What the command lines of both services share: running, migrating, making topics, and errors a person can act on.

Annotations are evaluated here, for typer reads those of functions that are made for one service at a time.
"""

import asyncio
import difflib
import os
import sys
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import structlog
import typer
from pydantic import ValidationError
from sqlalchemy import MetaData
from sqlalchemy.exc import SQLAlchemyError
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_delay, wait_random_exponential

from shared import failpoints, telemetry
from shared.database import Database, DatabaseSettings
from shared.errors import Refused, ServiceError, Unavailable, is_transient
from shared.inbox.commands import dead_letters_app
from shared.inbox.upkeep import ensure_partitions
from shared.kafka.settings import KafkaSettings
from shared.kafka.topics import TopicSpec, ensure_topics
from shared.lifecycle import describe
from shared.migrations import alembic_config, upgrade
from shared.outbox.commands import add_republish, parked_app
from shared.outbox.topics import register_topics
from shared.settings import OUTBOX_CHANNEL, ServiceSettings

if TYPE_CHECKING:
    from fastapi import FastAPI

log = structlog.get_logger(__name__)


# What an operator's count of a large log may take.
_READING_SECONDS = 900.0

S = TypeVar("S", bound=ServiceSettings)
Wait = Annotated[float, typer.Option("--wait-seconds", help="how long to wait for a server that is still starting")]


def service_app(
    settings_class: type[S],
    *,
    package: str,
    roles: tuple[str, ...],
    build: "Callable[[S, Collection[str]], FastAPI]",
    metadata: MetaData,
    owned_topics: Callable[[S], Sequence[TopicSpec]],
) -> typer.Typer:
    """Return a service's command line: `run`, `migrate` and `topics`; the service adds what only it has."""
    name = settings_class.service
    prefix = name.replace("-", "_").upper()
    app = typer.Typer(name=name, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

    @app.command()
    def run(
        chosen: Annotated[
            list[str] | None,
            typer.Argument(metavar="ROLE", help=f"any of: {' '.join(roles)}; all when none is named"),
        ] = None,
        host: Annotated[str | None, typer.Option(help=f"overrides {prefix}_HOST")] = None,
        port: Annotated[int | None, typer.Option(help=f"overrides {prefix}_PORT; serves health for any role")] = None,
    ) -> None:
        """Run one process with the named roles until SIGTERM."""
        from shared.web import serve

        with readable_errors(name):
            settings = _configured(settings_class)
            playing = check_roles(name, chosen or (), roles)
            if failpoints.armed():
                log.warning("failpoints.armed", points=failpoints.armed(), meaning="this process will kill itself")
            serve(lambda: build(settings, playing), host=host or settings.host, port=port or settings.port)

    @app.command()
    def migrate(wait_seconds: Wait = 30.0) -> None:
        """Bring the database to the newest schema and register the topics; safe to run again."""
        with readable_errors(name):
            settings = _configured(settings_class)
            database = settings.direct_database("migrate")
            topics = owned_topics(settings)
            asyncio.run(migrate_database(package, database, metadata, topics, settings.dedup_window_days, wait_seconds))

    @app.command()
    def topics(wait_seconds: Wait = 30.0) -> None:
        """Make the Kafka topics that this service writes; safe to run again."""
        with readable_errors(name):
            settings = _configured(settings_class)
            asyncio.run(make_topics(settings.kafka("topics"), owned_topics(settings), wait_seconds))

    outbox = typer.Typer(no_args_is_help=True, help="what waits to be published, for the person on call")
    parked = parked_app(lambda work: operate(settings_class, lambda database, _: work(database)), OUTBOX_CHANNEL)
    outbox.add_typer(parked, name="parked")
    add_republish(outbox, lambda work: operate(settings_class, work, limit_seconds=_READING_SECONDS))
    app.add_typer(outbox, name="outbox")
    letters = dead_letters_app(
        lambda work: operate(settings_class, lambda database, settings: work(database, settings.consumer_group))
    )
    app.add_typer(letters, name="dead-letters")
    return app


def operate(
    settings_class: type[S],
    work: Callable[[Database, S], Coroutine[Any, Any, None]],
    limit_seconds: float | None = None,
) -> None:
    """Run an operator's work on the service's database; exit status 2 and one line when it cannot be done.

    `limit_seconds` is for work that only reads: its transactions may take longer than those that hold locks.
    """

    async def run() -> None:
        settings = _configured(settings_class)
        limits = settings.database("operator", pool_size=2)
        if limit_seconds is not None:
            limits = replace(limits, transaction_timeout_seconds=limit_seconds, command_timeout_seconds=limit_seconds)
        database = Database(limits)
        try:
            await work(database, settings)
        finally:
            await database.close()

    with readable_errors(settings_class.service):
        asyncio.run(run())


def _configured(settings_class: type[S]) -> S:
    refuse_unknown_settings(settings_class, os.environ)
    settings = settings_class()
    telemetry.configure(settings.service, level=settings.log_level, json_lines=settings.log_json)
    return settings


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


def refuse_unknown_settings(settings_class: type[ServiceSettings], environment: Mapping[str, str]) -> None:
    """Raise Refused for a variable that has the service's prefix and is no setting: misspelt, it would do nothing."""
    prefix = settings_class.model_config["env_prefix"]
    known = [f"{prefix}{field}".upper() for field in settings_class.model_fields]
    for name in environment:
        if name.upper().startswith(prefix) and name.upper() not in known:
            [*meant] = difflib.get_close_matches(name.upper(), known, n=1)
            raise Refused(f"{name} is no setting" + (f"; did you mean {meant[0]}?" if meant else "; unset it"))


def check_roles(service: str, chosen: Collection[str], known: Sequence[str]) -> tuple[str, ...]:
    """Return the chosen roles, or all of them when none was named. Raises Refused for an unknown one."""
    unknown = sorted(set(chosen) - set(known))
    if unknown:
        raise Refused(f"unknown role {unknown[0]!r}; {service} run takes any of: {' '.join(known)}")
    return tuple(role for role in known if role in chosen) or tuple(known)


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
        await _patiently(wait_seconds, "the database (…_DATABASE_URL)", database.ping)
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

    await _patiently(wait_seconds, "Kafka (…_KAFKA_BOOTSTRAP_SERVERS)", make)
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
    try:
        await retrying(call)
    except Exception as error:
        if not is_transient(error):
            raise
        raise Unavailable(f"{what} did not answer within {wait_seconds:g} s: {describe(error)}") from error


def _complain(line: str) -> None:
    sys.stderr.write(line + "\n")
