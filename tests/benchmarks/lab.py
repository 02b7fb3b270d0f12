"""Where a benchmark runs: PostgreSQL and Kafka of its own, the databases, and the subjects' processes."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from chargeonce.stack import Stack, free_ports, prepare
from tests.benchmarks.databases import Databases
from tests.benchmarks.processes import Subject, order_service, subject
from tests.benchmarks.topic import TOPIC, renew_topic

# The defaults of the stack, but for what would otherwise happen in the middle of one subject's run and not the other's:
# a checkpoint forced by the write-ahead log. Deleted topics give their disk back at once.
_POSTGRES = {"max_wal_size": "4GB", "checkpoint_timeout": "30min"}
_KAFKA = {"log.segment.delete.delay.ms": "1000", "log.initial.task.delay.ms": "1000"}


class Lab:
    """A stack that runs, with the databases and subjects on it."""

    def __init__(self, stack: Stack, logs: Path) -> None:
        self.stack = stack
        self.databases = Databases(stack.postgres)
        self.logs = logs
        self.loops: set[str] = set()

    @property
    def kafka(self) -> str:
        """The broker's address."""
        return self.stack.kafka.bootstrap_servers

    def settings(self, database: str, **changes: Any) -> dict[str, Any]:
        """Return settings of the order service on a database: the defaults, but for the addresses and `changes`."""
        return {
            "database_url": self.stack.postgres.dsn(database),
            "kafka_bootstrap_servers": self.kafka,
            "log_level": "WARNING",
            **changes,
        }

    async def new_topic(self) -> None:
        """Make the topic anew and empty."""
        await renew_topic(self.kafka)

    def relay(self, database: str, **changes: Any) -> AbstractAsyncContextManager[Subject]:
        """Start the product's relay, up to its command `start`."""
        return self._subject("relay", settings=self.settings(database, **changes))

    def naive(self, database: str, *, note: bool = False) -> AbstractAsyncContextManager[Subject]:
        """Start the naive relay, up to its command `start`."""
        dsn = self.stack.postgres.dsn(database)
        return self._subject("naive", dsn=dsn, bootstrap_servers=self.kafka, topic=TOPIC, note=note)

    def limit(self, count: int, batch_bytes: int, *, settled: bool) -> AbstractAsyncContextManager[Subject]:
        """Start the bare client with its batches built, up to its command `send`.

        It is a plain script; `settled`, it has the memory settings of the product too.
        """
        return self._subject(
            "limit",
            bootstrap_servers=self.kafka,
            topic=TOPIC,
            count=count,
            batch_bytes=batch_bytes,
            settled=settled,
        )

    def consumer(self, database: str, group: str) -> AbstractAsyncContextManager[Subject]:
        """Start billing's consumer, up to its command `start`."""
        settings = {**self.settings(database), "consumer_group": group}
        return self._subject("consumer", settings=settings)

    def naive_consumer(self, database: str, group: str) -> AbstractAsyncContextManager[Subject]:
        """Start the naive consumer, up to its command `start`."""
        dsn = self.stack.postgres.dsn(database)
        return self._subject("naive_consumer", dsn=dsn, bootstrap_servers=self.kafka, topic=TOPIC, group=group)

    def writer(
        self, database: str, *, naive: bool, rate_per_second: float, seconds: float
    ) -> AbstractAsyncContextManager[Subject]:
        """Start a process that writes at a fixed rate, up to its command `start`."""
        dsn = self.stack.postgres.dsn(database)
        return self._subject(
            "writer", dsn=dsn, topic=TOPIC, naive=naive, rate_per_second=rate_per_second, seconds=seconds
        )

    def orders(self, database: str, **options: Any) -> AbstractAsyncContextManager[Subject]:
        """Start a process that confirms orders, up to its command `run`."""
        return self._subject("orders", settings=self.settings(database), **options)

    def relay_process(self, database: str) -> AbstractAsyncContextManager[int]:
        """Run `order-service run relay` as people do; yields the pid."""
        [port] = free_ports(1)
        return order_service("relay", port, self.settings(database), self.logs / "order-service.log")

    @asynccontextmanager
    async def _subject(self, name: str, **options: Any) -> AsyncIterator[Subject]:
        async with subject(name, self.logs / f"{name}.log", **options) as running:
            self.loops.add(running.loop)
            yield running

    def log_bytes(self) -> int:
        """Return how many bytes the topic's log segments hold: what went over the wire and was stored."""
        folders = (self.stack.kafka.directory / "data").glob(f"{TOPIC}-*")
        return sum(
            segment.stat().st_size
            for folder in folders
            if not folder.name.endswith("-delete")
            for segment in folder.glob("*.log")
        )


@asynccontextmanager
async def running_lab(directory: Path) -> AsyncIterator[Lab]:
    """Start a stack below `directory`, and remove it with all its data afterwards."""
    await prepare()
    run, logs = directory / "run", directory / "logs"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    stack = Stack(run, postgres_settings=_POSTGRES, kafka_settings=_KAFKA)
    stack.hold()
    stack.remove()  # what an interrupted run left
    await stack.stop()
    try:
        async with stack:
            yield Lab(stack, logs)
    finally:
        stack.remove()
        shutil.rmtree(run, ignore_errors=True)
