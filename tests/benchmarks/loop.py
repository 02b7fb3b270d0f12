"""The event loop of every subject, the product's for its baselines as well, and the memory settings of some."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from shared import memory


def run(main: Coroutine[Any, Any, None], *, settled: bool) -> None:
    """Run a subject to its end; `settled` ones with the product's memory settings."""
    if settled:
        memory.settle()
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
