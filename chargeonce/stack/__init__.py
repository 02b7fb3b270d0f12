"""PostgreSQL and Kafka for this machine, without Docker: one directory, two child processes, free or fixed ports."""

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from chargeonce.stack.errors import DirectoryInUseError, PortTakenError, StackError, StartFailedError
from chargeonce.stack.kafka import KafkaBroker, prepare_kafka
from chargeonce.stack.postgres import PostgresServer
from chargeonce.stack.processes import LinePrinter, Supervisor, free_ports, require_free_port

__all__ = [
    "LOCK_NAME",
    "DirectoryInUseError",
    "KafkaBroker",
    "LinePrinter",
    "PortTakenError",
    "PostgresServer",
    "Stack",
    "StackError",
    "StartFailedError",
    "Supervisor",
    "free_ports",
    "prepare",
    "require_free_port",
]

LOCK_NAME = "stack.lock"


class Stack:
    """PostgreSQL in `directory/postgres` and Kafka in `directory/kafka`, started and stopped together.

    Several stacks run side by side in different directories; one directory belongs to one process at a time.
    """

    def __init__(
        self,
        directory: Path,
        *,
        postgres_port: int | None = None,
        kafka_port: int | None = None,
        postgres_settings: Mapping[str, str] | None = None,
        kafka_settings: Mapping[str, str] | None = None,
        postgres_port_setting: str = "postgres_port",
        kafka_port_setting: str = "kafka_port",
    ) -> None:
        self.directory = directory.absolute()
        self.postgres = PostgresServer(
            self.directory / "postgres",
            port=postgres_port,
            settings=postgres_settings,
            port_setting=postgres_port_setting,
        )
        self.kafka = KafkaBroker(
            self.directory / "kafka", port=kafka_port, settings=kafka_settings, port_setting=kafka_port_setting
        )
        self._lock: IO[str] | None = None

    def hold(self) -> None:
        """Take the directory for this process until `stop`; the kernel frees it however the process ends.

        Raises DirectoryInUseError naming the pid that has it (which `stack.lock` tells), StackError when it belongs to
        another user.
        """
        if self._lock:
            return
        path = self.directory / LOCK_NAME
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            lock = path.open("a+")
        except PermissionError as error:
            raise StackError(
                f"{self.directory} belongs to another user ({error}). To start empty: sudo rm -r {self.directory}"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            pid = lock.read().strip() or "unknown"
            lock.close()
            raise DirectoryInUseError(
                f"{self.directory} is in use by the process with pid {pid}: wait for it, stop it (kill {pid}), "
                "or use another directory"
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        self._lock = lock

    async def start(self) -> None:
        """Start both at the same time; when one cannot start, the other is stopped.

        Raises DirectoryInUseError, or what `PostgresServer.start` and `KafkaBroker.start` raise.
        """
        self.hold()
        starts = [asyncio.create_task(self.postgres.start()), asyncio.create_task(self.kafka.start())]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.wait(starts)
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop both at the same time and let go of the directory."""
        try:
            await asyncio.gather(self.postgres.stop(), self.kafka.stop())
        finally:
            if self._lock:
                self._lock.close()
                self._lock = None

    def remove(self) -> None:
        """Delete the data of both, also what lies outside `directory`. Raises StackError while one of them runs."""
        self.postgres.remove()
        self.kafka.remove()
        for folder in (self.postgres.directory, self.kafka.directory):
            with contextlib.suppress(FileNotFoundError):
                folder.rmdir()
        (self.directory / LOCK_NAME).unlink(missing_ok=True)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()


async def prepare() -> None:
    """Do what a first start would wait for: fetch Kafka, make its class archive. Nothing to do the second time.

    Raises StackError when Kafka cannot be fetched.
    """
    await prepare_kafka()
