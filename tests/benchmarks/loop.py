"""The event loop of every subject: uvloop where it is installed, for the product and for its baselines alike."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a subject to its end."""
    with asyncio.Runner(loop_factory=_factory()) as runner:
        runner.run(main)


def name() -> str:
    """Return which loop is running."""
    return type(asyncio.get_running_loop()).__module__.partition(".")[0]


def _factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop
