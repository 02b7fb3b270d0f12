"""Running a service's migrations from its own command, its image or its wheel."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import MetaData

from shared.errors import Refused


def scripts_directory() -> Path:
    """Return where the migrations are: in the installed wheel, or beside this package in a checkout."""
    package = Path(__file__).parent
    for candidate in (package / "_alembic", package.parent / "alembic"):
        if (candidate / "env.py").is_file():
            return candidate
    raise Refused("the migrations are neither in the installed package nor beside it; install the project again")


def alembic_config(service: str, url: str, metadata: MetaData) -> Config:
    """Return alembic's configuration for one service's database (`order_service`, `billing_service`)."""
    scripts = scripts_directory()
    config = Config(ini_section=service)
    config.set_section_option(service, "script_location", str(scripts))
    config.set_section_option(service, "version_locations", str(scripts / service / "versions"))
    config.set_section_option(service, "path_separator", "os")
    config.attributes["url"] = url
    config.attributes["metadata"] = metadata
    return config


# Alembic keeps its environment in module globals, so a process migrates one database at a time.
_one_at_a_time = threading.Lock()


async def upgrade(config: Config, revision: str = "head") -> None:
    """Bring the database to the revision. Alembic runs an event loop of its own, so it runs in a thread."""
    await asyncio.to_thread(_run, command.upgrade, config, revision)


async def downgrade(config: Config, revision: str) -> None:
    """Take the database back to the revision."""
    await asyncio.to_thread(_run, command.downgrade, config, revision)


def _run(migrate: Callable[[Config, str], None], config: Config, revision: str) -> None:
    with _one_at_a_time:
        migrate(config, revision)
