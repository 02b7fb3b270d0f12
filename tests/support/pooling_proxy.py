"""A small transaction-pooling proxy on PostgreSQL's wire protocol, version 3.0, without TLS and passwords.

It pools as PgBouncer >= 1.21 does with `pool_mode = transaction`, `server_round_robin = 1`, `max_prepared_statements`
above 0 and every run-time parameter in `ignore_startup_parameters`: a client has a server connection from its first
message to the end of its transaction, and mostly another one afterwards; what a client asks for at its start beyond user
and database is dropped; a prepared statement is prepared wherever it is missing.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import struct
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

PROTOCOL, CANCEL, TLS, GSS = 196_608, 80_877_102, 80_877_103, 80_877_104
Message = tuple[bytes, bytes]
"""Type, one byte, and body."""


def framed(kind: bytes, body: bytes = b"") -> bytes:
    return kind + struct.pack("!I", len(body) + 4) + body


async def read_message(reader: asyncio.StreamReader) -> Message:
    kind, length = struct.unpack("!cI", await reader.readexactly(5))
    return kind, await reader.readexactly(length - 4)


async def read_startup(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    length, code = struct.unpack("!II", await reader.readexactly(8))
    return code, await reader.readexactly(length - 8)


def startup(code: int, body: bytes) -> bytes:
    return struct.pack("!II", len(body) + 8, code) + body


def zero_terminated(body: bytes) -> tuple[bytes, bytes]:
    """Split a body into its first string and the rest."""
    text, _, rest = body.partition(b"\0")
    return text, rest


@dataclass(eq=False)
class ServerConnection:
    """A connection to PostgreSQL: lent to one client for a transaction, or idle."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    key: bytes
    parameters: bytes
    lent_to: Client | None = None
    prepared: set[bytes] = field(default_factory=set)
    preparing: deque[tuple[bytes | None, bool]] = field(default_factory=deque)
    """For each Parse without an answer yet: the statement's name here, and whether the client asked for it."""

    def knows(self, name: bytes) -> bool:
        return name in self.prepared or any(name == asked for asked, _ in self.preparing)

    def parse(self, name: bytes | None, rest: bytes, *, asked: bool) -> None:
        self.preparing.append((name, asked))
        self.writer.write(framed(b"P", (name or b"") + b"\0" + rest))


@dataclass(eq=False)
class Client:
    """A client's session: its prepared statements, and the server connection that it has for the moment."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    pool: Pool
    key: bytes = field(default_factory=lambda: struct.pack("!II", secrets.randbits(31), secrets.randbits(32)))
    server: ServerConnection | None = None
    statements: dict[bytes, bytes] = field(default_factory=dict)
    """What follows the name in the Parse of each of its prepared statements."""
    unanswered: int = 0
    in_a_series: bool = False

    async def serve(self) -> None:
        """Pass messages on until the client leaves."""
        while True:
            kind, body = await read_message(self.reader)
            if kind == b"X":
                return
            if self.server is None:
                self.server = await self.pool.borrow(self)
            if kind in b"QS":
                self.unanswered += 1
            self.in_a_series = kind not in b"QS"
            self._pass_on(self.server, kind, body)
            await self.server.writer.drain()

    def _pass_on(self, server: ServerConnection, kind: bytes, body: bytes) -> None:
        if kind == b"P":
            name, rest = zero_terminated(body)
            if name:
                self.statements[name] = rest
            shared = server_name(rest) if name else None
            # What is prepared here already is parsed once more without a name, for the answer's sake.
            server.parse(None if shared and server.knows(shared) else shared, rest, asked=True)
        elif kind == b"B":
            portal, rest = zero_terminated(body)
            name, rest = zero_terminated(rest)
            server.writer.write(framed(b"B", portal + b"\0" + self._prepare(server, name) + b"\0" + rest))
        elif kind == b"D" and body[:1] == b"S":
            server.writer.write(framed(b"D", b"S" + self._prepare(server, body[1:-1]) + b"\0"))
        elif kind == b"C" and body[:1] == b"S":
            self.statements.pop(body[1:-1], None)
            server.writer.write(framed(b"C", b"Snobody has this name\0"))  # others may use it; the answer is the same
        else:
            server.writer.write(framed(kind, body))

    def _prepare(self, server: ServerConnection, name: bytes) -> bytes:
        """Return the name of a client's statement on the server, where it is prepared if it was not."""
        if name not in self.statements:
            return name  # the unnamed one, or none: the server says so
        rest = self.statements[name]
        if not server.knows(server_name(rest)):
            server.parse(server_name(rest), rest, asked=False)
        return server_name(rest)

    def receive(self, server: ServerConnection, kind: bytes, body: bytes) -> None:
        """Take a message of the server that was lent; give the server back when the transaction is over."""
        if kind == b"1":
            name, asked = server.preparing.popleft()
            if name is not None:
                server.prepared.add(name)
            if not asked:
                return
        self.writer.write(framed(kind, body))
        if kind == b"Z":
            self.unanswered -= 1
            if self.unanswered == 0 and not self.in_a_series:
                server.preparing.clear()  # an error skipped what was left of it
                if body == b"I":
                    self.server = None
                    self.pool.give_back(server)


