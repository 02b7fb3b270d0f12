"""Wake-up calls are hints: one NOTIFY for many commits, and a listener that gets its hearing back (F9, F10)."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import asyncpg
from prometheus_client import REGISTRY

from shared.lifecycle import State, running
from shared.wakeup import Listener, Notifier
from tests.support.outbox import until


def plain(url: str) -> str:
    return url.replace("postgresql+asyncpg://", "postgresql://")


def gauge(channel: str) -> float | None:
    return REGISTRY.get_sample_value("listener_connected", {"channel": channel})


class Line:
    """A TCP proxy whose connections can go dead without closing: nothing passes any more, and nobody is told."""

    def __init__(self, host: str, port: int) -> None:
        self._peer = (host, port)
        self._passing: set[asyncio.Event] = set()

    def go_dead(self) -> None:
        """Swallow what the present connections send from now on; new ones work."""
        for passing in self._passing:
            passing.clear()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        passing = asyncio.Event()
        passing.set()
        self._passing.add(passing)
        far_reader, far_writer = await asyncio.open_connection(*self._peer)
        try:
            await asyncio.gather(self._pass(passing, reader, far_writer), self._pass(passing, far_reader, writer))
        except ConnectionError:
            pass
        finally:
            far_writer.close()
            writer.close()

    async def _pass(self, passing: asyncio.Event, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while content := await reader.read(65536):
            if passing.is_set():
                writer.write(content)
        writer.close()


@asynccontextmanager
async def asyncpg_connection(url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(plain(url))
    try:
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def line_to(url: str) -> AsyncIterator[tuple[Line, str]]:
    """Yield a line to the database's server, and the database's address through it."""
    parts = urlsplit(plain(url))
    line = Line(parts.hostname or "", parts.port or 0)
    server = await asyncio.start_server(line.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    yield line, parts._replace(netloc=f"{parts.username}@127.0.0.1:{port}").geturl()
    server.close()


async def test_f9_many_signals_at_once_are_few_notifications(database_url: str) -> None:
    heard: list[None] = []
    notifier = Notifier(plain(database_url), "channel", coalesce_seconds=0.05)
    listener = Listener(plain(database_url), {"channel": lambda _: heard.append(None)})
    async with running([notifier, listener]):
        await until(lambda: listener.connected and notifier.ready().state is State.READY)
        swept = len(heard)
        for _ in range(500):
            notifier.signal()
            await asyncio.sleep(0)
        await until(lambda: len(heard) > swept)
        await asyncio.sleep(0.15)  # three coalescing intervals: what is still to come has come
        assert len(heard) - swept <= 5


async def test_f9_calls_get_rarer_under_a_steady_load_and_the_last_signal_is_still_heard(database_url: str) -> None:
    heard: list[float] = []
    clock = asyncio.get_running_loop().time
    notifier = Notifier(plain(database_url), "channel", coalesce_seconds=0.02)
    listener = Listener(plain(database_url), {"channel": lambda _: heard.append(clock())})
    async with running([notifier, listener]):
        await until(lambda: listener.connected and notifier.ready().state is State.READY)
        swept, began = len(heard), clock()
        while clock() < began + 1.6:
            notifier.signal()
            await asyncio.sleep(0.001)
        last = clock()
        notifier.signal()
        await until(lambda: heard[-1] >= last)
        assert len(heard) - swept <= 1.6 / 0.04 + 4, "half as many as at the usual pause"
        # After a rest the first signal is passed on at once again.
        quiet = len(heard)
        notifier.signal()
        await until(lambda: len(heard) > quiet)


async def test_a_call_says_where_when_all_of_its_signals_did(database_url: str) -> None:
    heard: list[str] = []
    notifier = Notifier(plain(database_url), "where", 0.01, lambda where: ",".join(map(str, sorted(where))))
    listener = Listener(plain(database_url), {"where": heard.append})
    async with running([notifier, listener]):
        await until(lambda: listener.connected and notifier.ready().state is State.READY)
        assert heard == [""], "who just connected may have missed anything"
        for signals, text in (([(3,), (7, 3)], "3,7"), ([(3,), ()], ""), ([(95,)], "95")):
            heard.clear()
            for where in signals:
                notifier.signal(where)
            await until(lambda: heard)
            assert heard == [text]


async def test_f10_a_listener_whose_connection_is_cut_sweeps_and_hears_again(database_url: str) -> None:
    heard: list[None] = []
    notifier = Notifier(plain(database_url), "channel")
    listener = Listener(plain(database_url), {"channel": lambda _: heard.append(None)}, ping_seconds=0.1)
    async with running([notifier, listener]):
        await until(lambda: listener.connected)
        assert gauge("channel") == 1
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


async def test_f10_a_listener_whose_peer_died_silently_finds_out_by_its_ping_and_sweeps(database_url: str) -> None:
    heard: list[None] = []
    states: list[float | None] = []
    async with line_to(database_url) as (line, url):
        listener = Listener(url, {"silent": lambda _: heard.append(None)}, ping_seconds=0.1, call_deadline_seconds=0.5)
        async with running([listener]):
            await until(lambda: listener.connected)
            line.go_dead()
            before = len(heard)
            async with asyncpg_connection(database_url) as other:
                await other.execute("SELECT pg_notify('silent', '')")
            await until(lambda: not listener.connected, deadline_seconds=5, what="the ping's deadline")
            states.append(gauge("silent"))
            await until(lambda: listener.connected and len(heard) > before, what="a sweep on a new connection")
            states.append(gauge("silent"))
    assert states == [0, 1]
    assert gauge("silent") == 0, "a listener that was stopped does not hear"


def test_f10_a_process_that_listens_to_nothing_says_nothing_of_listening() -> None:
    program = (
        "from prometheus_client import generate_latest; from order_service.bootstrap import build; "
        "from order_service.settings import OrderServiceSettings; build(OrderServiceSettings(), {roles}); "
        "print('listener_connected{{channel=' in generate_latest().decode())"
    )

    def tells(roles: str) -> str:
        command = [sys.executable, "-c", program.format(roles=roles)]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()

    assert tells("['api']") == "False"
    assert tells("['relay']") == "True"


async def test_f10_nothing_is_raised_while_the_database_is_away() -> None:
    notifier = Notifier("postgresql://127.0.0.1:1/x", "channel")
    listener = Listener("postgresql://127.0.0.1:1/x", {"channel": lambda _: None})
    async with running([notifier, listener]):
        notifier.signal()
        await until(lambda: listener.ready().state is State.DEGRADED)
        assert not listener.connected
        assert gauge("channel") == 0
