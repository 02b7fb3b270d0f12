"""The operator's commands on an outbox: `… outbox parked list | show | release | discard` and `… outbox republish`."""

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any
from uuid import UUID

import typer
from sqlalchemy.exc import SQLAlchemyError

from shared.database import Database
from shared.decisions import DryRun
from shared.errors import InvalidInput, KafkaFailure, ServiceError, Unavailable
from shared.lifecycle import describe
from shared.moments import parse_moment
from shared.outbox import republish as again
from shared.outbox.parked_events import (
    ParkedDetails,
    ParkedEvent,
    Selection,
    discard,
    list_parked,
    release_all,
    release_key_of,
    show_parked,
    summarize,
)
from shared.settings import ServiceSettings

Run = Callable[[Callable[[Database], Coroutine[Any, Any, None]]], None]
"""Runs an operator's work with the service's database, and turns errors into one readable line."""

By = Annotated[str, typer.Option("--by", help="who decides this; recorded")]
Topic = Annotated[str | None, typer.Option("--topic", help="only events of this topic")]
ReasonContains = Annotated[str | None, typer.Option("--reason-contains", help="only events with this in their reason")]
AsJson = Annotated[bool, typer.Option("--json", help="for machines")]

_MEANING = (
    "Until they are released and published, an order that such an event confirms is not charged, and a payment that it "
    "reports, whose money has moved, does not show on its order. All other orders go on."
)
_GIVEN_UP = (
    "is discarded: nothing will ever be charged by it if it confirms an order, and a payment that it reports will "
    "never show on its order"
)
_PROGRESS_SECONDS = 1.0


def parked_app(run: Run, channel: str) -> typer.Typer:
    """Return the commands on parked events; `channel` is the one that wakes the relay."""
    app = typer.Typer(no_args_is_help=True, help="events that the broker refused for good, and those behind them")

    @app.command("list")
    def list_(
        topic: Topic = None,
        reason_contains: ReasonContains = None,
        limit: Annotated[int, typer.Option(min=1, max=10_000)] = 100,
        as_json: AsJson = False,
    ) -> None:
        """List what is parked, in the order in which it would be published."""
        run(lambda database: _list(database, Selection(topic, reason_contains), limit, as_json=as_json))

    @app.command()
    def show(
        event_id: UUID,
        payload: Annotated[bool, typer.Option("--payload", help="also the payload, which has personal data")] = False,
        as_json: AsJson = False,
    ) -> None:
        """Show one parked event, and how it ended if it did."""
        run(lambda database: _show(database, event_id, payload=payload, as_json=as_json))

    @app.command()
    def release(
        by: By,
        event_id: Annotated[UUID | None, typer.Argument(help="releases everything parked of its key")] = None,
        everything: Annotated[bool, typer.Option("--all", help="release every key, or those of the options")] = False,
        topic: Topic = None,
        reason_contains: ReasonContains = None,
        dry_run: DryRun = False,
    ) -> None:
        """Let the relay publish what is parked, in order, before anything newer of its keys. First mend the cause."""
        selection = Selection(topic, reason_contains)
        run(
            lambda database: _release(
                database, event_id, selection, by, channel, everything=everything, dry_run=dry_run
            )
        )

    @app.command("discard")
    def discard_(
        event_id: UUID,
        by: By,
        reason: Annotated[str, typer.Option("--reason", help="why it may be lost; recorded")],
        dry_run: DryRun = False,
    ) -> None:
        """Give one event up for ever: no order is charged by it, no payment shows by it."""
        run(lambda database: _discard(database, event_id, by, reason, dry_run=dry_run))

    return app


Operate = Callable[[Callable[[Database, ServiceSettings], Coroutine[Any, Any, None]]], None]


