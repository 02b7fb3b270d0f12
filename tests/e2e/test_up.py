"""`chargeonce up`: one command, a working system in the foreground, and nothing left after Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import psutil
import pytest

from chargeonce.foreground import CREATE_ORDER
from chargeonce.stack.processes import port_is_free
from chargeonce.system import PROCESSES, System
from chargeonce.topology import database_dsn

READY_DEADLINE_SECONDS = 120
COMMAND = (sys.executable, "-m", "chargeonce")
# Every port that `up` takes: APIs, health of the other processes, PostgreSQL and Kafka.
OFFSETS = (0, 1, 2, 10, 11, 12, 13, 14, 20, 21)


class Up:
    """The command in a process of its own, and what it printed."""

    def __init__(self, directory: Path, port_base: int) -> None:
        self.directory = directory
        self.port_base = port_base
        self.lines: list[str] = []
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *COMMAND,
            *("up", "--port-base", str(self.port_base), "--directory", str(self.directory)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            process_group=0,
        )
        self._reader = asyncio.create_task(self._read(self._process))

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            self.lines.append(line.decode().rstrip())

    async def says(self, text: str, deadline_seconds: float = READY_DEADLINE_SECONDS) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_seconds):
                while not any(text in line for line in self.lines):
                    await asyncio.sleep(0.05)
        assert any(text in line for line in self.lines), "\n".join(self.lines[-40:])

    def children(self) -> list[psutil.Process]:
        assert self._process is not None
        return psutil.Process(self._process.pid).children(recursive=True)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def end(self, number: signal.Signals) -> int:
        assert self._process is not None
        assert self._reader is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)
        status = await asyncio.wait_for(self._process.wait(), 60)
        await self._reader
        return status

    def url(self, offset: int) -> str:
        return f"http://127.0.0.1:{self.port_base + offset}"


def free_port_base() -> int:
    for base in range(21000, 30000, 50):
        if all(port_is_free(base + offset) for offset in OFFSETS):
            return base
    raise AssertionError("no free ports")


@pytest.fixture
async def up() -> AsyncIterator[Up]:
    directory = Path(tempfile.mkdtemp(prefix="chargeonce-up-"))
    directory.chmod(0o711)
    up = Up(directory / "up", free_port_base())
    await up.start()
    yield up
    await up.end(signal.SIGKILL)
    await System(up.directory).remove()
    directory.rmdir()


async def run(*arguments: str, deadline_seconds: float = 60) -> tuple[int, str, str]:
    """Run a command of chargeonce to its end; return status, output, errors."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await asyncio.wait_for(process.communicate(), deadline_seconds)
    return process.returncode or 0, output.decode(), errors.decode()


async def until_charged(client: aiohttp.ClientSession, up: Up, order_id: int) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while True:
        async with client.get(f"{up.url(0)}/orders/{order_id}") as response:
            order: dict[str, Any] = await response.json()
        if order["payment_status"] != "pending" or time.monotonic() > deadline:
            assert order["payment_status"] == "charged"
            return order
        await asyncio.sleep(0.05)


