"""PostgreSQL and Kafka of these tests' own, which they may stop, kill and freeze."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from chargeonce.stack import Stack, prepare
from tests.faults.relays.scenario import Scenario, scenario


@pytest.fixture(scope="session")
async def servers(stack_directory: Path) -> AsyncIterator[Stack]:
    await prepare()
    stack = Stack(stack_directory / "relays")
    async with stack:
        yield stack
    stack.remove()


@pytest.fixture(name="scenario")
async def _scenario(
    servers: Stack,
    unique_name: str,
    record_property: Callable[[str, object], None],
    caplog: pytest.LogCaptureFixture,
) -> AsyncIterator[Scenario]:
    """A scenario; what it told stands in the test report."""
    caplog.set_level(logging.CRITICAL, "aiokafka")  # the recording's client complains of each try while Kafka is away
    await servers.start()  # whatever a failed test left stopped
    async with scenario(servers, unique_name) as begun:
        yield begun
        if begun.told is not None:
            record_property("events", begun.told.events)
            record_property("duplicates", begun.told.duplicates)
            record_property("longest_delay_seconds", round(begun.told.longest_delay_seconds, 3))
            print(begun.told)  # noqa: T201