def add_republish(app: typer.Typer, operate: Operate) -> None:
    """Add the command that publishes again."""

    @app.command("republish")
    def republish_(
        since: Annotated[str, typer.Option("--since", help="ISO 8601 with an offset, or a duration like 12h or 3d")],
        until: Annotated[str | None, typer.Option("--until", help="likewise; up to now when it is left out")] = None,
        event_type: Annotated[str | None, typer.Option("--type", help="only events of this type")] = None,
        key: Annotated[str | None, typer.Option("--key", help="only events of this key (an aggregate's id)")] = None,
        rate: Annotated[float, typer.Option(min=0.1, max=100_000, help="events a second")] = 500.0,
        dry_run: DryRun = False,
    ) -> None:
        """Publish again what was published already, for a consumer that was rebuilt. Same ids: others skip them."""
        now = datetime.now(UTC)

        async def work(database: Database, settings: ServiceSettings) -> None:
            chosen = again.Selection(
                parse_moment(since, now),
                None if until is None else parse_moment(until, now),
                event_type,
                key,
                retention_hours=settings.outbox_retention_hours,
            )
            if chosen.until is not None and chosen.until <= chosen.since:
                raise InvalidInput("--until is not later than --since: that selects nothing")
            again.refuse_outside_window(chosen.since, settings.consumers_dedup_window_days, now)
            await _republish(database, settings, chosen, rate, dry_run=dry_run)

        operate(work)


async def _republish(
    database: Database, settings: ServiceSettings, chosen: again.Selection, rate: float, *, dry_run: bool
) -> None:
    plan = await again.plan(database, chosen)
    lasting = timedelta(seconds=round(plan.events / rate))
    for count in plan.counts:
        typer.echo(
            f"{count.events} of {count.event_type} on {count.topic}, created {count.oldest:%Y-%m-%d %H:%M:%S}Z "
            f"to {count.newest:%Y-%m-%d %H:%M:%S}Z"
        )
    if plan.kept_since is None or plan.kept_since > chosen.since:
        kept = "nothing" if plan.kept_since is None else f"what was created since {plan.kept_since:%Y-%m-%d %H:%M:%S}Z"
        typer.echo(
            f"the outbox keeps {kept}: older events, if there were any, are gone from it (…_OUTBOX_RETENTION_HOURS)"
        )
    again.refuse_outside_window(chosen.since, settings.consumers_dedup_window_days, datetime.now(UTC), lasting)
    if dry_run or not plan.events:
        typer.echo(f"{plan.events} events would be published again, in {lasting} at this rate. Nothing was sent")
        return
    progress = _Progress(plan.events)
    try:
        await again.republish(database, settings.kafka("republish"), chosen, again.Pace(rate), progress.note)
    except (ServiceError, SQLAlchemyError, OSError, TimeoutError) as error:
        raise Unavailable(
            f"{progress.sent} of {plan.events} events were published again, then: {_cause(error)}. Mend that and run "
            "the same command again: it begins anew, and what comes twice is absorbed"
        ) from error
    except asyncio.CancelledError:
        typer.echo(
            f"interrupted: {progress.sent} of {plan.events} events were published again. To publish all, run the same "
            "command again: it begins anew, and what comes twice is absorbed",
            err=True,
        )
        raise
    typer.echo(f"{progress.sent} events were published again, with the ids they had")


class _Progress:
    """Tells how far it is, at most once a second."""

    def __init__(self, events: int) -> None:
        self.sent = 0
        self._events = events
        self._told_at = float("-inf")

    def note(self, sent: int) -> None:
        self.sent = sent
        if time.monotonic() - self._told_at >= _PROGRESS_SECONDS:
            self._told_at = time.monotonic()
            typer.echo(f"{sent} of {self._events}", err=True)


def _cause(error: Exception) -> str:
    if isinstance(error, KafkaFailure) and error.remedy:
        return f"{error.detail}; {error.remedy}"
    return error.detail if isinstance(error, ServiceError) else describe(error)


