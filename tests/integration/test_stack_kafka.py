"""Kafka as a child, from pinned jars: starts, stops, crashes, keeps what it acknowledged, needs no network."""

import asyncio
import functools
import http.server
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import UnknownTopicOrPartitionError
from jgo.env import LockFile
from jgo.maven import MavenContext

from chargeonce.stack import KafkaBroker, PortTakenError, StackError, StartFailedError, kafka_jars, prepare

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
async def own_broker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[KafkaBroker]:
    """A broker of this module's own; every test leaves it startable. Its path has what needs escaping."""
    await prepare()
    broker = KafkaBroker(tmp_path_factory.mktemp("a,b ") / "kafka")
    yield broker
    await broker.stop()
    broker.remove()


@pytest.fixture
async def broker(own_broker: KafkaBroker) -> KafkaBroker:
    await own_broker.start()
    return own_broker


async def _create_topic(broker: KafkaBroker, name: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=broker.bootstrap_servers)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(name, num_partitions=1, replication_factor=1)])
    finally:
        await admin.close()


async def _send(broker: KafkaBroker, topic: str, value: bytes, *, timeout_ms: int = 10_000) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=broker.bootstrap_servers, acks="all", request_timeout_ms=timeout_ms)
    await producer.start()
    try:
        await producer.send_and_wait(topic, value)
    finally:
        await producer.stop()


async def _values(broker: KafkaBroker, topic: str, count: int) -> list[bytes | None]:
    consumer = AIOKafkaConsumer(bootstrap_servers=broker.bootstrap_servers, auto_offset_reset="earliest")
    await consumer.start()
    try:
        consumer.assign([TopicPartition(topic, 0)])
        async with asyncio.timeout(10):
            return [(await consumer.getone()).value for _ in range(count)]
    finally:
        await consumer.stop()


async def test_acknowledged_records_survive_a_stop_and_a_crash_on_the_same_port(
    broker: KafkaBroker, unique_name: str
) -> None:
    address = broker.bootstrap_servers
    await _create_topic(broker, unique_name)
    await _send(broker, unique_name, b"before the stop")
    process = psutil.Process(broker.pid)

    await broker.restart()
    assert not process.is_running()
    await _send(broker, unique_name, b"before the crash")
    process = psutil.Process(broker.pid)
    await broker.kill()
    assert broker.pid is None
    assert not process.is_running()

    await broker.start()
    assert broker.bootstrap_servers == address
    assert await _values(broker, unique_name, 2) == [b"before the stop", b"before the crash"]


async def test_topics_do_not_come_into_being_by_being_used(broker: KafkaBroker, unique_name: str) -> None:
    with pytest.raises(UnknownTopicOrPartitionError):
        await _send(broker, unique_name, b"", timeout_ms=1000)


async def test_data_moves_to_other_ports_with_another_broker(broker: KafkaBroker, unique_name: str) -> None:
    await _create_topic(broker, unique_name)
    await _send(broker, unique_name, b"kept")
    await broker.stop()
    other = KafkaBroker(broker.directory)
    try:
        await other.start()
        assert other.port != broker.port
        assert await _values(other, unique_name, 1) == [b"kept"]
    finally:
        await other.stop()


