"""The jars of Apache Kafka: pinned in kafka.lock.toml, fetched once, checked at every use, kept outside the clone."""

import hashlib
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from jgo.env import LockFile
from jgo.maven import MavenContext

from chargeonce.stack.errors import StackError
from chargeonce.stack.files import exclusive

LOCK_PATH = Path(__file__).with_name("kafka.lock.toml")

_THREADS = 6
_ATTEMPTS = 3
_REQUEST_TIMEOUT_SECONDS = 30


@dataclass(frozen=True)
class KafkaJars:
    """The folder of one set of jars, and their paths in the order of the class path."""

    folder: Path
    paths: tuple[Path, ...]


def cache_directory() -> Path:
    """Where fetched and derived files are kept: `CHARGEONCE_CACHE`, else `chargeonce` in the user's XDG cache."""
    if chosen := os.environ.get("CHARGEONCE_CACHE"):
        return Path(chosen).absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "chargeonce"


def kafka_jars(lock_path: Path = LOCK_PATH) -> KafkaJars:
    """The pinned jars, from the cache or, when they are not there or damaged, from the package repository.

    Blocks (network, hashing): call it in a thread. Two processes at once fetch once. Needs no network and writes
    nothing when the cache is complete.

    Raises StackError when an entry of the lock file has no sha256, a file has another one, or fetching fails.
    """
    lock = LockFile.load(lock_path)
    coordinates = _coordinates(lock)
    folder = cache_directory() / _folder_name(lock)
    if lock.verify_checksums(folder):
        _fetch_once(lock, coordinates, folder)
    return KafkaJars(folder, tuple(folder / _path_in_repository(entry) for entry in lock.dependencies))


def _coordinates(lock: LockFile) -> list[str]:
    unpinned = [f"{entry.groupId}:{entry.artifactId}" for entry in lock.dependencies if not entry.sha256]
    if unpinned or not lock.dependencies:
        raise StackError(
            f"the Kafka lock file pins no sha256 for {', '.join(unpinned) or 'any jar'}, so nothing is fetched: "
            "restore chargeonce/stack/kafka.lock.toml"
        )
    return [f"{entry.groupId}:{entry.artifactId}:{entry.version}" for entry in lock.dependencies]


def _folder_name(lock: LockFile) -> str:
    """One folder for each set of jars, so that two versions of this project can run side by side."""
    kafka = next((entry.version for entry in lock.dependencies if entry.artifactId.startswith("kafka_")), "unknown")
    content = "".join(sorted(f"{entry.artifactId} {entry.version} {entry.sha256}\n" for entry in lock.dependencies))
    return f"kafka-{kafka}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"


def _path_in_repository(entry: object) -> Path:
    group, artifact, version = (str(getattr(entry, name)) for name in ("groupId", "artifactId", "version"))
    return Path(*group.split("."), artifact, version, f"{artifact}-{version}.jar")


def _fetch_once(lock: LockFile, coordinates: list[str], folder: Path) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(folder.with_name(f"{folder.name}.lock")):
            if lock.verify_checksums(folder):
                _fetch(lock, coordinates, folder)
    except OSError as error:
        raise StackError(
            f"Kafka's jars cannot be kept in {folder.parent} ({error}): set CHARGEONCE_CACHE to a folder you can write"
        ) from error


def _fetch(lock: LockFile, coordinates: list[str], folder: Path) -> None:
    """Fetch aside, check, rename: a folder that exists was complete once."""
    aside = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        context = MavenContext(repo_cache=aside, timeout=_REQUEST_TIMEOUT_SECONDS)
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="kafka-jars") as threads:
            list(threads.map(lambda coordinate: _download(context, coordinate), coordinates))
        if wrong := lock.verify_checksums(aside):
            raise StackError(
                "fetched files are not those of the Kafka lock file and were thrown away: "
                f"{'; '.join(wrong)}. Ask who runs the proxy or mirror in between"
            )
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _download(context: MavenContext, coordinate: str) -> None:
    artifact = context.create_dependency(coordinate).artifact
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            artifact.resolve()
            return
        except Exception as error:  # the resolver raises its own, its HTTP client's and the system's
            if artifact.cached_path:
                artifact.cached_path.unlink(missing_ok=True)
            if attempt == _ATTEMPTS:
                raise StackError(
                    f"{coordinate} could not be fetched ({error}). The first start needs the network: connect, or set "
                    "HTTPS_PROXY (and REQUESTS_CA_BUNDLE for a proxy with its own authority), then try again"
                ) from error
            time.sleep(0.5 * attempt)