async def _list(database: Database, selection: Selection, limit: int, *, as_json: bool) -> None:
    events = await list_parked(database, selection, limit)
    summary = await summarize(database, selection)
    if as_json:
        found = {"keys": summary.keys, "refused": summary.refused, "waiting": summary.waiting}
        typer.echo(json.dumps({**found, "events": [event.as_json() for event in events]}, indent=2))
        return
    for event in events:
        typer.echo(_line(event))
    if not events:
        typer.echo(await _nothing(database, selection))
        return
    if len(events) < summary.refused + summary.waiting:
        typer.echo(f"… and {summary.refused + summary.waiting - len(events)} more (--limit)")
    typer.echo(
        f"{summary.refused} refused and {summary.waiting} waiting behind them, of {summary.keys} keys. {_MEANING}"
    )


async def _nothing(database: Database, selection: Selection) -> str:
    """Say that nothing matches; a misspelt topic must not read as if all were well."""
    everything = await summarize(database, Selection())
    parked = everything.refused + everything.waiting
    if selection == Selection() or not parked:
        return "nothing is parked"
    return f"nothing that is parked matches; {parked} events are parked in all: see `outbox parked list`"


def _line(event: ParkedEvent) -> str:
    state = "refused" if event.refused else "waiting"
    released = f", released by {event.released_by}" if event.released_at else ""
    return (
        f"{event.event_id} {event.event_type} on {event.topic} key {event.key} {state}{released} "
        f"since {event.parked_at:%Y-%m-%d %H:%M:%S}Z: {event.reason}"
    )


async def _show(database: Database, event_id: UUID, *, payload: bool, as_json: bool) -> None:
    found = await show_parked(database, event_id)
    fields = _fields(found)
    if payload:
        fields["payload"] = found.payload.decode(errors="replace")
    if as_json:
        typer.echo(json.dumps(fields, indent=2))
    else:
        for name, value in fields.items():
            typer.echo(f"{name}: {value}")


def _fields(found: ParkedDetails) -> dict[str, Any]:
    return {
        **found.event.as_json(),
        "created_at": str(found.created_at),
        "headers": found.headers,
        "size_bytes": found.size_bytes,
        "outcome": found.outcome,
        "settled_at": str(found.settled_at) if found.settled_at else None,
        "settled_by": found.settled_by,
        "note": found.note,
    }


async def _release(
    database: Database,
    event_id: UUID | None,
    selection: Selection,
    by: str,
    channel: str,
    *,
    everything: bool,
    dry_run: bool,
) -> None:
    if (event_id is None) != everything:
        raise InvalidInput("name one event id, or say --all (with --topic or --reason-contains for some of them)")
    if event_id is not None and selection != Selection():
        raise InvalidInput("--topic and --reason-contains belong to --all; an event id releases its own key")
    if event_id is None:
        count = await release_all(database, selection, _named(by), channel, dry_run=dry_run)
    else:
        count = await release_key_of(database, event_id, _named(by), channel, dry_run=dry_run)
    if not count:
        typer.echo(await _nothing(database, selection))
    elif dry_run:
        typer.echo(f"{count} events would be published, each key's in order. Nothing was changed")
    else:
        typer.echo(
            f"{count} events are released: a relay publishes them now, each key's in order. `outbox parked list`"
        )


async def _discard(database: Database, event_id: UUID, by: str, reason: str, *, dry_run: bool) -> None:
    if not reason.strip():
        raise InvalidInput("--reason is empty; say why this event may be lost")
    left = await discard(database, event_id, _named(by), reason.strip(), dry_run=dry_run)
    typer.echo(f"event {event_id} {'would be discarded; nothing was changed' if dry_run else _GIVEN_UP}")
    if left:
        typer.echo(f"{left} other events of its key still wait: `outbox parked release` with the id of one of them")


def _named(by: str) -> str:
    if not by.strip():
        raise InvalidInput("--by is empty; say who decides this")
    return by.strip()
