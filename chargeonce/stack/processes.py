"""Child processes of this machine: how they start, how they end, which ports they may take.

A child started here never outlives its parent, not even one that is SIGKILLed: the kernel signals the child when the
thread that started it ends (prctl(2), PR_SET_PDEATHSIG). That is why children are started from the main thread only.
"""

import asyncio
import contextlib
import os
import random
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Self, TextIO

import psutil

from chargeonce.stack.errors import PortTakenError, StackError


@dataclass(frozen=True)
class Account:
    """The user a child runs as, without any supplementary group."""

    uid: int
    gid: int


# The steps between fork and exec, in an interpreter of their own: code between fork and exec of a threaded parent can
# deadlock (and Python 3.12+ warns about it). The death signal comes after setuid, which would clear it; a parent
# that died before that is noticed by the changed parent id.
_LAUNCH = """
import ctypes, os, signal, sys
parent, death_signal, uid, gid = map(int, sys.argv[1:5])
argv = sys.argv[5:]
try:
    if uid >= 0:
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(1, death_signal, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)
    os.execvp(argv[0], argv)
except OSError as error:
    print(f"{argv[0]}: {error}", file=sys.stderr, flush=True)
    os._exit(127)
"""


async def spawn(
    argv: Sequence[str | os.PathLike[str]],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdout: int | IO[bytes] = asyncio.subprocess.DEVNULL,
    death_signal: signal.Signals = signal.SIGKILL,
    account: Account | None = None,
) -> asyncio.subprocess.Process:
    """Start a child in a process group of its own, so that Ctrl-C in the terminal reaches only the parent.

    `death_signal` is what the child gets when this process ends, however that happens. A program that cannot be
    executed shows as exit status 127 with the reason on its standard error.

    Raises RuntimeError outside the main thread: the child would die with the thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("children are started from the main thread only: they end with the thread that started them")
    uid, gid = (account.uid, account.gid) if account else (-1, -1)
    launch = [sys.executable, "-I", "-S", "-c", _LAUNCH]
    return await asyncio.create_subprocess_exec(
        *launch,
        *map(str, (os.getpid(), int(death_signal), uid, gid)),
        *_command(argv),
        env=env,
        cwd=cwd,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=stdout,
        stderr=asyncio.subprocess.STDOUT,
        process_group=0,
    )


def _command(argv: Sequence[str | os.PathLike[str]]) -> tuple[str, ...]:
    return tuple(os.fspath(argument) for argument in argv)


def signal_group(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Send a signal to a child and everything in its group; nothing happens when it has ended."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)


async def end(process: asyncio.subprocess.Process, *steps: tuple[signal.Signals, float]) -> int:
    """Signal a child, wait, signal harder; SIGKILL after the last step. Returns the exit status (negative: signal).

    Each step is a signal for the child alone and the seconds it has to end.
    """
    for number, deadline_seconds in steps:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(process.wait(), deadline_seconds)
    signal_group(process, signal.SIGKILL)
    return await process.wait()


def _port_candidates() -> range:
    """Ports below the kernel's ephemeral range: no outgoing connection can take one while its server restarts."""
    try:
        first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        first_ephemeral = 32768
    return range(20000, first_ephemeral) if first_ephemeral > 21000 else range(20000, 60000)