async def test_up_charges_an_order_survives_kills_and_leaves_nothing_after_ctrl_c(up: Up) -> None:
    await up.says("| ready")
    addresses = ("--orders-url", up.url(0), "--billing-url", up.url(1), "--provider-url", up.url(2))

    # The line that it prints is the line that works.
    printed = next(line for line in up.lines if "curl -si" in line).split("|", 1)[1].strip()
    assert printed == CREATE_ORDER.format(orders=up.url(0))
    curl = await asyncio.create_subprocess_shell(printed, stdout=asyncio.subprocess.PIPE)
    answer = (await curl.communicate())[0].decode()
    assert answer.startswith("HTTP/1.1 201")
    order_id = json.loads(answer.splitlines()[-1])["order_id"]

    async with aiohttp.ClientSession() as client:
        order = await until_charged(client, up, order_id)
        assert order["events"][0]["published"]
        async with client.get(f"{up.url(1)}/charges", params={"order_id": order_id}) as response:
            (charge,) = (await response.json())["charges"]
        assert (charge["state"], charge["amount"]) == ("captured", "39.98")

        status, output, errors = await run("audit", *addresses, "--json")
        assert (status, json.loads(output)["charges_captured"]) == (0, 1), errors

        await what_is_killed_comes_back(up)
        async with client.post(f"{up.url(0)}/orders", json=json.loads(printed.split("-d ")[1].strip("'"))) as response:
            assert response.status == 201

            second = await until_charged(client, up, (await response.json())["order_id"])

        await money_that_moved_twice_is_found(client, up, order, addresses)
        await what_billing_lost_or_got_wrong_is_found(up, second["order_id"], addresses)

    await a_second_run_is_told_who_has_the_directory_and_the_port(up)

    children = up.children()
    assert len(children) > len(PROCESSES)
    assert await up.end(signal.SIGINT) == 0
    assert "no process is left" in up.lines[-1]
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert all(port_is_free(up.port_base + offset) for offset in OFFSETS)

    status, _, errors = await run("audit", *addresses)
    assert status == 2
    assert "the order service" in errors
    assert "--orders-url" in errors


async def what_is_killed_comes_back(up: Up) -> None:
    victim = next(child for child in up.children() if "'billing-consumer'" in " ".join(child.cmdline()))
    victim.kill()
    await up.says("billing-consumer was ended by SIGKILL", 10)
    broker = next(child for child in up.children() if "kafka.Kafka" in child.cmdline())
    broker.kill()
    await up.says("kafka            | ended unexpectedly; starting it again", 10)


async def money_that_moved_twice_is_found(
    client: aiohttp.ClientSession, up: Up, order: dict[str, Any], addresses: tuple[str, ...]
) -> None:
    payment = {"order_id": order["order_id"], "amount": order["total_amount"], "currency": order["currency"]}
    headers = {"Idempotency-Key": "another-key-for-the-same-order"}
    async with client.post(f"{up.url(2)}/payments/charge", json=payment, headers=headers) as response:
        assert response.status == 201
    status, output, _ = await run("audit", *addresses)
    assert status == 1
    assert "double charges: more than one payment" in " ".join(output.split())
    assert f"orders {order['order_id']}" in output


async def what_billing_lost_or_got_wrong_is_found(up: Up, order_id: int, addresses: tuple[str, ...]) -> None:
    """By the audit, and by billing's own reconciliation with the provider."""
    reconcile = (sys.executable, "-c", "from billing_service.cli import main; main()", "reconcile", "--json")
    dsn = database_dsn("billing_service", up.port_base + 20)
    environment = {
        **os.environ,
        "BILLING_SERVICE_DATABASE_URL": dsn,
        "BILLING_SERVICE_PAYMENT_PROVIDER_URL": up.url(2),
    }
    billing = await asyncpg.connect(dsn)
    try:
        for damage, audit_says, reconcile_says in (
            ("UPDATE charge SET amount = amount + 1 WHERE order_id = $1", "amount differences", "amount_differs"),
            ("DELETE FROM charge WHERE order_id = $1", "payments without charge", "payment_without_charge"),
        ):
            await billing.execute(damage, order_id)
            status, output, _ = await run("audit", *addresses)
            assert status == 1
            assert audit_says in " ".join(output.split())
            process = await asyncio.create_subprocess_exec(*reconcile, env=environment, stdout=asyncio.subprocess.PIPE)
            told = json.loads((await process.communicate())[0])
            assert process.returncode == 1
            assert {"order_id": order_id, "kind": reconcile_says}.items() <= told["findings"][-1].items()
    finally:
        await billing.close()


async def a_second_run_is_told_who_has_the_directory_and_the_port(up: Up) -> None:
    status, _, errors = await run("up", "--port-base", str(up.port_base), "--directory", str(up.directory))
    assert status == 2
    assert f"in use by the process with pid {up.pid}" in errors
    other = up.directory.with_name("other")
    status, _, errors = await run("up", "--port-base", str(up.port_base), "--directory", str(other))
    assert status == 2
    assert "--port-base" in errors
    assert "is taken" in errors
    await System(other).remove()
