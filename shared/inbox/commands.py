"""The operator's commands on dead letters: `… dead-letters list | show | retry | discard`."""

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any
from uuid import UUID

import typer

from shared.database import Database
from shared.decisions import Because, By, DryRun, decider
from shared.errors import InvalidInput, NotFound
from shared.inbox import letters
from shared.inbox.letters import Decision, LetterDetails, LetterLine, Selection
from shared.moments import parse_moment
from shared.unit_of_work import UnitsOfWork

Run = Callable[[Callable[[Database, str], Coroutine[Any, Any, None]]], None]
"""Runs an operator's work with the service's database and consumer group, and turns errors into one readable line."""

Ids = Annotated[list[int] | None, typer.Argument(metavar="LETTER", help="numbers of letters, as `list` shows them")]
Reason = Annotated[str | None, typer.Option("--reason", help="only letters with this reason code")]
Topic = Annotated[str | None, typer.Option("--topic", help="only letters of this source topic")]
EventId = Annotated[UUID | None, typer.Option("--event-id", help="only the letter of this event")]
Key = Annotated[str | None, typer.Option("--key", help="only letters of this key (an aggregate's id)")]
Since = Annotated[str | None, typer.Option("--since", help="first failed since; ISO 8601 with an offset, or 12h, 3d")]
Everything = Annotated[bool, typer.Option("--all", help="every open letter")]
AsJson = Annotated[bool, typer.Option("--json", help="for machines")]

_MEANING = (
    "What such a letter would have done has not happened: of an order, that it is charged; of a payment, that it shows "
    "on its order. Letters of this list are in no queue: those without a time wait for a person."
)
_POLL_SECONDS = 0.2
_MASKED = "(masked)"
# Names of fields that may hold what nobody on call needs to see. Masked wherever they are, however deep.
_PERSONAL = re.compile(
    r"secret|token|passw|authorization|cookie|credential|api[-_]?key|card|iban|bic|name|mail|phone|address|birth|customer",
    re.IGNORECASE,
)
_OPEN_HEADERS = frozenset({"event_id", "event_type", "traceparent"})


def dead_letters_app(run: Run) -> typer.Typer:
    """Return the commands on the dead letters of a service's consumer group."""
    app = typer.Typer(no_args_is_help=True, help="events that could not be processed, for the person on call")

    @app.command("list")
    def list_(
        reason: Reason = None,
        topic: Topic = None,
        event_id: EventId = None,
        key: Key = None,
        since: Since = None,
        status: Annotated[str, typer.Option(help="open, resolved, discarded or any")] = "open",
        limit: Annotated[int, typer.Option(min=1, max=10_000)] = 100,
        as_json: AsJson = False,
    ) -> None:
        """List letters, the oldest first, and count them by reason."""
        if status not in ("open", "resolved", "discarded", "any"):
            raise typer.BadParameter("--status is one of: open, resolved, discarded, any")
        chosen = _selection(None, reason, topic, event_id, key, since, None if status == "any" else status)
        run(lambda database, group: _list(database, group, chosen(), limit, as_json=as_json))

    @app.command()
    def show(
        letter: int,
        payload: Annotated[bool, typer.Option("--payload", help="also the payload, personal fields masked")] = False,
        as_json: AsJson = False,
    ) -> None:
        """Show everything about one letter."""
        run(lambda database, group: _show(database, group, letter, payload=payload, as_json=as_json))

    @app.command()
    def retry(
        because: Because,
        letter: Ids = None,
        reason: Reason = None,
        topic: Topic = None,
        event_id: EventId = None,
        key: Key = None,
        since: Since = None,
        everything: Everything = False,
        by: By = "",
        rate: Annotated[float, typer.Option(min=0.01, max=10_000, help="letters a second")] = 50.0,
        wait: Annotated[
            bool, typer.Option("--wait", help="until all were tried; exit status 1 if some failed")
        ] = False,
        wait_seconds: Annotated[float, typer.Option(help="how long --wait waits at most")] = 600.0,
        dry_run: DryRun = False,
    ) -> None:
        """Give letters to this service's consumer once more, each key's in order. First mend the cause."""
        chosen = _selection(letter, reason, topic, event_id, key, since, "open")
        patience = wait_seconds if wait else None
        run(
            lambda database, group: _retry(
                database,
                group,
                _narrowed(chosen(), everything=everything),
                Decision(*decider(by, because)),
                rate,
                patience,
                dry_run=dry_run,
            )
        )

    @app.command()
    def discard(
        because: Because,
        letter: Ids = None,
        reason: Reason = None,
        topic: Topic = None,
        event_id: EventId = None,
        key: Key = None,
        since: Since = None,
        everything: Everything = False,
        by: By = "",
        dry_run: DryRun = False,
    ) -> None:
        """Give letters up for ever: what they would have done will never happen. Those behind them follow."""
        chosen = _selection(letter, reason, topic, event_id, key, since, "open")
        run(
            lambda database, group: _discard(
                database,
                group,
                _narrowed(chosen(), everything=everything),
                Decision(*decider(by, because)),
                dry_run=dry_run,
            )
        )

    return app


