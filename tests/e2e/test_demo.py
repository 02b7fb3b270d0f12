"""`chargeonce demo` proves what it says, fails when the money is wrong, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import psutil
import pytest
from rich.console import Console

from chargeonce.demo import Demo
from chargeonce.demo.phases import PHASES
from chargeonce.system import System

COMMAND = (sys.executable, "-m", "chargeonce", "demo")


@pytest.fixture
async def directory() -> AsyncIterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="chargeonce-demo-"))
    directory.chmod(0o711)
    yield directory
    await System(directory / "run").remove()
    for name in ("report.json", "report.html"):
        (directory / name).unlink(missing_ok=True)
    directory.rmdir()


async def test_the_demo_breaks_everything_and_proves_that_each_order_was_charged_once(directory: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "--orders", "1000", "--directory", str(directory), stdout=asyncio.subprocess.PIPE, stderr=-2
    )
    output = (await asyncio.wait_for(process.communicate(), 300))[0].decode()
    assert process.returncode == 0, output
    report = json.loads((directory / "report.json").read_text())
    assert report["orders_confirmed"] == report["charges_captured"] == report["payments_captured"] == 1000
    assert report["duplicates_absorbed"] >= report["copies_sent"] > 0
    assert report["dead_letters"] == report["poison_sent"] > 0
    assert (report["double_charges"], report["missing_charges"]) == (0, 0)
    assert report["provider_total"] == report["orders_total"]
    assert len(report["orders_total"]) > 1
    assert {kill["process"] for kill in report["kill_details"]} == {
        "billing-consumer",
        "billing-executor",
        "order-relay",
    }
    assert report["kills"] == 3
    assert all(kill["in_flight"] > 0 for kill in report["kill_details"])
    assert report["broker_restarts"] == 1
    assert report["outages"][0]["orders_accepted"] > 0
    assert report["answers_lost"] > 0
    assert report["answers_repeated"] >= report["answers_lost"]
    assert "All 1000 orders were charged exactly once." in output
    assert "\x1b" not in output
    assert "<svg" in (directory / "report.html").read_text()
    assert not (directory / "run").exists()


async def test_a_payment_too_many_fails_the_demo_names_the_order_and_keeps_the_data(directory: Path) -> None:
    async def plant(system: System) -> None:
        payment = {"order_id": 3, "amount": "1.00", "currency": "EUR"}
        url = f"{system.provider_url}/payments/charge"
        async with (
            aiohttp.ClientSession() as client,
            client.post(url, json=payment, headers={"Idempotency-Key": "planted"}) as response,
        ):
            assert response.status == 201

    chosen = [phase for phase in PHASES if phase.title in ("Create orders", "Let everything settle", "Audit")]
    printed = io.StringIO()
    demo = Demo(directory, 50, console=Console(file=printed, width=120), phases=chosen, before_audit=plant)
    story = await demo.run()
    assert not story.passed
    report = json.loads((directory / "report.json").read_text())
    assert report["double_charges"] == 1
    assert report["audit"]["findings"]["double_charges"] == {"order_ids": [3]}
    assert "double charges: more than one payment" in printed.getvalue()
    assert (directory / "run" / "logs" / "order-api.log").exists()


async def test_an_interrupted_demo_leaves_no_process_and_says_so(directory: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "--directory", str(directory), stdout=asyncio.subprocess.PIPE, stderr=-2, process_group=0
    )
    assert process.stdout is not None
    lines = ""
    async with asyncio.timeout(120):
        while "PostgreSQL and Kafka run" not in lines:
            lines += (await process.stdout.readline()).decode()
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.send_signal(signal.SIGINT)
    lines += (await asyncio.wait_for(process.communicate(), 60))[0].decode()
    assert process.returncode == 128 + signal.SIGINT
    assert "no process is left" in lines
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
