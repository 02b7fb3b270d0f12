"""A stack and its directory: one run each, several side by side, nothing left of a run that was killed."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import psutil
import pytest

from chargeonce.stack import DirectoryInUseError, PortTakenError, Stack, kafka_jars, prepare

REPOSITORY = Path(__file__).parents[2]

RUN = """
import asyncio, os, sys
from pathlib import Path
from chargeonce.stack import Stack, Supervisor

async def main():
    supervisor = Supervisor(log=lambda *line: None, restart=True)
    async with Stack(Path(sys.argv[1])) as stack:
        worker = await supervisor.start("worker", ["sleep", "600"])
        print(os.getuid(), stack.postgres.dsn(), stack.postgres.pid, stack.kafka.pid, worker, flush=True)
        try:
            await asyncio.sleep(600)
        finally:
            await supervisor.stop()

asyncio.run(main())
"""


class Run:
    """A process of its own that has a stack and a supervised child running."""

    def __init__(self, process: asyncio.subprocess.Process, words: list[str]) -> None:
        self.process = process
        self.uid = int(words[0])
        self.dsn = words[1]
        self.children = [psutil.Process(int(pid)) for pid in words[2:]]
        self.descendants = psutil.Process(process.pid).children(recursive=True)


@contextlib.asynccontextmanager
async def _run(directory: Path, *prefix: str, cache: Path | None = None) -> AsyncIterator[Run]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    if cache:
        environment["CHARGEONCE_CACHE"] = str(cache)
    command = [*prefix, sys.executable, "-c", RUN, str(directory)]
    process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=subprocess.PIPE)
    try:
        assert process.stdout
        words = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().split()
        assert len(words) == 5, "the run ended before its stack was up"
        yield Run(process, words)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _until_gone(processes: list[psutil.Process], deadline_seconds: float = 15) -> None:
    async with asyncio.timeout(deadline_seconds):
        while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes):
            await asyncio.sleep(0.02)


async def _identity(dsn: str) -> object:
    connection = await asyncpg.connect(dsn)
    try:
        return await connection.fetchval("SELECT system_identifier FROM pg_control_system()")
    finally:
        await connection.close()


async def test_of_two_runs_side_by_side_the_killed_one_leaves_nothing_and_can_be_followed(
    tmp_path: Path, stack: Stack
) -> None:
    async with _run(tmp_path) as run:
        assert len(run.descendants) >= 7, "postgres with its workers, java, sleep"
        assert await _identity(run.dsn) != await _identity(stack.postgres.dsn())
        connection = await asyncpg.connect(run.dsn)
        await connection.execute("CREATE TABLE kept AS SELECT 42 AS value")
        with pytest.raises(DirectoryInUseError, match=rf"pid {run.process.pid}\b"):
            await Stack(tmp_path).start()

        run.process.send_signal(signal.SIGKILL)
        await run.process.wait()
        await _until_gone([*run.children, *run.descendants])
        connection.terminate()

    async with Stack(tmp_path) as next_run:
        connection = await asyncpg.connect(next_run.postgres.dsn())
        assert await connection.fetchval("SELECT value FROM kept") == 42
        await connection.close()
    assert stack.postgres.pid
    assert stack.kafka.pid
    next_run.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="this run is one of a normal user already")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv is not installed")
async def test_a_normal_user_runs_everything_as_himself_and_leaves_nothing(
    stack_directory: Path, unique_name: str
) -> None:
    await prepare()
    jars = await asyncio.to_thread(kafka_jars.kafka_jars)
    home = stack_directory / unique_name
    home.mkdir()
    os.chown(home, 65534, 65534)
    # The interpreter and the cache may lie below root's home: the user may read everything, and is nobody otherwise.
    reader = ("--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search")
    user = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *reader)
    async with _run(home / "stack", *user, cache=jars.folder.parent) as run:
        assert run.uid == 65534
        assert {process.uids().real for process in run.descendants} == {65534}
        assert (home / "stack" / "postgres" / "data").is_dir()
        assert not (home / "stack" / "postgres" / "data").is_symlink()
        run.process.send_signal(signal.SIGINT)
        await run.process.wait()
        assert not any(process.is_running() for process in run.children)
    shutil.rmtree(home)


async def test_when_one_half_cannot_start_the_other_is_stopped_and_the_directory_free(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        stack = Stack(tmp_path, kafka_port=taken.getsockname()[1])
        for _ in range(2):
            with pytest.raises(PortTakenError, match="kafka_port"):
                await stack.start()
            assert stack.postgres.pid is None
    stack.remove()


async def test_one_stack_object_holds_its_directory_against_another(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        first, second = (Stack(tmp_path, kafka_port=port) for _ in range(2))
        starting = asyncio.create_task(first.start())
        await asyncio.sleep(0)
        with pytest.raises(DirectoryInUseError, match=rf"pid {os.getpid()}\b"):
            await second.start()
        with pytest.raises(PortTakenError):
            await starting
    first.remove()
