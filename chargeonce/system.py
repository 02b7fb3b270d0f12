"""The whole of chargeonce on this machine: PostgreSQL, Kafka, both services and the provider, one process a role.

`up` runs it in the foreground, the demo and the fault tests break it on purpose.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import aiohttp
import asyncpg

from chargeonce.stack import (
    KafkaBroker,
    PostgresServer,
    Stack,
    StackError,
    StartFailedError,
    Supervisor,
    free_ports,
    require_free_port,
)
from chargeonce.stack.files import open_log
from chargeonce.topology import (
    BY_NAME,
    KAFKA_PORT_OFFSET,
    POSTGRES_PORT_OFFSET,
    PREPARATIONS,
    PROCESSES,
    Addresses,
    database_dsn,
    environment,
    preparation_command,
    run_command,
)
from shared import failpoints as failpoint_names

__all__ = ["PROCESSES", "System"]

_POLL_SECONDS = 0.05
_READY_DEADLINE_SECONDS = 60.0
_PROBE_DEADLINE_SECONDS = 2.0
_SERVER_CHECK_SECONDS = 0.5
_LAST_LINES = 15


class System:
    """Everything below one directory: data, the provider's ledger, and `logs/<process>.log`.

        async with System(directory) as system:
            ...  # every process is ready
            await system.kill("billing-consumer")
            await system.start_process("billing-consumer", failpoints="B4")
            await system.wait_ended("billing-consumer")

    Ports are fixed from `port_base` (orders on it, billing on the next, the provider on the one after; health of the
    others from 10 on, PostgreSQL on 20, Kafka on 21), or free ones when it is None. `restart` starts again what dies.
    `environment` adds variables to a process by its name; `log(name, text)` gets every line of output besides its
    file; `on_exit(name, status)` every end of a process, the status negative for a signal.
    """

    def __init__(
        self,
        directory: Path,
        *,
        port_base: int | None = None,
        restart: bool = False,
        environment: Mapping[str, Mapping[str, str]] | None = None,
        log: Callable[[str, str], None] = lambda _name, _text: None,
        on_exit: Callable[[str, int], None] = lambda _name, _status: None,
    ) -> None:
        self.directory = directory.absolute()
        self._fixed_ports = port_base is not None
        if port_base is None:
            self._ports = dict(zip(PROCESSES, free_ports(len(PROCESSES)), strict=True))
        else:
            self._ports = {name: port_base + process.port_offset for name, process in BY_NAME.items()}
        self.stack = Stack(
            self.directory,
            postgres_port=None if port_base is None else port_base + POSTGRES_PORT_OFFSET,
            kafka_port=None if port_base is None else port_base + KAFKA_PORT_OFFSET,
            postgres_port_setting="--port-base",
            kafka_port_setting="--port-base",
        )
        self._environment = {name: dict(variables) for name, variables in (environment or {}).items()}
        self._log = log
        self._last_lines: dict[str, deque[str]] = {}
        self._log_files: dict[str, IO[bytes]] = {}
        self._supervisor = Supervisor(log=self._record, on_exit=on_exit, restart=restart)
        self._http: aiohttp.ClientSession | None = None

    # ------------------------------------------------------------------------------------------ addresses

    def url(self, name: str) -> str:
        """The HTTP address of a process: its API where it has one, and /livez, /readyz, /metrics. KeyError: unknown."""
        return f"http://127.0.0.1:{self._ports[name]}"

    @property
    def orders_url(self) -> str:
        """The order service's API."""
        return self.url("order-api")

    @property
    def billing_url(self) -> str:
        """The billing service's API."""
        return self.url("billing-api")

    @property
    def provider_url(self) -> str:
        """The payment provider's API."""
        return self.url("payment-provider")

    def database_dsn(self, service: str) -> str:
        """The `postgresql://` address of the database of `order_service` or `billing_service`, as its own user."""
        return database_dsn(service, self.stack.postgres.port)

    # ------------------------------------------------------------------------------------- the whole of it

    async def start(self, names: Iterable[str] = PROCESSES, told: Callable[[str], None] = lambda _step: None) -> None:
        """Start PostgreSQL and Kafka, prepare databases and topics, start the named processes, wait for all.

        `told` hears of each step that is done.
        Raises DirectoryInUseError (another run has the directory), PortTakenError, StartFailedError with the end of
        the log that tells why, or another StackError. What was started is stopped then.
        """
        try:
            self.hold()
            self._check_ports()
            await self.stack.start()
            told("PostgreSQL and Kafka run")
            await self.prepare()
            told("databases and topics are made")
            chosen = tuple(names)
            await self.start_processes(chosen)
            told(f"{len(chosen)} processes are ready")
        except BaseException:
            await self.stop()
            raise

    async def prepare(self) -> None:
        """Make users, databases, tables and topics where they are missing. Raises StartFailedError."""
        await self._create_databases()
        for name in PREPARATIONS:
            variables = self._process_environment(name)
            await self._supervisor.start(name, preparation_command(name), env=variables, restart=False)
        statuses = await asyncio.gather(*(self._supervisor.wait(name) for name in PREPARATIONS))
        for name, status in zip(PREPARATIONS, statuses, strict=True):
            if status != 0:
                raise StartFailedError(f"{name} ended with status {status}:\n{self._end_of_log(name)}")

    async def start_processes(self, names: Iterable[str] = PROCESSES) -> None:
        """Start processes together and wait until all are ready. Raises StartFailedError."""
        chosen = tuple(names)
        for name in chosen:
            await self.start_process(name)
        await self.wait_ready(chosen)

    async def stop(self) -> None:
        """Stop every process (SIGTERM, deadline, SIGKILL), then Kafka and PostgreSQL, and let go of the directory."""
        try:
            await self._supervisor.stop()
        finally:
            await self.stack.stop()
            if self._http is not None:
                await self._http.close()
                self._http = None
            for log in self._log_files.values():
                log.close()
            self._log_files.clear()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    def hold(self) -> None:
        """Take the directory for this run, until `stop`. Raises DirectoryInUseError, naming the pid that has it."""
        self.stack.hold()

    def empty(self) -> None:
        """Delete the data of an earlier run, wherever it lies. Raises StackError while a run uses it."""
        self.hold()
        self.stack.postgres.remove()
        self.stack.kafka.remove()
        for name in ("logs", "payment-provider"):
            shutil.rmtree(self.directory / name, ignore_errors=True)

    async def remove(self) -> None:
        """Delete the directory and all that belongs to it elsewhere. Raises StackError while a run uses it."""
        self.empty()
        await self.stop()
        self.stack.remove()
        shutil.rmtree(self.directory, ignore_errors=True)

    # ------------------------------------------------------------------------------------- single processes

    async def start_process(
        self,
        name: str,
        *,
        failpoints: str = "",
        environment: Mapping[str, str] | None = None,
        restart: bool | None = None,
    ) -> int:
        """Start a process that is down and return its pid; `wait_ready` tells when it works.

        `failpoints` (`B4`, `R2@3`) arms crash points in this process, which then is not started again when it dies
        unless `restart` says so. `environment` adds to what the system gives it.
        Raises ValueError for an unknown crash point or a process that runs, KeyError for an unknown name.
        """
        process = BY_NAME[name]
        failpoint_names.parse(failpoints)
        variables = {**self._process_environment(name), **(environment or {})}
        if failpoints:
            variables[failpoint_names.VARIABLE] = failpoints
            restart = bool(restart)
        argv = run_command(process, self._ports[name])
        return await self._supervisor.start(name, argv, env=variables, restart=restart)

    async def kill(self, name: str, number: signal.Signals = signal.SIGKILL, deadline_seconds: float = 20.0) -> int:
        """Signal a process and return the pid it had, once that pid is gone. With `restart` it comes back.

        Raises StackError when it was down or outlives the deadline, KeyError for an unknown name.
        """
        pid = self._supervisor.pid(name)
        if pid is None:
            raise StackError(f"{name} was down before it could be killed:\n{self._end_of_log(name)}")
        self._supervisor.kill(name, number)
        try:
            async with asyncio.timeout(deadline_seconds):
                while self._supervisor.pid(name) == pid:  # noqa: ASYNC110 - the supervisor has no event for it
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise StackError(f"{name} (pid {pid}) did not end within {deadline_seconds:g} s of {number.name}") from None
        return pid

    def signal(self, name: str, number: signal.Signals) -> None:
        """Signal a process and everything in its group, without waiting. KeyError for an unknown name."""
        self._supervisor.kill(name, number)

    async def stop_process(self, name: str) -> None:
        """SIGTERM, deadline, SIGKILL. It stays down."""
        await self._supervisor.stop(name)

    async def restart_process(self, name: str) -> int:
        """Stop a process and start it with the environment it had. Returns the new pid."""
        return await self._supervisor.restart(name)

    async def wait_ended(self, name: str, deadline_seconds: float = 30.0) -> int:
        """Wait until a process has ended for good; return its exit status, negative for a signal.

        Raises TimeoutError. For a process that is started again when it dies this never happens.
        """
        async with asyncio.timeout(deadline_seconds):
            return await self._supervisor.wait(name)

    def pid(self, name: str) -> int | None:
        """The pid of a process, None while it is down. KeyError when it was never started."""
        return self._supervisor.pid(name)

    async def wait_ready(
        self, names: Iterable[str] = PROCESSES, deadline_seconds: float = _READY_DEADLINE_SECONDS
    ) -> None:
        """Wait until each process says that it is ready, with nothing degraded.

        Raises StartFailedError with the reason it gives, or with the end of its log when it is down.
        """
        waiting = dict.fromkeys(names, "")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_seconds
        while waiting:
            for name in tuple(waiting):
                waiting[name] = await self._not_ready_because(name)
                if not waiting[name]:
                    del waiting[name]
            if waiting and loop.time() > deadline:
                name, reason = next(iter(waiting.items()))
                raise StartFailedError(
                    f"{name} was not ready after {deadline_seconds:g} s ({reason}):\n{self._end_of_log(name)}"
                )
            if waiting:
                await asyncio.sleep(_POLL_SECONDS)

    async def metrics(self, name: str) -> dict[str, float]:
        """The metrics of a process by sample name with labels as Prometheus writes them. Raises aiohttp.ClientError."""
        async with self._client.get(f"{self.url(name)}/metrics") as response:
            response.raise_for_status()
            lines = (await response.text()).splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {sample: float(value) for sample, value in samples}

    async def keep_servers(self) -> None:
        """Start PostgreSQL and Kafka again whenever one of them dies; runs until it is cancelled."""
        servers: dict[str, PostgresServer | KafkaBroker] = {"postgres": self.stack.postgres, "kafka": self.stack.kafka}
        while True:
            await asyncio.sleep(_SERVER_CHECK_SECONDS)
            for name, server in servers.items():
                if server.pid is None:
                    self._log(name, "ended unexpectedly; starting it again")
                    try:
                        await server.start()
                    except StackError as error:
                        self._log(name, str(error))

    # ------------------------------------------------------------------------------------------- the parts

    @property
    def _client(self) -> aiohttp.ClientSession:
        if self._http is None or self._http.closed:
            self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_PROBE_DEADLINE_SECONDS))
        return self._http

    def _check_ports(self) -> None:
        """Raises PortTakenError before anything is started; of free ports only those are replaced that were lost."""
        for name, port in self._ports.items():
            if self._fixed_ports:
                require_free_port(port, "--port-base")
            else:
                with contextlib.suppress(StackError):
                    require_free_port(port, name)
                    continue
                self._ports[name] = free_ports(1)[0]

    async def _create_databases(self) -> None:
        """A user and a database of its own for each service, with the documented development password."""
        connection = await asyncpg.connect(self.stack.postgres.dsn())
        try:
            for service in ("order_service", "billing_service"):
                if not await connection.fetchval("SELECT 1 FROM pg_roles WHERE rolname = $1", service):
                    await connection.execute(f"CREATE ROLE {service} LOGIN PASSWORD '{service}'")
                if not await connection.fetchval("SELECT 1 FROM pg_database WHERE datname = $1", service):
                    await connection.execute(f"CREATE DATABASE {service} OWNER {service}")
        finally:
            await connection.close()

    def _process_environment(self, name: str) -> dict[str, str]:
        addresses = Addresses(
            self.directory, self.stack.postgres.port, self.stack.kafka.bootstrap_servers, self.provider_url
        )
        return {**environment(name, addresses), **self._environment.get(name, {})}

    async def _not_ready_because(self, name: str) -> str:
        """Why a process is not ready, empty when it is. Raises StartFailedError when it is down for good."""
        if self._supervisor.pid(name) is None and not self._supervisor.restarts(name):
            status = await self._supervisor.wait(name)
            raise StartFailedError(f"{name} ended with status {status}:\n{self._end_of_log(name)}")
        try:
            async with self._client.get(f"{self.url(name)}/readyz") as response:
                answer = await response.json()
        except (aiohttp.ClientError, TimeoutError, ValueError, OSError) as error:
            return f"it does not answer: {type(error).__name__}"
        if answer.get("status") == "ready":
            return ""
        checks = answer.get("checks", {})
        reasons = (f"{part}: {check['reason']}" for part, check in checks.items() if check["status"] != "ready")
        return "; ".join(reasons) or str(answer.get("status"))

    def _record(self, name: str, text: str) -> None:
        self._last_lines.setdefault(name, deque(maxlen=_LAST_LINES)).append(text)
        log = self._log_files.get(name)
        if log is None:
            folder = self.directory / "logs"
            folder.mkdir(parents=True, exist_ok=True)
            log = self._log_files[name] = open_log(folder / f"{name}.log")
        log.write(f"{text}\n".encode())
        log.flush()
        self._log(name, text)

    def _end_of_log(self, name: str) -> str:
        return "\n".join(f"  {line}" for line in self._last_lines.get(name, ())) or "  (nothing in its log)"
