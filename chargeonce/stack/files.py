"""Log files of children, and a lock between processes."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from chargeonce.stack.errors import StackError

_OTHER_HOLDER_DEADLINE_SECONDS = 600.0
_LARGEST_LOG_BYTES = 16 * 1024 * 1024


def open_log(path: Path) -> IO[bytes]:
    """Open a log to append to it; one that has grown past 16 MiB is set aside as `<name>.1` first."""
    if path.exists() and path.stat().st_size > _LARGEST_LOG_BYTES:
        path.replace(path.with_name(f"{path.name}.1"))
    log = path.open("ab")
    log.seek(0, os.SEEK_END)
    return log


def last_lines(path: Path, *, start: int = 0, count: int = 15) -> str:
    """The end of a log file from offset `start` on, indented, for an error message."""
    try:
        with path.open("rb") as log:
            log.seek(max(start, path.stat().st_size - 65536))
            lines = log.read().decode(errors="replace").splitlines()
    except OSError:
        return "  (no log)"
    return "\n".join(f"  {line}" for line in lines[-count:]) or "  (nothing in the log)"


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold a lock between processes; it is free again when its holder ends in whatever way."""
    with path.open("a") as lock:
        deadline = time.monotonic() + _OTHER_HOLDER_DEADLINE_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise StackError(f"another process has held {path} for ten minutes: end it and try again") from None
                time.sleep(0.1)
        yield