def _selection(
    ids: list[int] | None,
    reason: str | None,
    topic: str | None,
    event_id: UUID | None,
    key: str | None,
    since: str | None,
    status: str | None,
) -> Callable[[], Selection]:
    """Return what makes the selection, where a wrong `--since` becomes a readable line."""
    return lambda: Selection(
        tuple(ids or ()),
        reason,
        topic,
        event_id,
        key,
        None if since is None else parse_moment(since, datetime.now(UTC)),
        status,
    )


def _narrowed(chosen: Selection, *, everything: bool) -> Selection:
    if chosen.is_everything != everything:
        raise InvalidInput("name letters or a filter (--reason, --topic, …), or say --all, and not both")
    return chosen


async def _list(database: Database, group: str, chosen: Selection, limit: int, *, as_json: bool) -> None:
    async with database.session() as session:
        found = await letters.list_letters(session, group, chosen, limit)
        counts = await letters.count_letters(session, group, chosen)
    if as_json:
        typer.echo(json.dumps({"group": group, "counts": counts, "letters": [_as_json(line) for line in found]}))
        return
    for line in found:
        typer.echo(_line(line))
    if not found:
        typer.echo(f"no letter of {group} matches" if not chosen.is_everything else f"{group} has no such letters")
        return
    if len(found) < sum(counts.values()):
        typer.echo(f"… and {sum(counts.values()) - len(found)} more (--limit)")
    typer.echo(f"{', '.join(f'{count} {reason}' for reason, count in counts.items())}. {_MEANING}")


def _line(line: LetterLine) -> str:
    when = f"{line.first_failed_at:%Y-%m-%d %H:%M:%S}Z"
    again = f", next try {line.next_attempt_at:%Y-%m-%d %H:%M:%S}Z" if line.next_attempt_at else ""
    state = "" if line.status == "open" else f" {line.status}"
    return (
        f"{line.letter_id}{state} {line.reason} event {line.event_id or 'unknown'} key {line.key or 'none'} "
        f"at {line.topic}/{line.partition}/{line.offset}, {line.attempts} attempts since {when}{again}: {line.error}"
    )


def _as_json(line: LetterLine) -> dict[str, Any]:
    return {name: value if isinstance(value, int | None) else str(value) for name, value in asdict(line).items()}


async def _show(database: Database, group: str, letter_id: int, *, payload: bool, as_json: bool) -> None:
    async with database.session() as session:
        found = await letters.show_letter(session, group, letter_id)
    if found is None:
        raise NotFound(f"{group} has no letter {letter_id}; see `dead-letters list --status any`")
    fields = _fields(found)
    if payload:
        fields["payload"] = _masked_payload(found.payload)
    if as_json:
        typer.echo(json.dumps(fields))
        return
    for name, value in fields.items():
        typer.echo(f"{name}: {value}")


def _fields(found: LetterDetails) -> dict[str, Any]:
    content = found.payload
    return {
        **_as_json(found.line),
        "last_failed_at": str(found.last_failed_at),
        "decided_at": str(found.decided_at) if found.decided_at else None,
        "decided_by": found.decided_by,
        "decision_reason": found.decision_reason,
        "settled_at": str(found.settled_at) if found.settled_at else None,
        "waiting_behind": found.waiting_behind,
        "headers": [[name, _header(name, value)] for name, value in found.headers],
        "payload_bytes": None if content is None else len(content),
        "payload_sha256": None if content is None else hashlib.sha256(content).hexdigest(),
    }


