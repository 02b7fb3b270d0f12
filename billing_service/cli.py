"""The command `billing-service`."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import TYPE_CHECKING

import typer

from billing_service.reviews import open_reviews
from billing_service.settings import ROLES, BillingServiceSettings, owned_topics
from billing_service.tables import metadata
from shared.cli import readable_errors, service_app
from shared.database import Database

if TYPE_CHECKING:
    from fastapi import FastAPI


def _build(settings: BillingServiceSettings, roles: Collection[str]) -> FastAPI:
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


@app.command()
def reviews() -> None:
    """List the charges that wait for a person, with what the provider's ledger has for each."""
    with readable_errors(BillingServiceSettings.service):
        asyncio.run(_list_reviews(BillingServiceSettings()))


async def _list_reviews(settings: BillingServiceSettings) -> None:
    from billing_service.bootstrap import gateway

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
