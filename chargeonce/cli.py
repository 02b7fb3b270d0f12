"""The command `chargeonce`: run the whole on this machine, break it on purpose, prove the result."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from chargeonce.audit import OVERDUE_AFTER_SECONDS, Audit, AuditResult
from chargeonce.audit_view import audit_view
from chargeonce.cleaning import clean as clean_directory
from chargeonce.foreground import Interrupted, run_stack, run_until_signalled
from chargeonce.foreground import up as run_up
from chargeonce.ledgers import LedgerAwayError, Ledgers
from chargeonce.stack import StackError

app = typer.Typer(name="chargeonce", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

_COULD_NOT = 2


def _var(name: str = "") -> Path:
    return Path(os.environ.get("CHARGEONCE_VAR") or "var") / name


@contextmanager
def _readable_errors() -> Iterator[None]:
    """End with the cause and what to do, and no traceback, for what a person can put right. Exit status 2."""
    try:
        yield
    except (StackError, LedgerAwayError, OSError) as error:
        sys.stderr.write(f"chargeonce: {error}\n")
        raise typer.Exit(_COULD_NOT) from error


@app.command()
def up(
    port_base: Annotated[
        int, typer.Option(min=1024, max=65500, help="orders on this port, billing on +1, provider on +2, others +10…21")
    ] = 8001,
    directory: Annotated[Path | None, typer.Option(help="where data and logs live (default: var/up)")] = None,
) -> None:
    """Run PostgreSQL, Kafka and every process of both services in the foreground; Ctrl-C stops all."""
    with _readable_errors():
        try:
            run_until_signalled(run_up(directory or _var("up"), port_base))
        except Interrupted:
            raise typer.Exit from None


@app.command()
def stack(
    directory: Annotated[Path | None, typer.Option(help="where data and logs live (default: var/stack)")] = None,
    postgres_port: Annotated[int | None, typer.Option(min=1024, max=65535, help="default: a free one")] = None,
    kafka_port: Annotated[int | None, typer.Option(min=1024, max=65535, help="default: a free one")] = None,
) -> None:
    """Run only PostgreSQL and Kafka in the foreground and print their addresses."""
    with _readable_errors():
        try:
            run_until_signalled(run_stack(directory or _var("stack"), postgres_port, kafka_port))
        except Interrupted:
            raise typer.Exit from None


@app.command()
def audit(
    orders_url: Annotated[str, typer.Option(help="the order service's API")] = "http://127.0.0.1:8001",
    billing_url: Annotated[str, typer.Option(help="the billing service's API")] = "http://127.0.0.1:8002",
    provider_url: Annotated[str, typer.Option(help="the payment provider's API")] = "http://127.0.0.1:8003",
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object instead of tables")] = False,
    settled_before: Annotated[
        datetime | None,
        typer.Option(
            formats=["%Y-%m-%dT%H:%M:%S%z", "%Y-%m-%dT%H:%M:%S.%f%z", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d"],
            help="an order confirmed before this should be charged (UTC unless it says otherwise)",
        ),
    ] = None,
    grace_seconds: Annotated[
        float,
        typer.Option(min=0, help="how long an order may be on its way before it is late; without --settled-before"),
    ] = 60.0,
    overdue_after_seconds: Annotated[
        float, typer.Option(min=0, help="an order that is late and older than this is overdue: exit status 1")
    ] = OVERDUE_AFTER_SECONDS,
    settled: Annotated[
        bool, typer.Option("--settled", help="nothing is on its way any more: what is pending is missing")
    ] = False,
    findings: Annotated[int, typer.Option(min=0, max=100_000, help="order ids to list of each kind")] = 20,
) -> None:
    """Compare orders, charges and the provider's payments.

    Exit status: 0 clean (orders may be on their way, or late), 1 when money is wrong, an order is overdue or a charge
    needs a person, 2 when it could not be done.
    """
    before = settled_before
    if before is not None and before.tzinfo is None:
        before = before.replace(tzinfo=UTC)

    async def run() -> AuditResult:
        async with Ledgers(orders_url, billing_url, provider_url) as ledgers:
            return await Audit(ledgers, finding_limit=findings).run(
                before=before,
                grace_seconds=grace_seconds,
                overdue_after_seconds=overdue_after_seconds,
                settled=settled,
            )

    with _readable_errors():
        try:
            result = run_until_signalled(run())
        except Interrupted as interrupted:
            raise typer.Exit(interrupted.exit_status) from None
    if as_json:
        sys.stdout.write(json.dumps(result.as_json(), indent=2) + "\n")
    else:
        Console().print(audit_view(result))
    raise typer.Exit(0 if result.clean else 1)


@app.command()
def demo(
    orders: Annotated[int, typer.Option(min=300, max=1_000_000, help="how many orders to create")] = 1000,
    keep: Annotated[
        bool, typer.Option("--keep", help="keep databases, ledger and logs also when all went well")
    ] = False,
    directory: Annotated[
        Path | None, typer.Option(help="where reports and, below run/, data go (default: var/demo)")
    ] = None,
) -> None:
    """Create orders, break things on purpose, prove that each order was charged exactly once.

    Exit status: 0 proved, 1 not proved, 2 when it could not be run.
    """
    from chargeonce.demo import Demo  # here: it draws pictures, half a second that the other commands save

    with _readable_errors():
        try:
            story = run_until_signalled(Demo(directory or _var("demo"), orders, keep=keep).run())
        except Interrupted as interrupted:
            sys.stderr.write("chargeonce: interrupted; everything is stopped, no process is left\n")
            raise typer.Exit(interrupted.exit_status) from None
    raise typer.Exit(0 if story.passed else 1)


@app.command()
def clean() -> None:
    """Delete var with the data of its runs, also what lies outside it. Refused while a run uses any of it.

    Directories that were named with --directory stay. Exit status: 0 done, 2 when it could not be done.
    """
    with _readable_errors():
        try:
            removed = run_until_signalled(clean_directory(_var()))
        except Interrupted as interrupted:
            raise typer.Exit(interrupted.exit_status) from None
    sys.stdout.write(f"chargeonce: {_var()} is removed, with the data of {removed} run{'' if removed == 1 else 's'}\n")


def main() -> None:
    """Entry point of the console command."""
    app()