def server_name(rest: bytes) -> bytes:
    """Return the name that all clients' statements of one text have on a server connection."""
    return b"shared_" + hashlib.sha256(rest).hexdigest()[:32].encode()


class Pool:
    """The server connections of one user and database, the one that was idle for longest first."""

    def __init__(self, address: tuple[str, int], user_and_database: bytes, most: int) -> None:
        self.servers: set[ServerConnection] = set()
        self.borrowed = 0
        self._address = address
        self._startup = user_and_database
        self._idle: deque[ServerConnection] = deque()
        self._places = asyncio.Semaphore(most)
        self._tasks: set[asyncio.Task[None]] = set()

    async def borrow(self, client: Client) -> ServerConnection:
        """Return a server connection, waiting for one if need be. Raises OSError when there is no server."""
        await self._places.acquire()
        try:
            # New ones first: the more there are, the more a session moves.
            server = self._idle.popleft() if self._places.locked() and self._idle else await self._connect()
        except BaseException:
            self._places.release()
            raise
        self.borrowed += 1
        server.lent_to = client
        return server

    def give_back(self, server: ServerConnection) -> None:
        server.lent_to = None
        self._places.release()
        if server in self.servers:
            self._idle.append(server)

    def drop(self, server: ServerConnection) -> None:
        """Close a server connection; a client that has it is cut off."""
        server.writer.close()
        if server not in self.servers:
            return
        self.servers.remove(server)
        with suppress(ValueError):
            self._idle.remove(server)
        if server.lent_to is not None:
            server.lent_to.writer.close()
            self.give_back(server)

    async def parameters(self) -> bytes:
        """Return the ParameterStatus messages that a server began with."""
        if not self.servers:
            self._idle.append(await self._connect())
        return next(iter(self.servers)).parameters

    async def _connect(self) -> ServerConnection:
        reader, writer = await asyncio.open_connection(*self._address)
        writer.write(startup(PROTOCOL, self._startup))
        parameters, key = b"", b""
        while (message := await read_message(reader))[0] != b"Z":
            kind, body = message
            if kind == b"E":
                raise ConnectionRefusedError(body.decode(errors="replace"))
            if kind == b"S":
                parameters += framed(kind, body)
            elif kind == b"K":
                key = body
        server = ServerConnection(reader, writer, key, parameters)
        self.servers.add(server)
        task = asyncio.create_task(self._read(server))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return server

    async def _read(self, server: ServerConnection) -> None:
        """Pass on what the server sends. What it sends while nobody has it, such as a notification, goes to nobody."""
        with suppress(OSError, EOFError):
            while True:
                kind, body = await read_message(server.reader)
                if server.lent_to is not None:
                    server.lent_to.receive(server, kind, body)
        self.drop(server)

    async def close(self) -> None:
        for server in list(self.servers):
            self.drop(server)
        await asyncio.gather(*self._tasks)


class PoolingProxy:
    """The proxy of one server, for any number of clients, users and databases."""

    def __init__(self, host: str, port: int, most_servers: int) -> None:
        self.pools: dict[bytes, Pool] = {}
        self._address = (host, port)
        self._most_servers = most_servers
        self._clients: set[Client] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, until its client leaves or is cut off."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            code, body = await read_startup(reader)
            while code in (TLS, GSS):
                writer.write(b"N")
                code, body = await read_startup(reader)
            if code == CANCEL:
                await self._cancel(body)
            else:
                await self._serve(reader, writer, body)
        except (OSError, EOFError):
            pass
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> None:
        given = body.split(b"\0")
        asked = dict(zip(given[::2], given[1::2], strict=False))
        kept = b"".join(name + b"\0" + asked[name] + b"\0" for name in (b"user", b"database")) + b"\0"
        pool = self.pools.setdefault(kept, Pool(self._address, kept, self._most_servers))
        client = Client(reader, writer, pool)
        writer.write(framed(b"R", struct.pack("!I", 0)) + await pool.parameters())
        writer.write(framed(b"K", client.key) + framed(b"Z", b"I"))
        self._clients.add(client)
        try:
            await client.serve()
        finally:
            self._clients.discard(client)
            if client.server is not None:
                pool.drop(client.server)  # in the middle of a transaction, which PostgreSQL then rolls back

    async def _cancel(self, key: bytes) -> None:
        for client in self._clients:
            if client.key == key and client.server is not None:
                _, writer = await asyncio.open_connection(*self._address)
                writer.write(startup(CANCEL, client.server.key))
                await writer.drain()
                writer.close()

    async def close(self) -> None:
        """Cut everybody off."""
        for client in list(self._clients):
            client.writer.close()
        for pool in self.pools.values():
            await pool.close()
        await asyncio.gather(*self._tasks)


@asynccontextmanager
async def pooling_proxy(url: str, most_servers: int = 4) -> AsyncIterator[tuple[PoolingProxy, str]]:
    """Yield a proxy to the server of a database, and the database's address through it, with the same driver."""
    parts = urlsplit(url)
    proxy = PoolingProxy(parts.hostname or "", parts.port or 0, most_servers)
    listening = await asyncio.start_server(proxy.accept, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    try:
        yield proxy, parts._replace(netloc=f"{parts.username}@127.0.0.1:{port}").geturl()
    finally:
        listening.close()
        await proxy.close()
