"""`make clean` removes what runs left, wherever it lies, and nothing that a run uses."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from chargeonce.stack import Stack

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def place() -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="chargeonce-clean-"))
    place.chmod(0o711)
    (place / ".mypy_cache").mkdir()
    yield place
    shutil.rmtree(place)


async def make_clean(place: Path, var: str) -> tuple[int, str]:
    """Run the target where it can harm nobody: in a directory of its own, with the environment that runs this."""
    process = await asyncio.create_subprocess_exec(
        *("make", "-f", str(REPOSITORY / "Makefile"), "clean"),
        cwd=place,
        env={**os.environ, "CHARGEONCE_VAR": var, "CHARGEONCE_VENV": sys.prefix},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode or 0, output.decode()


def leave_a_run(directory: Path, data: Path) -> None:
    """What a run leaves whose PostgreSQL could not reach `directory`: a link to its data elsewhere."""
    (directory / "postgres").mkdir(parents=True)
    (directory / "stack.lock").write_text("1\n")
    data.mkdir()
    (data / "PG_VERSION").write_text("18\n")
    (directory / "postgres" / "data").symlink_to(data)
    (directory / "logs").mkdir()
    (directory / "logs" / "order-api.log").write_text("line\n")


async def test_clean_removes_var_and_the_data_that_was_moved_elsewhere(place: Path) -> None:
    leave_a_run(place / "var" / "up", place / "moved-1")
    leave_a_run(place / "var" / "demo" / "run", place / "moved-2")
    (place / "var" / "demo" / "report.json").write_text("{}")
    status, output = await make_clean(place, "var")
    assert status == 0, output
    assert list(place.iterdir()) == []


async def test_clean_leaves_everything_while_a_run_uses_a_part_of_it_and_names_its_pid(place: Path) -> None:
    leave_a_run(place / "var" / "demo" / "run", place / "moved")
    running = Stack(place / "var" / "up")
    running.hold()
    try:
        status, output = await make_clean(place, "var")
        assert status != 0
        assert f"in use by the process with pid {os.getpid()}" in output
        assert (place / "moved" / "PG_VERSION").exists()
        assert (place / "var" / "demo" / "run" / "logs" / "order-api.log").exists()
        assert (place / "var" / "up" / "stack.lock").exists()
    finally:
        await running.stop()
    assert (await make_clean(place, "var"))[0] == 0
    assert list(place.iterdir()) == []


async def test_clean_without_var_has_nothing_to_do(place: Path) -> None:
    assert (await make_clean(place, "var"))[0] == 0


async def test_clean_does_not_delete_the_directory_it_is_called_in(place: Path) -> None:
    inside = place / "inside"
    inside.mkdir()
    status, output = await make_clean(inside, "..")
    assert status != 0
    assert "holds the directory you are in" in output
    assert inside.exists()