def _header(name: str, value: str | None) -> str | None:
    if value is None:
        return None
    if name not in _OPEN_HEADERS:
        return _MASKED
    return base64.b64decode(value).decode("utf-8", "backslashreplace")


def _masked_payload(content: bytes | None) -> object:
    """Return the payload with personal fields masked; of what is no JSON nothing, for nobody knows what it holds."""
    if content is None:
        return None
    try:
        return mask(json.loads(content))
    except (ValueError, RecursionError):
        return f"({len(content)} bytes that are no JSON; they are in dead_letter.payload and in the topic)"


def mask(value: object) -> object:
    """Return a JSON value whose personal and secret fields, known by their names, are masked."""
    if isinstance(value, Mapping):
        return {name: _MASKED if _PERSONAL.search(name) else mask(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [mask(inner) for inner in value]
    return value


async def _retry(
    database: Database,
    group: str,
    chosen: Selection,
    decision: Decision,
    rate: float,
    patience: float | None,
    *,
    dry_run: bool,
) -> None:
    if dry_run:
        async with database.session() as session:
            counts = await letters.count_letters(session, group, chosen)
        _refuse_none(counts, group)
        typer.echo(
            f"{_counted(counts)} would be tried again, in {sum(counts.values()) / rate:.0f} s. Nothing was changed"
        )
        return
    async with UnitsOfWork(database).begin() as work:
        counts = await letters.count_letters(work.session, group, chosen)
        _refuse_none(counts, group)
        ids = await letters.request_retry(work.session, group, chosen, decision, rate)
        if not ids:
            raise InvalidInput(
                "these letters have no contents (they were too large to keep) and cannot be retried: let their "
                "producer publish them again, then discard them"
            )
    typer.echo(
        f"{len(ids)} letters are due now, at {rate:g} a second, each key's in order; a process with the role consumer "
        "tries them. Those that fail stay: `dead-letters list`"
    )
    if left := sum(counts.values()) - len(ids):
        typer.echo(f"{left} have no contents and cannot be retried")
    if patience is not None:
        await _wait(database, ids, patience)


async def _wait(database: Database, ids: list[int], patience: float) -> None:
    progress = letters.RequestProgress(len(ids), 0, 0, 0)
    with suppress(TimeoutError):
        async with asyncio.timeout(patience):
            while progress.waiting:
                await asyncio.sleep(_POLL_SECONDS)
                async with database.session() as session:
                    progress = await letters.request_progress(session, ids)
    typer.echo(
        f"{progress.resolved} resolved, {progress.failed} failed again, {progress.not_tried} not tried because others "
        f"failed, {progress.waiting} still waiting"
    )
    if progress.waiting:
        typer.echo(
            "those wait for a process with the role consumer, or behind an earlier letter of their key", err=True
        )
    if progress.resolved < len(ids):
        raise typer.Exit(1)


async def _discard(database: Database, group: str, chosen: Selection, decision: Decision, *, dry_run: bool) -> None:
    if dry_run:
        async with database.session() as session:
            counts = await letters.count_letters(session, group, chosen)
        _refuse_none(counts, group)
        typer.echo(f"{_counted(counts)} would be discarded. Nothing was changed")
        return
    async with UnitsOfWork(database).begin() as work:
        discarded = await letters.discard_letters(work.session, group, chosen, decision)
        _refuse_none({"": len(discarded)}, group)
    typer.echo(
        f"{len(discarded)} letters are discarded: what they would have done will never happen. What waited behind them "
        "is tried now"
    )


def _counted(counts: Mapping[str, int]) -> str:
    return f"{sum(counts.values())} letters ({', '.join(f'{count} {reason}' for reason, count in counts.items())})"


def _refuse_none(counts: Mapping[str, int], group: str) -> None:
    """Raise when nothing is meant; a misspelt filter must not read as if all were well."""
    if not sum(counts.values()):
        raise NotFound(f"no open letter of {group} matches, so nothing was done: see `dead-letters list`")
