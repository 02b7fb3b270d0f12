"""Every connection that a client opened, so that an abandoned client leaves none behind (field report F53).

aiokafka 0.14 forgets the connection of a bootstrap that is cancelled while it waits for a frozen broker's metadata.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

import aiokafka.client
from aiokafka.conn import AIOKafkaConnection

_opened: ContextVar[WeakSet[AIOKafkaConnection] | None] = ContextVar("opened connections", default=None)
_create_conn = aiokafka.client.create_conn


class Connections:
    """The connections of one client."""

    def __init__(self) -> None:
        self._opened: WeakSet[AIOKafkaConnection] = WeakSet()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note what is opened within, also by the tasks that are made within, for as long as they live."""
        token = _opened.set(self._opened)
        try:
            yield
        finally:
            _opened.reset(token)

    def close(self) -> None:
        """Close what is still open."""
        for connection in list(self._opened):
            connection.close()


async def _create_and_note(*arguments: Any, **options: Any) -> AIOKafkaConnection:
    connection = await _create_conn(*arguments, **options)
    opened = _opened.get()
    if opened is not None:
        opened.add(connection)
    return connection


aiokafka.client.create_conn = _create_and_note
