"""One Compose project for the whole run. Without a Docker engine the tests are skipped, unless one is required."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator

import aiohttp
import pytest

from tests.compose.project import CommandFailedError, ComposeProject, run


@pytest.fixture(scope="session")
async def engine() -> None:
    """A Docker engine and Compose answer."""
    try:
        await run("docker", "version", "--format", "{{.Server.Version}}")
        await run("docker", "compose", "version")
    except (CommandFailedError, FileNotFoundError) as error:
        reason = f"no Docker engine with Compose answers, so the containers were not tested: {error}"
        if os.environ.get("CI") == "true" or os.environ.get("CHARGEONCE_REQUIRE_DOCKER") == "1":
            pytest.fail(f"{reason}\nCI=true or CHARGEONCE_REQUIRE_DOCKER=1 asks for it: start the engine.")
        pytest.skip(reason)


@pytest.fixture(scope="session")
async def project(engine: None, request: pytest.FixtureRequest) -> AsyncIterator[ComposeProject]:
    """The project, up and healthy; its containers, volumes and image go at the end, come what may."""
    # A run that is told to end, by a time limit for example, takes the containers down as an interrupted one does.
    former = signal.signal(signal.SIGTERM, signal.default_int_handler)
    project = ComposeProject()
    came_up = False
    try:
        await project.up()
        came_up = True
        yield project
    finally:
        if not came_up or request.session.testsfailed:
            print(await project.report())  # noqa: T201 - pytest shows it with the failure
        await project.down()
        signal.signal(signal.SIGTERM, former)
        left = await project.left_behind()
        assert not left, f"`docker compose down --volumes` left: {left}"


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    """An HTTP client with a deadline."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=15)) as session:
        yield session