def port_is_free(port: int) -> bool:
    """Whether a server could listen on this TCP port of 127.0.0.1 now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def free_ports(count: int) -> list[int]:
    """Different TCP ports of 127.0.0.1 on which nothing listens now.

    Raises StackError when there are not so many.
    """
    found: list[int] = []
    for port in random.SystemRandom().sample(_port_candidates(), k=len(_port_candidates())):
        if len(found) == count:
            break
        if port_is_free(port):
            found.append(port)
    if len(found) < count:
        raise StackError(f"only {len(found)} of {count} TCP ports are free on 127.0.0.1: stop what listens there")
    return found


def require_free_port(port: int, setting: str) -> None:
    """Raises PortTakenError, naming the port, who holds it where that is visible, and the setting to change."""
    if port_is_free(port):
        return
    raise PortTakenError(
        f"port {port} of 127.0.0.1 ({setting}) is taken{_holder(port)}: "
        f"stop that process or set {setting} to another port"
    )


def _holder(port: int) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr[1:2] == (port,) and connection.pid:
                return f" by pid {connection.pid} ({psutil.Process(connection.pid).name()})"
    return ""


_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_LONGEST_LINE_BYTES = 65536


class LinePrinter:
    """Writes `name | text` lines of many children to one stream; names are coloured only on a terminal.

    A stream that has gone away (`| head`) is written to no more; the children run on.
    """

    def __init__(self, stream: TextIO, *, width: int = 0) -> None:
        self._stream: TextIO | None = stream
        self._width = width
        self._colour = stream.isatty() and "NO_COLOR" not in os.environ
        self._colours: dict[str, int] = {}

    def __call__(self, name: str, text: str) -> None:
        if self._stream is None:
            return
        self._width = max(self._width, len(name))
        label = f"{name:<{self._width}} |"
        if self._colour:
            colour = self._colours.setdefault(name, _COLOURS[len(self._colours) % len(_COLOURS)])
            label = f"\x1b[{colour}m{label}\x1b[0m"
        try:
            self._stream.write(f"{label} {text}\n")
            self._stream.flush()
        except (OSError, ValueError):
            self._stream = None


class _Output:
    """The reading end of a pipe for a child's output.

    Not asyncio's own pipe: with that, waiting for a child would also wait for every descendant that holds it open.
    """

    def __init__(self, reader: asyncio.StreamReader, transport: asyncio.ReadTransport, write_end: int) -> None:
        self._reader = reader
        self._transport = transport
        self.write_end = write_end

    @classmethod
    async def open(cls) -> Self:
        read_end, write_end = os.pipe()
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", buffering=0)
        )
        return cls(reader, transport, write_end)

    async def lines(self) -> AsyncIterator[str]:
        """Every line until the last holder of the other end closes it; longer ones are cut at 64 KiB."""
        rest = b""
        while chunk := await self._reader.read(_LONGEST_LINE_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _LONGEST_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                yield line.decode(errors="replace").rstrip("\r")
        if rest:
            yield rest.decode(errors="replace")

    def close(self) -> None:
        self._transport.close()


@dataclass
class _Child:
    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] | None
    cwd: Path | None
    restart: bool
    process: asyncio.subprocess.Process
    output: _Output
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    watch: asyncio.Task[None] | None = None


class Supervisor:
    """Runs named child processes, merges their output line by line and, where asked, starts again what ends.

    `log(name, text)` gets every line of output (default: `LinePrinter(sys.stdout)`); `on_exit(name, status)` every
    end, the status negative for a signal as in `subprocess`. A child that ends is started again after
    `backoff_seconds`, doubled up to `max_backoff_seconds` each time it lives shorter than that maximum.
    """

    def __init__(
        self,
        *,
        log: Callable[[str, str], None] | None = None,
        on_exit: Callable[[str, int], None] | None = None,
        restart: bool = False,
        backoff_seconds: float = 0.2,
        max_backoff_seconds: float = 5.0,
        stop_deadline_seconds: float = 20.0,
    ) -> None:
        self._log = log or LinePrinter(sys.stdout)
        self._on_exit = on_exit or (lambda _name, _status: None)
        self._restart = restart
        self._backoff_seconds = backoff_seconds
        self._max_backoff_seconds = max_backoff_seconds
        self._stop_deadline_seconds = stop_deadline_seconds
        self._children: dict[str, _Child] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The children in the order they were started."""
        return tuple(self._children)

    async def start(
        self,
        name: str,
        argv: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        restart: bool | None = None,
    ) -> int:
        """Start a child and return its pid. `env` replaces the environment, None hands on this process's.

        Raises ValueError when a child of this name is still running.
        """
        known = self._children.get(name)
        if known and known.watch and not known.watch.done():
            raise ValueError(f"a child named {name} is running")
        command = _command(argv)
        process, output = await self._spawn(command, env, cwd)
        again = self._restart if restart is None else restart
        child = self._children[name] = _Child(name, command, env, cwd, again, process, output)
        child.watch = asyncio.create_task(self._watch(child), name=f"watch {name}")
        return process.pid

    def pid(self, name: str) -> int | None:
        """The pid of a child, None while it is down. Raises KeyError for an unknown name."""
        process = self._children[name].process
        return process.pid if process.returncode is None else None

    def restarts(self, name: str) -> bool:
        """Whether a child is started again when it ends by itself. Raises KeyError for an unknown name."""
        return self._children[name].restart

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Signal a child (SIGKILL unless said otherwise). With restart it comes back. KeyError: unknown name."""
        signal_group(self._children[name].process, number)

    async def restart(self, name: str) -> int:
        """SIGTERM, deadline, SIGKILL, then start again at once. Returns the new pid; KeyError for an unknown name."""
        child = self._children[name]
        await self._end([child])
        return await self.start(name, child.argv, env=child.env, cwd=child.cwd, restart=child.restart)

    async def stop(self, name: str | None = None) -> None:
        """End one child, or all of them together: SIGTERM, one deadline for all, SIGKILL. They stay known by name."""
        await self._end(list(self._children.values()) if name is None else [self._children[name]])

    async def wait(self, name: str) -> int:
        """Wait until a child has ended for good (it is not restarted) and return its exit status."""
        child = self._children[name]
        if child.watch:
            await asyncio.wait({child.watch})
        return child.process.returncode or 0

    async def _spawn(
        self, argv: Sequence[str], env: Mapping[str, str] | None, cwd: Path | None
    ) -> tuple[asyncio.subprocess.Process, _Output]:
        output = await _Output.open()
        try:
            return await spawn(argv, env=env, cwd=cwd, stdout=output.write_end), output
        except BaseException:
            output.close()
            raise
        finally:
            os.close(output.write_end)

    async def _watch(self, child: _Child) -> None:
        loop = asyncio.get_running_loop()
        backoff_seconds = self._backoff_seconds
        while True:
            started = loop.time()
            status = await self._follow(child)
            self._on_exit(child.name, status)
            if child.stopping.is_set() or not child.restart:
                return
            if loop.time() - started > self._max_backoff_seconds:
                backoff_seconds = self._backoff_seconds
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(child.stopping.wait(), backoff_seconds)
                return
            backoff_seconds = min(2 * backoff_seconds, self._max_backoff_seconds)
            try:
                child.process, child.output = await self._spawn(child.argv, child.env, child.cwd)
            except OSError as error:
                self._log(child.name, f"could not be started: {error}")
                continue
            if child.stopping.is_set():
                signal_group(child.process, signal.SIGTERM)

    async def _follow(self, child: _Child) -> int:
        """Hand on the output of a child until it ends; a descendant that keeps the pipe open gets one second more."""
        pump = asyncio.create_task(self._pump(child.name, child.output))
        status = await child.process.wait()
        _, pending = await asyncio.wait({pump}, timeout=1)
        for task in pending:
            task.cancel()
            await asyncio.wait({task})
        child.output.close()
        return status

    async def _pump(self, name: str, output: _Output) -> None:
        async for line in output.lines():
            self._log(name, line)

    async def _end(self, children: Sequence[_Child]) -> None:
        for child in children:
            child.stopping.set()
            signal_group(child.process, signal.SIGTERM)
        watches = {child.watch for child in children if child.watch}
        if not watches:
            return
        _, pending = await asyncio.wait(watches, timeout=self._stop_deadline_seconds)
        if pending:
            for child in children:
                signal_group(child.process, signal.SIGKILL)
            await asyncio.wait(pending)
