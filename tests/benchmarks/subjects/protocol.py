"""What a subject says and hears: one JSON object a line out, one command a line in.

A subject ends when its input does, so none outlives the benchmark.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tests.benchmarks import loop

Answer = Mapping[str, Any]
Command = Callable[[], Awaitable[Answer]]


async def obey(commands: Mapping[str, Command]) -> None:
    """Say that everything is ready, then do what is asked until the input ends."""
    commands = {"usage": usage, **commands}
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    _say({"ready": True, "loop": loop.name()})
    while line := await lines.readline():
        _say(await commands[line.decode().strip()]())


async def usage() -> Answer:
    """Tell the CPU time of this process so far, all threads, user and system, and when that was."""
    spent = resource.getrusage(resource.RUSAGE_SELF)
    return {"cpu_seconds": spent.ru_utime + spent.ru_stime, "monotonic": time.monotonic()}


def _say(answer: Answer) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
