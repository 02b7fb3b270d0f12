"""Wake-up calls between processes over PostgreSQL's NOTIFY: hints that save a poll, never something to rely on.

NOTIFY inside a business transaction takes a lock of the whole database and halves its commit rate, so a writer signals
after its commit, on a connection of its own, several commits at once (field report F9). The listener has a connection
of its own too. A dead peer makes it deaf, so it is pinged; a transaction-pooling proxy does, so it begins with a call
to itself that another connection makes (F10).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

import asyncpg
import structlog
from prometheus_client import Gauge

from shared.lifecycle import READY, BackgroundService, Readiness, State, describe

log = structlog.get_logger(__name__)

CONNECTED = Gauge("listener_connected", "Whether this process hears of new work (1) or polls for it (0).", ["channel"])

_CONNECT_DEADLINE_SECONDS = 5.0
_CALL_DEADLINE_SECONDS = 5.0
_BUSY_PAUSES = 2  # the longest pause between two calls, in usual ones
_NOT_LISTENING = Readiness(State.DEGRADED, "not listening; polling instead, so work is found a little later")
_DEAF = Readiness(
    State.DEGRADED,
    "LISTEN hears nothing at this address, which probably leads through a transaction-pooling proxy; polling instead, "
    "so work is found a little later and none is lost. Set ..._LISTEN_DATABASE_URL to the database's direct address",
)


class Notifier(BackgroundService):
    """Sends one NOTIFY for all the signals of a few milliseconds, and of some more while they come thick and fast.

    A listener that finds work looks for more by itself, so under a steady load most calls would only cost it time.
    A call says where there is work when all of its signals did: `text_of` makes its text of what they said.
    """

    name = "notifier"
    stop_deadline_seconds = 8.0

    def __init__(
        self,
        dsn: str,
        channel: str,
        coalesce_seconds: float = 0.003,
        text_of: Callable[[Collection[int]], str] = lambda _: "",
    ) -> None:
        super().__init__()
        self._dsn = dsn
        self._channel = channel
        self._coalesce_seconds = coalesce_seconds
        self._pending = asyncio.Event()
        self._text_of = text_of
        self._signals = 0
        self._somewhere = False
        self._where: set[int] = set()

    def signal(self, where: Collection[int] = ()) -> None:
        """Ask for a NOTIFY soon. Returns at once; what cannot be sent is dropped, for listeners poll as well."""
        self._where.update(where)
        self._somewhere |= not where
        self._signals += 1
        self._pending.set()

    def _take_text(self) -> str:
        where, somewhere = self._where, self._somewhere
        self._signals, self._where, self._somewhere = 0, set(), False
        return "" if somewhere else self._text_of(where)

    def wake(self) -> None:
        self._pending.set()

    async def run(self) -> None:
        connection = await _connect(self._dsn, "notifier")
        try:
            self.readiness = READY
            self.backoff.reset()
            pause = self._coalesce_seconds
            while not self.stopping.is_set():
                await self._pending.wait()
                self._pending.clear()
                busy = self._signals > 1
                async with asyncio.timeout(_CALL_DEADLINE_SECONDS):
                    await connection.execute("SELECT pg_notify($1, $2)", self._channel, self._take_text())
                pause = min(2 * pause, _BUSY_PAUSES * self._coalesce_seconds) if busy else self._coalesce_seconds
                await self.pause(pause)
        finally:
            await _close(connection)


class Listener(BackgroundService):
    """Calls back with the text when a channel is notified, and with none when it (re)connects: what was missed is swept
    up.

    `connected` and the gauge tell whether it hears. While it cannot, it tries again every `retry_seconds`.
    """

    name = "listener"
    stop_deadline_seconds = 8.0

    def __init__(
        self,
        dsn: str,
        callbacks: Mapping[str, Callable[[str], None]],
        ping_seconds: float = 5.0,
        call_deadline_seconds: float = _CALL_DEADLINE_SECONDS,
        retry_seconds: float = 60.0,
    ) -> None:
        super().__init__()
        self._dsn = dsn
        self._callbacks = callbacks
        self._ping_seconds = ping_seconds
        self._call_deadline_seconds = call_deadline_seconds
        self._retry_seconds = retry_seconds
        self._hears(connected=False)

    def _hears(self, *, connected: bool) -> None:
        self.connected = connected
        for channel in self._callbacks:
            CONNECTED.labels(channel).set(connected)

    async def run(self) -> None:
        connection = await _connect(self._dsn, "listener")
        try:
            async with asyncio.timeout(self._call_deadline_seconds):
                for channel, callback in self._callbacks.items():
                    await connection.add_listener(channel, lambda *said, callback=callback: callback(said[-1]))
            for callback in self._callbacks.values():
                callback("")
            if not await self._reached_by_a_call(connection):
                self.readiness = _DEAF
                log.warning("listener.deaf", reason=_DEAF.reason)
                await self.pause(self._retry_seconds)
                return
            self._hears(connected=True)
            self.readiness = READY
            self.backoff.reset()
            while not self.stopping.is_set():
                await self.pause(self._ping_seconds)
                async with asyncio.timeout(self._call_deadline_seconds):
                    await connection.execute("SELECT 1")
        finally:
            if self.connected:
                self._hears(connected=False)
                self.readiness = _NOT_LISTENING
            await _close(connection)

    async def _reached_by_a_call(self, connection: asyncpg.Connection) -> bool:
        """Tell whether a notification from another connection arrives within the deadline.

        One from this connection would prove nothing: behind a transaction-pooling proxy it may come back by chance, in
        the reply to its own transaction, while what others send goes to nobody.
        """
        heard = asyncio.Event()
        channel = f"chargeonce_{secrets.token_hex(8)}"

        def hear(*_: object) -> None:
            heard.set()

        async with asyncio.timeout(self._call_deadline_seconds):
            await connection.add_listener(channel, hear)
        caller = await _connect(self._dsn, "listener's check")
        try:
            async with asyncio.timeout(self._call_deadline_seconds):
                await caller.execute("SELECT pg_notify($1, '')", channel)
        finally:
            await _close(caller)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._call_deadline_seconds):
                await heard.wait()
                await connection.remove_listener(channel, hear)
        return heard.is_set()


async def _connect(dsn: str, purpose: str) -> asyncpg.Connection:
    return await asyncpg.connect(
        dsn, timeout=_CONNECT_DEADLINE_SECONDS, server_settings={"application_name": f"chargeonce {purpose}"}
    )


async def _close(connection: asyncpg.Connection) -> None:
    try:
        await connection.close(timeout=2.0)
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        log.debug("wakeup.close_failed", error=describe(error))
