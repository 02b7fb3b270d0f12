"""Children: supervised, restarted, ended, and none of them left behind."""

import asyncio
import io
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable

import psutil
import pytest

from chargeonce.stack import LinePrinter, StackError, Supervisor, free_ports
from chargeonce.stack.processes import port_is_free, spawn

READY_THEN_SLEEP = "import time; print('ready', flush=True); time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
)


class Record:
    """What a supervisor said, and a way to wait for it."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.exits: list[tuple[str, int]] = []

    def log(self, name: str, text: str) -> None:
        self.lines.append((name, text))

    def exited(self, name: str, status: int) -> None:
        self.exits.append((name, status))

    async def until(self, condition: Callable[[], bool], deadline_seconds: float = 15) -> None:
        async with asyncio.timeout(deadline_seconds):
            while not condition():
                await asyncio.sleep(0.01)

    def ready(self, name: str) -> int:
        return self.lines.count((name, "ready"))


@pytest.fixture
def record() -> Record:
    return Record()


@pytest.fixture
async def supervisor(record: Record) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(log=record.log, on_exit=record.exited, stop_deadline_seconds=5, backoff_seconds=0.02)
    yield supervisor
    await supervisor.stop()


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


async def test_what_dies_is_started_again_and_what_is_stopped_is_not(supervisor: Supervisor, record: Record) -> None:
    first = await supervisor.start("worker", _python(READY_THEN_SLEEP), restart=True)
    await record.until(lambda: record.ready("worker") == 1)
    supervisor.kill("worker")
    await record.until(lambda: record.ready("worker") == 2)
    assert record.exits == [("worker", -signal.SIGKILL)]
    second = supervisor.pid("worker")
    assert second not in (None, first)

    await supervisor.stop()
    assert record.exits[1:] == [("worker", -signal.SIGTERM)]
    assert supervisor.pid("worker") is None
    assert not psutil.pid_exists(first)
    assert second is not None
    assert not psutil.pid_exists(second)


async def test_what_is_not_to_be_restarted_stays_down_and_its_status_is_known(
    supervisor: Supervisor, record: Record
) -> None:
    await supervisor.start("job", _python("print('done'); raise SystemExit(3)"))
    assert await supervisor.wait("job") == 3
    assert record.exits == [("job", 3)]
    assert record.lines == [("job", "done")]


async def test_a_child_that_fails_at_once_is_retried_ever_more_slowly(record: Record) -> None:
    supervisor = Supervisor(log=record.log, on_exit=record.exited, restart=True, backoff_seconds=0.05)
    started = asyncio.get_running_loop().time()
    await supervisor.start("broken", ["false"])
    try:
        await record.until(lambda: len(record.exits) == 4)
    finally:
        await supervisor.stop()
    assert asyncio.get_running_loop().time() - started >= 0.05 + 0.1 + 0.2


async def test_restart_gives_a_new_process_with_the_same_command(supervisor: Supervisor, record: Record) -> None:
    first = await supervisor.start("service", _python(READY_THEN_SLEEP))
    await record.until(lambda: record.ready("service") == 1)
    second = await supervisor.restart("service")
    await record.until(lambda: record.ready("service") == 2)
    assert second != first
    assert supervisor.pid("service") == second
    assert record.exits == [("service", -signal.SIGTERM)]


async def test_stop_ends_all_within_one_deadline_even_those_that_ignore_it(record: Record) -> None:
    supervisor = Supervisor(log=record.log, on_exit=record.exited, stop_deadline_seconds=0.3, restart=True)
    for name in ("one", "two"):
        await supervisor.start(name, _python(STUBBORN))
    await supervisor.start("polite", _python(READY_THEN_SLEEP))
    await record.until(lambda: all(map(record.ready, ("one", "two", "polite"))))
    await asyncio.wait_for(supervisor.stop(), 5)
    assert sorted(record.exits) == [
        ("one", -signal.SIGKILL),
        ("polite", -signal.SIGTERM),
        ("two", -signal.SIGKILL),
    ]


async def test_no_child_becomes_a_zombie(supervisor: Supervisor, record: Record) -> None:
    for number in range(5):
        await supervisor.start(f"short-{number}", ["true"])
    await record.until(lambda: len(record.exits) == 5)
    zombies = [child for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE]
    assert zombies == []


async def test_two_children_cannot_share_a_name(supervisor: Supervisor) -> None:
    await supervisor.start("api", _python(READY_THEN_SLEEP))
    with pytest.raises(ValueError, match="api"):
        await supervisor.start("api", _python(READY_THEN_SLEEP))


async def test_output_is_handed_on_by_line_whatever_it_is(supervisor: Supervisor, record: Record) -> None:
    code = (
        "import sys, os\n"
        "os.write(1, b'half '); os.write(1, b'line\\nbad \\xff\\n' + b'x' * 200000 + b'\\nlast without end')\n"
    )
    await supervisor.start("talker", _python(code))
    await supervisor.wait("talker")
    text = [line for _, line in record.lines]
    assert text[:2] == ["half line", "bad \N{REPLACEMENT CHARACTER}"]
    assert text[-1] == "last without end"
    assert sum(map(len, text[2:-1])) == 200000


async def test_a_program_that_does_not_exist_says_so_in_its_log(supervisor: Supervisor, record: Record) -> None:
    await supervisor.start("ghost", ["/nonexistent/program"])
    assert await supervisor.wait("ghost") == 127
    assert record.lines == [("ghost", "/nonexistent/program: [Errno 2] No such file or directory")]


async def test_a_descendant_that_holds_the_output_open_does_not_hold_up_the_end(
    supervisor: Supervisor, record: Record
) -> None:
    await supervisor.start("parent", ["sh", "-c", "sleep 600 & echo $!"])
    await asyncio.wait_for(supervisor.wait("parent"), 10)
    os.kill(int(record.lines[0][1]), signal.SIGKILL)


async def test_ctrl_c_in_the_terminal_reaches_only_the_parent(supervisor: Supervisor) -> None:
    pid = await supervisor.start("service", _python(READY_THEN_SLEEP))
    assert os.getpgid(pid) == pid != os.getpgrp()


async def test_children_are_refused_outside_the_main_thread() -> None:
    with pytest.raises(RuntimeError, match="main thread"):
        await asyncio.to_thread(asyncio.run, spawn(["true"]))
    assert threading.current_thread() is threading.main_thread()


def test_lines_are_prefixed_and_plain_when_nobody_watches() -> None:
    stream = io.StringIO()
    printer = LinePrinter(stream, width=6)
    printer("relay", "sent")
    printer("consumer", "received")
    assert stream.getvalue() == "relay  | sent\nconsumer | received\n"


def test_names_are_coloured_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    LinePrinter(stream)("api", "up")
    assert stream.getvalue() == "\x1b[36mapi |\x1b[0m up\n"


def test_a_stream_that_went_away_is_written_to_no_more() -> None:
    stream = io.StringIO()
    printer = LinePrinter(stream)
    stream.close()
    printer("api", "up")
    printer("api", "still up")


def test_free_ports_are_free_different_and_below_the_ephemeral_range() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert all(map(port_is_free, ports))
    assert max(ports) < 32768


def test_more_ports_than_there_are_is_an_error() -> None:
    with pytest.raises(StackError, match="TCP ports are free"):
        free_ports(70000)
