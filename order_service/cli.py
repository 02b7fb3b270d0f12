"""The command `order-service`."""

from __future__ import annotations

from order_service.bootstrap import ROLES, build, owned_topics
from order_service.settings import OrderServiceSettings
from order_service.tables import metadata
from shared.cli import service_app

app = service_app(
    OrderServiceSettings,
    package="order_service",
    roles=ROLES,
    build=build,
    metadata=metadata,
    owned_topics=owned_topics,
)


def main() -> None:
    """Entry point of the console command."""
    app()
