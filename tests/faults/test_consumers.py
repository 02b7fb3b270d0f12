"""Three consumer processes of one group, killed and started again under load: every event once, none left out."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from chargeonce.stack import KafkaBroker
from tests.support.inbox import InboxUnderTest, inbox_under_test, payload

REPOSITORY = Path(__file__).parents[2]
EVENTS = 9000


@pytest.fixture
async def inbox(database_url: str, kafka: KafkaBroker, unique_name: str) -> AsyncIterator[InboxUnderTest]:
    async with inbox_under_test(database_url, kafka.bootstrap_servers, unique_name) as made:
        yield made


async def start(inbox: InboxUnderTest) -> asyncio.subprocess.Process:
    options = {
        "url": inbox.database.settings.url,
        "bootstrap_servers": inbox.kafka.bootstrap_servers,
        "topic": inbox.topic,
        "group": inbox.group,
    }
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.consuming_process", json.dumps(options)), cwd=REPOSITORY
    )


async def handled(inbox: InboxUnderTest, at_least: int) -> None:
    async with asyncio.timeout(90):
        while (await inbox.rows("SELECT count(*) FROM effect"))[0][0] < at_least:
            await asyncio.sleep(0.02)


async def test_three_consumers_are_killed_and_started_again_under_load(inbox: InboxUnderTest) -> None:
    processes = [await start(inbox) for _ in range(3)]
    try:
        for wave in range(3):
            first = wave * EVENTS // 3
            await inbox.produce(*(payload(number) for number in range(first, first + EVENTS // 3)))
            await handled(inbox, first + EVENTS // 12)
            victim = processes[wave]
            victim.kill()
            await victim.wait()
            processes[wave] = await start(inbox)
        await handled(inbox, EVENTS)
        for process in processes:
            process.terminate()
        assert [await process.wait() for process in processes] == [0, 0, 0]
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert await inbox.numbers() == list(range(EVENTS)), "each of them once"
    assert await inbox.letters() == {}
    assert await inbox.marks() == {"done": EVENTS}
    assert await inbox.rows("SELECT count(*) FROM inbox_member WHERE died_at IS NULL") == [(0,)]
