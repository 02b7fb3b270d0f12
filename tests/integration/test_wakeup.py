"""Wake-up calls are hints: one NOTIFY for many commits, and a listener that gets its hearing back (F9, F10)."""

from __future__ import annotations

import asyncio

import asyncpg
from prometheus_client import REGISTRY

from shared.lifecycle import State, running
from shared.wakeup import Listener, Notifier
from tests.support.outbox import until


def plain(url: str) -> str:
    return url.replace("postgresql+asyncpg://", "postgresql://")


async def test_f9_many_signals_at_once_are_few_notifications(database_url: str) -> None:
    heard: list[None] = []
    notifier = Notifier(plain(database_url), "channel", coalesce_seconds=0.05)
    listener = Listener(plain(database_url), {"channel": lambda: heard.append(None)})
    async with running([notifier, listener]):
        await until(lambda: listener.connected and notifier.ready().state is State.READY)
        swept = len(heard)
        for _ in range(500):
            notifier.signal()
            await asyncio.sleep(0)
        await until(lambda: len(heard) > swept)
        await asyncio.sleep(0.15)  # three coalescing intervals: what is still to come has come
        assert len(heard) - swept <= 5


async def test_f10_a_listener_whose_connection_is_cut_sweeps_and_hears_again(database_url: str) -> None:
    heard: list[None] = []
    notifier = Notifier(plain(database_url), "channel")
    listener = Listener(plain(database_url), {"channel": lambda: heard.append(None)}, ping_seconds=0.1)
    async with running([notifier, listener]):
        await until(lambda: listener.connected)
        assert REGISTRY.get_sample_value("listener_connected", {"channel": "channel"}) == 1
        before = len(heard)
        admin = await asyncpg.connect(plain(database_url))
        await admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name LIKE 'chargeonce %'"
        )
        await admin.close()
        await until(lambda: listener.connected and len(heard) > before, what="a sweep after the new connection")
        swept = len(heard)

        async def hear() -> None:
            while len(heard) == swept:
                notifier.signal()
                await asyncio.sleep(0.02)

        async with asyncio.timeout(15):
            await hear()


async def test_f10_nothing_is_raised_while_the_database_is_away() -> None:
    notifier = Notifier("postgresql://127.0.0.1:1/x", "channel")
    listener = Listener("postgresql://127.0.0.1:1/x", {"channel": lambda: None})
    async with running([notifier, listener]):
        notifier.signal()
        await until(lambda: listener.ready().state is State.DEGRADED)
        assert not listener.connected
        assert REGISTRY.get_sample_value("listener_connected", {"channel": "channel"}) == 0
