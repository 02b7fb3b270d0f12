"""The command `order-service`."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from order_service.settings import ROLES, OrderServiceSettings, owned_topics
from order_service.tables import metadata
from shared.cli import service_app

if TYPE_CHECKING:
    from fastapi import FastAPI


def _build(settings: OrderServiceSettings, roles: Collection[str]) -> FastAPI:
    from order_service.bootstrap import build  # with the web framework, without which other commands start quickly

    return build(settings, roles)


app = service_app(
    OrderServiceSettings,
    package="order_service",
    roles=ROLES,
    build=_build,
    metadata=metadata,
    owned_topics=owned_topics,
)


def main() -> None:
    """Entry point of the console command."""
    app()