async def test_a_taken_port_is_named_with_its_setting_and_holder(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        broker = KafkaBroker(tmp_path, port=port, port_setting="--kafka-port")
        with pytest.raises(PortTakenError, match=rf"port {port} .*--kafka-port.* by pid {os.getpid()} "):
            await broker.start()
    assert not (tmp_path / "data").exists()


async def test_a_failed_start_shows_the_end_of_the_log_and_leaves_nothing_running(own_broker: KafkaBroker) -> None:
    await own_broker.start()
    await own_broker.stop()
    broken = KafkaBroker(own_broker.directory, settings={"offsets.topic.num.partitions": "many"})
    with pytest.raises(StartFailedError, match=r"offsets\.topic\.num\.partitions"):
        await broken.start()
    assert broken.pid is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
async def test_data_of_another_user_is_refused_with_the_command_that_helps(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    os.chown(tmp_path / "data", 12345, 12345)
    with pytest.raises(StackError, match=r"belongs to user 12345.* rm -r .*/data"):
        await KafkaBroker(tmp_path).start()


UNREACHABLE_NETWORK = dict.fromkeys(
    ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:9"
)


def _prepare_without_network(cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "chargeonce.stack"],
        cwd=REPOSITORY,
        env={**os.environ, **UNREACHABLE_NETWORK, "NO_PROXY": "", "no_proxy": "", "CHARGEONCE_CACHE": str(cache)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


async def test_a_filled_cache_needs_no_network_and_an_empty_one_says_so(tmp_path: Path) -> None:
    await prepare()
    filled = await asyncio.to_thread(_prepare_without_network, kafka_jars.cache_directory())
    assert (filled.returncode, filled.stderr) == (0, "")

    empty = await asyncio.to_thread(_prepare_without_network, tmp_path / "cache")
    assert empty.returncode == 1
    assert "could not be fetched" in empty.stderr
    assert "HTTPS_PROXY" in empty.stderr
    assert "Traceback" not in empty.stderr
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


class _Mirror(http.server.SimpleHTTPRequestHandler):
    """Serves the filled cache, which is laid out as a repository, and remembers what was asked for."""

    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        super().do_GET()

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the overridden name
        """The test's output is not for this."""


@pytest.fixture
async def mirror(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[list[str]]:
    """A repository on this machine in place of the public one, and an empty cache."""
    await prepare()
    folder = (await asyncio.to_thread(kafka_jars.kafka_jars)).folder
    asked: list[str] = []
    handler = functools.partial(type("Mirror", (_Mirror,), {"asked": asked}), directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        address = {"mirror": f"http://127.0.0.1:{server.server_port}"}
        monkeypatch.setattr(kafka_jars, "MavenContext", functools.partial(MavenContext, remote_repos=address))
        monkeypatch.setenv("CHARGEONCE_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield asked
        server.shutdown()
        thread.join()


@pytest.fixture
def one_jar() -> LockFile:
    """The lock file with only the smallest of its jars."""
    lock = LockFile.load(kafka_jars.LOCK_PATH)
    lock.dependencies = [entry for entry in lock.dependencies if entry.artifactId == "jspecify"]
    return lock


async def test_two_processes_at_once_fetch_once(mirror: list[str], one_jar: LockFile, tmp_path: Path) -> None:
    one_jar.save(tmp_path / "lock.toml")
    both = await asyncio.gather(*(asyncio.to_thread(kafka_jars.kafka_jars, tmp_path / "lock.toml") for _ in range(2)))
    assert both[0] == both[1]
    assert all(path.is_file() for path in both[0].paths)
    assert len([path for path in mirror if path.endswith(".jar")]) == 1


async def test_a_damaged_jar_in_the_cache_is_fetched_again(
    mirror: list[str], one_jar: LockFile, tmp_path: Path
) -> None:
    one_jar.save(tmp_path / "lock.toml")
    (jar,) = (await asyncio.to_thread(kafka_jars.kafka_jars, tmp_path / "lock.toml")).paths
    content = jar.read_bytes()
    jar.write_bytes(content[:-1])
    await asyncio.to_thread(kafka_jars.kafka_jars, tmp_path / "lock.toml")
    assert jar.read_bytes() == content


async def test_a_jar_with_another_checksum_is_refused_and_not_kept(
    mirror: list[str], one_jar: LockFile, tmp_path: Path
) -> None:
    one_jar.dependencies[0].sha256 = "0" * 64
    one_jar.save(tmp_path / "lock.toml")
    with pytest.raises(StackError, match=r"jspecify.*checksum mismatch"):
        await asyncio.to_thread(kafka_jars.kafka_jars, tmp_path / "lock.toml")
    assert not list((tmp_path / "cache").rglob("*.jar"))


async def test_an_entry_without_a_checksum_is_refused_before_anything_is_fetched(
    mirror: list[str], one_jar: LockFile, tmp_path: Path
) -> None:
    one_jar.dependencies[0].sha256 = None
    one_jar.save(tmp_path / "lock.toml")
    with pytest.raises(StackError, match=r"no sha256 for org\.jspecify:jspecify"):
        await asyncio.to_thread(kafka_jars.kafka_jars, tmp_path / "lock.toml")
    assert mirror == []


def test_the_committed_lock_file_pins_every_jar_and_names_no_address() -> None:
    text = kafka_jars.LOCK_PATH.read_text()
    lock = LockFile.load(kafka_jars.LOCK_PATH)
    assert len(lock.dependencies) == 46
    assert all(len(entry.sha256 or "") == 64 for entry in lock.dependencies)
    assert "://" not in text
