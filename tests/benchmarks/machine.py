"""What a reader must know to judge the figures."""

from __future__ import annotations

import os
import platform
import resource
import time
import tomllib
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

import chargeonce.stack
from tests.benchmarks.lab import Lab


async def machine(lab: Lab) -> dict[str, Any]:
    """Return the machine, and the versions of what runs on it."""
    async with lab.databases.connected("postgres") as connection:
        postgres = await connection.fetchval("SHOW server_version")
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_mb": psutil.virtual_memory().total // 2**20,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "postgres": postgres,
        "kafka": _kafka_version(),
        **{name: version(name) for name in ("aiokafka", "asyncpg", "sqlalchemy")},
    }


class OtherPrograms:
    """How much of the machine went to what is not part of the benchmark, from now on."""

    def __init__(self, lab: Lab) -> None:
        self._servers = [pid for pid in (lab.stack.postgres.pid, lab.stack.kafka.pid) if pid]
        self._at, self._busy, self._ours = time.monotonic(), _busy_seconds(), self._own_seconds()

    def percent(self) -> float:
        """Return their share of all cores so far. What the kernel does in the background is theirs too."""
        theirs = (_busy_seconds() - self._busy) - (self._own_seconds() - self._ours)
        return max(0.0, 100 * theirs / (time.monotonic() - self._at) / (psutil.cpu_count() or 1))

    def _own_seconds(self) -> float:
        """CPU of this process, of the subjects that have ended, and of the servers with all their children."""
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        seconds = sum(usage.ru_utime + usage.ru_stime for usage in used)
        for pid in self._servers:
            server = psutil.Process(pid)
            for process in (server, *server.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    seconds += sum(process.cpu_times()[:4])  # user, system, and those of children that have ended
        return seconds


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _kafka_version() -> str:
    lock = tomllib.loads((Path(chargeonce.stack.__file__).parent / "kafka.lock.toml").read_text())
    for entry in lock["dependencies"]:
        if entry["artifactId"] == "kafka-server":
            return str(entry["version"])
    return "unknown"
