"""The command `billing-service`."""

# Annotations are evaluated here, for typer reads them.

import json
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from contextlib import asynccontextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from billing_service.charge import Settle
from billing_service.gateway import HttpPaymentGateway
from billing_service.reviews import OpenReview, decide, find_review, open_reviews
from billing_service.settings import ROLES, BillingServiceSettings, owned_topics
from billing_service.tables import metadata
from shared.cli import operate, service_app
from shared.database import Database
from shared.decisions import Because, By, DryRun, decider
from shared.moments import parse_moment
from shared.outbox.append import EventWriter
from shared.unit_of_work import UnitsOfWork

if TYPE_CHECKING:
    from fastapi import FastAPI


def _build(settings: BillingServiceSettings, roles: Collection[str]) -> "FastAPI":
    from billing_service.bootstrap import build  # with the web framework, without which other commands start quickly

    return build(settings, roles)


app = service_app(
    BillingServiceSettings,
    package="billing_service",
    roles=ROLES,
    build=_build,
    metadata=metadata,
    owned_topics=owned_topics,
)
reviews = typer.Typer(help="charges that wait for a person: nobody knows whether their money moved")
app.add_typer(reviews, name="reviews")

OrderId = Annotated[int, typer.Argument(metavar="ORDER", min=1, help="the order whose charge is meant")]


@asynccontextmanager
async def _provider(settings: BillingServiceSettings) -> AsyncIterator[HttpPaymentGateway]:
    from billing_service.bootstrap import gateway

    provider = gateway(settings)
    await provider.open()
    try:
        yield provider
    finally:
        await provider.close()


def _with_provider(
    work: Callable[[Database, HttpPaymentGateway, BillingServiceSettings], Coroutine[Any, Any, None]],
    limit_seconds: float | None = None,
) -> None:
    async def run(database: Database, settings: BillingServiceSettings) -> None:
        async with _provider(settings) as provider:
            await work(database, provider, settings)

    operate(BillingServiceSettings, run, limit_seconds)


@reviews.callback(invoke_without_command=True)
def list_reviews(context: typer.Context) -> None:
    """List the charges that wait for a person, with what the provider's ledger has for each."""
    if context.invoked_subcommand is not None:
        return

    async def work(database: Database, provider: HttpPaymentGateway, _: BillingServiceSettings) -> None:
        async for review in open_reviews(database, provider):
            typer.echo(review.describe())

    _with_provider(work)


@reviews.command()
def settle(
    order: OrderId,
    because: Because,
    by: By = "",
    payment: Annotated[
        str | None, typer.Option("--payment", help="a payment made with another key, for example by hand")
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Record what the provider's ledger says of the payment: captured or declined. No money moves by this."""
    _decide(order, lambda review: review.settlement(payment), by, because, dry_run=dry_run)


@reviews.command()
def cancel(order: OrderId, because: Because, by: By = "", dry_run: DryRun = False) -> None:
    """Close a charge for which the provider has no payment: the order counts as declined, and nobody is charged."""
    _decide(order, lambda review: review.cancellation(because), by, because, dry_run=dry_run)


def _decide(order: int, step_of: Callable[[OpenReview], Settle], by: str, because: str, *, dry_run: bool) -> None:
    async def work(database: Database, provider: HttpPaymentGateway, _: BillingServiceSettings) -> None:
        name, why = decider(by, because)
        review = await find_review(database, provider, order)
        step = step_of(review)
        typer.echo(review.describe())
        if dry_run:
            typer.echo(f"it would be {step.state}, reference {step.reference}. Nothing was changed")
            return
        await decide(UnitsOfWork(database, EventWriter()), review, step, name, why)
        typer.echo(f"order {order} is {step.state} now, reference {step.reference}; its payment event is on its way")

    _with_provider(work)


@app.command()
def reconcile(
    since: Annotated[
        str | None,
        typer.Option("--since", help="only charges requested since; ISO 8601 with an offset, or 48h. All if left out"),
    ] = None,
    settling_minutes: Annotated[
        float, typer.Option(min=0, help="a charge first sent that recently may still wait for its answer")
    ] = 15.0,
    as_json: Annotated[bool, typer.Option("--json", help="for machines")] = False,
) -> None:
    """Compare charges with the provider's payments. Exit status 0: they agree; 1: they do not; 2: it cannot be told."""
    from billing_service.reconciliation import NAMED_AT_MOST, Reconciliation

    contradict = False

    async def work(database: Database, provider: HttpPaymentGateway, _: BillingServiceSettings) -> None:
        nonlocal contradict
        moment = None if since is None else parse_moment(since, datetime.now(UTC))
        report = await Reconciliation(database, provider, settling_seconds=settling_minutes * 60).run(moment)
        total = report.counts.total()
        contradict = total > 0
        if as_json:
            findings = [asdict(finding) for finding in report.findings]
            seen = {"charges": report.charges, "payments": report.payments}
            typer.echo(json.dumps({**seen, "counts": report.counts, "findings": findings}))
            return
        for finding in report.findings:
            typer.echo(finding.describe())
        if total > NAMED_AT_MOST:
            typer.echo(f"… and {total - NAMED_AT_MOST} more")
        verdict = f"{total} orders contradict the provider" if total else "they agree"
        typer.echo(f"{report.charges} charges and {report.payments} payments compared: {verdict}")

    _with_provider(work, limit_seconds=900.0)
    if contradict:
        raise typer.Exit(1)


def main() -> None:
    """Entry point of the console command."""
    app()
