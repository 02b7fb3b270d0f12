"""Starting the processes that are measured, and talking to them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

_LONGEST_ANSWER_BYTES = 256 * 1024 * 1024
_STOP_DEADLINE_SECONDS = 30.0


class BenchmarkError(Exception):
    """A benchmark that could not be run, or whose result is wrong: events lost, or out of order."""


class Subject:
    """A running subject. `loop` names its event loop."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.loop = ""
        self.pid = process.pid
        self._process = process
        self._log = log

    async def ask(self, command: str, deadline_seconds: float = 60.0) -> Any:
        """Give a command and return the answer. Raises BenchmarkError when the process ended or is silent."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n".encode())
        return await self.hear(deadline_seconds)

    async def hear(self, deadline_seconds: float) -> Any:
        """Return the next thing that the process says."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(deadline_seconds):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise BenchmarkError(
                f"{self.name} said nothing for {deadline_seconds:g} s; its log is {self._log}"
            ) from None
        if not line:
            raise BenchmarkError(f"{self.name} ended:\n{self._log.read_text()[-2000:]}")
        return json.loads(line)

    async def usage(self) -> tuple[float, float]:
        """Return the CPU seconds it has used, and the monotonic time."""
        answer = await self.ask("usage")
        return answer["cpu_seconds"], answer["monotonic"]


@asynccontextmanager
async def subject(name: str, log: Path, **options: Any) -> AsyncIterator[Subject]:
    """Start a subject in a fresh process, wait until it is connected, and end it afterwards."""
    with log.open("ab") as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.benchmarks.subjects", name, json.dumps(options)),
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            limit=_LONGEST_ANSWER_BYTES,
            process_group=0,
        )
    running = Subject(name, process, log)
    try:
        running.loop = (await running.hear(120.0))["loop"]
        yield running
    finally:
        await _end(process)


@asynccontextmanager
async def order_service(role: str, port: int, settings: dict[str, Any], log: Path) -> AsyncIterator[int]:
    """Run `order-service run ROLE` as people do, and yield its pid."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("ORDER_SERVICE_")},
        **{f"ORDER_SERVICE_{name.upper()}": str(value) for name, value in settings.items()},
    }
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", "from order_service.cli import main; main()", "run", role, "--port", str(port)),
            cwd=ROOT,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,
        )
    try:
        yield process.pid
    finally:
        if process.returncode is None:
            process.terminate()
        await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.stdin is not None:
        process.stdin.close()
    try:
        async with asyncio.timeout(_STOP_DEADLINE_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
