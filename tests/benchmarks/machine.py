"""What a reader must know to judge the figures."""

from __future__ import annotations

import asyncio
import os
import platform
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

import chargeonce.stack
from tests.benchmarks.lab import Lab

_LOOK_SECONDS = 3.0


async def machine(lab: Lab) -> dict[str, Any]:
    """Return the machine, the versions of what runs on it, and how busy it is while our own servers are idle."""
    psutil.cpu_percent()
    await asyncio.sleep(_LOOK_SECONDS)
    busy = psutil.cpu_percent()
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
        "busy_before_percent": busy,
    }


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
