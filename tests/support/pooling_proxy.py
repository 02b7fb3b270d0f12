"""A transaction-pooling proxy on PostgreSQL's wire protocol: what PgBouncer does from version 1.21 on.

A server connection is lent at a client's first message and taken back as soon as the server is ready outside of a
transaction; the next one lent is another one, so nothing of a session lasts. Prepared statements do: they are known by
client and prepared again where they are missing (PgBouncer's `max_prepared_statements`). Startup parameters other than
the tracked ones are refused, or dropped where they are in `ignored` (its `ignore_startup_parameters`). Notifications
reach whoever has the server connection at that moment, or nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import struct
from collections import deque
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from sqlalchemy.engine import make_url

_SSL_REQUEST, _GSS_REQUEST, _CANCEL_REQUEST = 80877103, 80877104, 80877102
_TRACKED = ("application_name", "client_encoding", "datestyle", "timezone", "standard_conforming_strings")
_NO_STATEMENT = b"Snone\0"


@dataclass(eq=False)
class _Server:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    key: tuple[int, int] = (0, 0)
    reported: list[bytes] = field(default_factory=list)
    session: dict[str, str] = field(default_factory=dict)
    known: set[bytes] = field(default_factory=set)
    parses: deque[tuple[bytes, bool]] = field(default_factory=deque)
    """Statements whose ParseComplete is to come, and whether their client waits for it."""
    closes: deque[bool] = field(default_factory=deque)
    """CloseCompletes to come, and whether they stand for a Parse that was not needed."""
    unanswered: int = 0
    client: _Client | None = None
    prepared: asyncio.Future[None] | None = None
    pump: asyncio.Task[None] | None = None


@dataclass(eq=False)
class _Client:
    writer: asyncio.StreamWriter
    pool: asyncio.Queue[_Server | None]
    login: dict[str, str]
    key: int = 0
    statements: dict[bytes, tuple[bytes, bytes]] = field(default_factory=dict)
    server: _Server | None = None
    last_server: _Server | None = None


class PoolingProxy:
    """Listens on a port of its own while it is open.

    `moves` counts how often a client's next transaction has another server connection than its last one, and
    `prepared_again` the statements that were missing there.
    """

    def __init__(self, target: str, size: int, ignored: Collection[str]) -> None:
        self._target = make_url(target)
        self._size = size
        self._ignored = frozenset(ignored)
        self._pools: dict[tuple[str, str], asyncio.Queue[_Server | None]] = {}
        self._servers: set[_Server] = set()
        self._clients: dict[int, _Client] = {}
        self._handlers: set[asyncio.Task[None]] = set()
        self._statements: dict[bytes, bytes] = {}
        self._keys = itertools.count(1)
        self._listener: asyncio.Server | None = None
        self.moves = 0
        self.prepared_again = 0

    @property
    def url(self) -> str:
        """The target's address, through the proxy."""
        assert self._listener is not None
        port = self._listener.sockets[0].getsockname()[1]
        return self._target.set(host="127.0.0.1", port=port).render_as_string(hide_password=False)

    async def open(self) -> None:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def close(self) -> None:
        assert self._listener is not None
        self._listener.close()
        for handler in list(self._handlers):
            handler.cancel()
        await asyncio.gather(*self._handlers, return_exceptions=True)
        servers = list(self._servers)
        for server in servers:
            self._end(server)
        await asyncio.gather(*(server.pump for server in servers if server.pump), return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        client: _Client | None = None
        try:
            client = await self._log_in(reader, writer)
            while client is not None:
                kind, body = await _read(reader)
                if kind == b"X":
                    break
                server = client.server or await self._lend(client)
                self._forward(client, server, kind, body)
                await server.writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._handlers.discard(task)
            if client is not None:
                self._clients.pop(client.key, None)
                if client.server is not None:  # in mid-transaction: the server rolls back
                    self._end(client.server)
            writer.close()

    async def _log_in(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> _Client | None:
        while True:
            [length] = struct.unpack("!I", await reader.readexactly(4))
            body = await reader.readexactly(length - 4)
            [code] = struct.unpack_from("!I", body)
            if code in (_SSL_REQUEST, _GSS_REQUEST):
                writer.write(b"N")
            elif code == _CANCEL_REQUEST:
                await self._cancel(*struct.unpack_from("!II", body, 4))
                return None
            else:
                break
        texts = [part.decode() for part in body[4:].split(b"\0")]
        asked = dict(zip(texts[0::2], texts[1::2], strict=False))
        asked.pop("", None)
        user, database = asked.pop("user"), asked.pop("database")
        for name in asked:
            if name.lower() not in _TRACKED and name not in self._ignored:
                writer.write(_fatal("08P01", f"unsupported startup parameter: {name}"))
                return None
        pool = self._pools.get((user, database))
        if pool is None:
            pool = self._pools[user, database] = asyncio.Queue()
            for _ in range(self._size):
                pool.put_nowait(None)
        login = {name.lower(): value for name, value in asked.items() if name.lower() in _TRACKED}
        client = _Client(writer, pool, {"user": user, "database": database, **login}, next(self._keys))
        server = await self._lend(client)
        self._take_back(server)
        self._clients[client.key] = client
        writer.write(_message(b"R", struct.pack("!I", 0)) + b"".join(server.reported))
        writer.write(_message(b"K", struct.pack("!II", client.key, client.key)) + _message(b"Z", b"I"))
        return client

    async def _cancel(self, key: int, secret: int) -> None:
        client = self._clients.get(key)
        if client is None or client.server is None or key != secret:
            return
        _, writer = await asyncio.open_connection(self._target.host, self._target.port)
        writer.write(struct.pack("!IIII", 16, _CANCEL_REQUEST, *client.server.key))
        await writer.drain()
        writer.close()

    async def _lend(self, client: _Client) -> _Server:
        """Wait for a server connection, in turn, and give it the client's tracked parameters."""
        server = await client.pool.get()
        try:
            server = server or await self._connect(client)
            session = {name: client.login[name] for name in _TRACKED if name in client.login}
            if server.session != session:
                server.prepared = asyncio.get_running_loop().create_future()
                changes = "".join(f"SET {name} = '{value.replace(chr(39), '')}';" for name, value in session.items())
                server.writer.write(_message(b"Q", changes.encode() + b"\0"))
                await server.prepared
                server.session = session
        except BaseException:
            if server is not None:
                self._end(server)
            client.pool.put_nowait(None)
            raise
        self.moves += client.last_server not in (None, server)
        client.server, client.last_server, server.client = server, server, client
        return server

    async def _connect(self, client: _Client) -> _Server:
        reader, writer = await asyncio.open_connection(self._target.host, self._target.port)
        server = _Server(reader, writer)
        login = "".join(f"{name}\0{client.login[name]}\0" for name in ("user", "database")).encode() + b"\0"
        writer.write(struct.pack("!II", len(login) + 8, 196608) + login)
        while True:
            kind, body = await _read(reader)
            if kind == b"S":
                server.reported.append(_message(kind, body))
            elif kind == b"K":
                server.key = struct.unpack("!II", body)
            elif kind == b"E":
                raise ConnectionError(body)
            elif kind == b"Z":
                break
        self._servers.add(server)
        server.pump = asyncio.create_task(self._pump(server))
        return server

    def _take_back(self, server: _Server) -> None:
        client = server.client
        assert client is not None
        server.client = client.server = None
        client.pool.put_nowait(server)

    def _end(self, server: _Server) -> None:
        self._servers.discard(server)
        server.writer.close()
        client = server.client
        if client is not None:
            server.client = client.server = None
            client.pool.put_nowait(None)
            client.writer.close()

    async def _pump(self, server: _Server) -> None:
        """What the server says goes to whoever has it."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                kind, body = await _read(server.reader)
                client = server.client
                if client is None:
                    if kind == b"Z" and server.prepared is not None and not server.prepared.done():
                        server.prepared.set_result(None)
                    continue
                answer = self._answer(server, kind, body)
                if answer is not None:
                    client.writer.write(answer)
                    await client.writer.drain()
        self._end(server)
        if server.prepared is not None and not server.prepared.done():
            server.prepared.set_exception(ConnectionResetError("the server went away"))

    def _answer(self, server: _Server, kind: bytes, body: bytes) -> bytes | None:
        if kind == b"1":
            statement, awaited = server.parses.popleft()
            server.known.add(statement)
            if not awaited:
                return None
        elif kind == b"3" and server.closes.popleft():
            kind = b"1"
        elif kind == b"Z":
            server.unanswered -= 1
            if not server.unanswered:
                server.parses.clear()  # what came after an error is never answered
                server.closes.clear()
                if body == b"I":
                    self._take_back(server)
        return _message(kind, body)

    def _forward(self, client: _Client, server: _Server, kind: bytes, body: bytes) -> None:
        if kind == b"P":
            kind, body = self._parse(client, server, body)
        elif kind == b"B":
            portal, rest = _split(body)
            name, rest = _split(rest)
            body = b"\0".join((portal, self._named(client, server, name), rest))
        elif kind == b"D" and body[:1] == b"S":
            body = b"S" + self._named(client, server, body[1:-1]) + b"\0"
        elif kind == b"C":
            if body[:1] == b"S":
                client.statements.pop(body[1:-1], None)
                body = _NO_STATEMENT
            server.closes.append(False)
        elif kind in (b"Q", b"S", b"F"):
            server.unanswered += 1
        server.writer.write(_message(kind, body))

    def _parse(self, client: _Client, server: _Server, body: bytes) -> tuple[bytes, bytes]:
        name, rest = _split(body)
        statement = b""
        if name:
            statement = self._statements.setdefault(rest, b"pooled_%d" % len(self._statements))
            client.statements[name] = (statement, rest)
            if _has(server, statement):
                server.closes.append(True)
                return b"C", _NO_STATEMENT
        server.parses.append((statement, True))
        return b"P", statement + b"\0" + rest

    def _named(self, client: _Client, server: _Server, name: bytes) -> bytes:
        """Return the server's name of a client's statement, which is prepared there first where it is missing."""
        if name not in client.statements:
            return name
        statement, rest = client.statements[name]
        if not _has(server, statement):
            self.prepared_again += 1
            server.parses.append((statement, False))
            server.writer.write(_message(b"P", statement + b"\0" + rest))
        return statement


def _has(server: _Server, statement: bytes) -> bool:
    return statement in server.known or any(name == statement for name, _ in server.parses)


async def _read(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readexactly(5)
    [length] = struct.unpack_from("!I", head, 1)
    return head[:1], await reader.readexactly(length - 4)


def _message(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!I", len(body) + 4) + body


def _split(body: bytes) -> tuple[bytes, bytes]:
    name, _, rest = body.partition(b"\0")
    return name, rest


def _fatal(state: str, text: str) -> bytes:
    fields = "".join(f"{code}{value}\0" for code, value in zip("SVCM", ("FATAL", "FATAL", state, text), strict=True))
    return _message(b"E", fields.encode() + b"\0")


@asynccontextmanager
async def pooling_proxy(target: str, *, ignored: Collection[str] = (), size: int = 4) -> AsyncIterator[PoolingProxy]:
    """Run a proxy before the server of an address, with so many server connections for each role and database."""
    proxy = PoolingProxy(target, size, ignored)
    await proxy.open()
    try:
        yield proxy
    finally:
        await proxy.close()
