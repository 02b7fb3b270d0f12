"""What the kit's frozen migrations need of alembic: both the `op` module and an `Operations` object fit."""

from __future__ import annotations

from typing import Protocol


class Ddl(Protocol):
    """Executes DDL statements."""

    def execute(self, sqltext: str) -> object:
        """Execute one statement."""
