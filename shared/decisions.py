"""Who decides, and why: what every command records that changes what happens to money."""

import getpass
from contextlib import suppress
from typing import Annotated

import typer

from shared.errors import InvalidInput

By = Annotated[str, typer.Option("--by", help="who decides this; recorded. The user of the system when left out")]
Because = Annotated[str, typer.Option("--because", help="why; recorded")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="tell what would happen and change nothing")]


def decider(by: str, because: str) -> tuple[str, str]:
    """Return who decides and why. Raises InvalidInput where one of them is missing."""
    if not because.strip():
        raise InvalidInput("--because is empty; say why, for whoever reads this later")
    return by.strip() or _user(), because.strip()


def _user() -> str:
    with suppress(OSError, KeyError):
        return getpass.getuser()
    raise InvalidInput("--by is empty, and the system does not tell who you are; say who decides this")
