"""What runs until Ctrl-C: the whole system (`up`), or only its PostgreSQL and Kafka (`stack`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import TypeVar

from chargeonce.stack import LinePrinter, Stack
from chargeonce.system import PROCESSES, System

T = TypeVar("T")

CREATE_ORDER = (
    "curl -si {orders}/orders -H 'Content-Type: application/json' -d "
    '\'{{"customer_id": 7, "currency": "EUR", "items": [{{"sku": "BOOK-1", "quantity": 2, "unit_price": "19.99"}}]}}\''
)


class Interrupted(Exception):
    """Ctrl-C, SIGTERM or a closed terminal; everything that was started has been stopped."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.exit_status = 128 + number


def run_until_signalled(main: Coroutine[object, object, T]) -> T:
    """Run a coroutine; SIGINT, SIGTERM and SIGHUP cancel it, so that it can stop what it started.

    A second signal ends this process at once, and the kernel ends its children. Raises Interrupted.
    """
    return asyncio.run(_until_signalled(main))


async def _until_signalled(main: Coroutine[object, object, T]) -> T:
    loop = asyncio.get_running_loop()
    task = loop.create_task(main)
    received: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        received.append(number)
        if len(received) > 1:
            os._exit(128 + number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        raise Interrupted(received[0] if received else signal.SIGINT) from None


async def up(directory: Path, port_base: int) -> None:
    """Run everything with merged logs, starting again what dies, until it is cancelled. Data stays in `directory`.

    Raises StackError.
    """
    lines = LinePrinter(sys.stdout, width=max(map(len, PROCESSES)))
    system = System(
        directory,
        port_base=port_base,
        restart=True,
        environment=_readable_logs() if sys.stdout.isatty() else {},
        log=lines,
        on_exit=lambda name, status: lines("chargeonce", _ending(name, status)) if name in PROCESSES else None,
    )
    lines("chargeonce", f"starting PostgreSQL, Kafka and {len(PROCESSES)} processes; data in {directory}")
    try:
        async with system:
            for line in _welcome(system):
                lines("chargeonce", line)
            await system.keep_servers()
    except asyncio.CancelledError:
        lines("chargeonce", "everything is stopped; no process is left")
        raise


def _ending(name: str, status: int) -> str:
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"{name} was ended by {signal.Signals(-status).name}"
    return f"{name} ended with status {status}"


def _readable_logs() -> Mapping[str, Mapping[str, str]]:
    """Text instead of JSON lines for a person at a terminal."""
    text = {"ORDER_SERVICE_LOG_JSON": "false", "BILLING_SERVICE_LOG_JSON": "false"}
    return {} if "NO_COLOR" in os.environ else dict.fromkeys(PROCESSES, text)


def _welcome(system: System) -> list[str]:
    orders, billing, provider = system.orders_url, system.billing_url, system.provider_url
    addresses = f"--orders-url {orders} --billing-url {billing} --provider-url {provider}"
    others = ", ".join(
        f"{name} {system.url(name).rpartition(':')[2]}" for name in PROCESSES[2:] if name != "billing-api"
    )
    return [
        "",
        "ready",
        f"  orders      {orders}    (routes: {orders}/docs)",
        f"  billing     {billing}    (routes: {billing}/docs)",
        f"  provider    {provider}    (routes: {provider}/docs)",
        f"  health      {others}    (/readyz and /metrics)",
        f"  PostgreSQL  {system.database_dsn('order_service')}, …/billing_service",
        f"  Kafka       {system.stack.kafka.bootstrap_servers}",
        "create an order, then look at it and at its charge:",
        f"  {CREATE_ORDER.format(orders=orders)}",
        f"  curl -s {orders}/orders/1",
        f"  curl -s '{billing}/charges?order_id=1'",
        "prove that each order was charged once:",
        f"  .venv/bin/chargeonce audit {addresses}",
        "kill what you like (it comes back); Ctrl-C stops everything",
        "",
    ]


async def run_stack(directory: Path, postgres_port: int | None, kafka_port: int | None) -> None:
    """Run PostgreSQL and Kafka alone until it is cancelled, and tell their addresses. Raises StackError."""
    lines = LinePrinter(sys.stdout)
    stack = Stack(
        directory,
        postgres_port=postgres_port,
        kafka_port=kafka_port,
        postgres_port_setting="--postgres-port",
        kafka_port_setting="--kafka-port",
    )
    try:
        async with stack:
            lines("stack", f"PostgreSQL  {stack.postgres.dsn()}")
            lines("stack", f"Kafka       {stack.kafka.bootstrap_servers}")
            lines("stack", f"data in {directory}; Ctrl-C stops both")
            await asyncio.Event().wait()
    except asyncio.CancelledError:
        lines("stack", "everything is stopped; no process is left")
        raise
