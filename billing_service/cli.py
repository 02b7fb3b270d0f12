"""The command `billing-service`."""

from __future__ import annotations

from typing import Annotated

import typer

from billing_service.bootstrap import ROLES, build, gateway, owned_topics
from billing_service.reviews import open_reviews
from billing_service.settings import BillingServiceSettings
from billing_service.tables import metadata
from shared import cli, telemetry
from shared.database import Database

NAME = "billing-service"
app = typer.Typer(name=NAME, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Wait = Annotated[float, typer.Option("--wait-seconds", help="how long to wait for a server that is still starting")]


@app.command()
def run(
    roles: Annotated[
        list[str] | None, typer.Argument(help=f"any of: {' '.join(ROLES)}; all when none is named")
    ] = None,
    host: Annotated[str | None, typer.Option(help="overrides BILLING_SERVICE_HOST")] = None,
    port: Annotated[
        int | None, typer.Option(help="overrides BILLING_SERVICE_PORT; health and metrics for any role")
    ] = None,
) -> None:
    """Run one process with the named roles until SIGTERM."""
    with cli.readable_errors(NAME):
        settings = BillingServiceSettings()
        chosen = cli.check_roles(NAME, roles or (), ROLES)
        cli.run(
            NAME,
            lambda: build(settings, chosen),
            host=host or settings.host,
            port=port or settings.port,
            level=settings.log_level,
            json_lines=settings.log_json,
        )


@app.command()
def migrate(wait_seconds: Wait = 30.0) -> None:
    """Bring the database to the newest schema and register the topics; safe to run again."""
    with cli.readable_errors(NAME):
        settings = BillingServiceSettings()
        telemetry.configure(NAME, level=settings.log_level, json_lines=settings.log_json)
        cli.run_to_end(
            cli.migrate_database(
                "billing_service",
                settings.database("migrate"),
                metadata,
                owned_topics(settings),
                settings.dedup_window_days,
                wait_seconds,
            )
        )


@app.command()
def topics(wait_seconds: Wait = 30.0) -> None:
    """Make the Kafka topics that this service writes; safe to run again."""
    with cli.readable_errors(NAME):
        settings = BillingServiceSettings()
        telemetry.configure(NAME, level=settings.log_level, json_lines=settings.log_json)
        cli.run_to_end(cli.make_topics(settings.kafka("topics"), owned_topics(settings), wait_seconds))


@app.command()
def reviews() -> None:
    """List the charges that wait for a person, with what the provider's ledger has for each."""
    with cli.readable_errors(NAME):
        cli.run_to_end(_list_reviews(BillingServiceSettings()))


async def _list_reviews(settings: BillingServiceSettings) -> None:
    database = Database(settings.database("reviews", pool_size=1))
    provider = gateway(settings)
    await provider.open()
    try:
        async for review in open_reviews(database, provider):
            typer.echo(review.describe())
    finally:
        await provider.close()
        await database.close()


def main() -> None:
    """Entry point of the console command."""
    app()
