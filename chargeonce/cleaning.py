"""Removing what runs left behind: below one directory, and where PostgreSQL's data had to be moved from there."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from chargeonce.stack import LOCK_NAME, Stack, StackError


async def clean(directory: Path) -> int:
    """Delete `directory` with the data of every run in it, wherever that lies; return how many runs had some.

    Nothing is deleted while a run uses any of it. Raises DirectoryInUseError naming its pid, StackError when the
    directory is not one of ours to delete, OSError when it belongs to another user.
    """
    _check_not_around_us(directory)
    stacks = [Stack(found) for found in _run_directories(directory)]
    try:
        for stack in stacks:
            stack.hold()
        for stack in stacks:
            stack.remove()
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(directory)
    finally:
        for stack in stacks:
            await stack.stop()
    return len(stacks)


def _check_not_around_us(directory: Path) -> None:
    if Path.cwd().is_relative_to(directory.resolve()):
        raise StackError(f"{directory} holds the directory you are in, so it stays: name another one")


def _run_directories(directory: Path) -> Iterator[Path]:
    for found, folders, names in os.walk(directory):
        if LOCK_NAME in names:
            folders.clear()
            yield Path(found)
