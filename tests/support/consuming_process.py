"""A consumer process for a test, whose handler kills the process when it sees one of the events named to it.

Run as `python -m tests.support.consuming_process <JSON>`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from uuid import UUID

from shared.database import Database
from shared.errors import MessageRejected
from shared.inbox.caution import Caution
from shared.inbox.consumer import InboxConsumer, InboxSettings
from shared.inbox.messages import Incoming
from shared.kafka.settings import KafkaSettings
from shared.lifecycle import running
from shared.unit_of_work import UnitOfWork, UnitsOfWork
from tests.support.inbox import EffectHandler, Happened
from tests.support.outbox import database_settings


class DyingHandler(EffectHandler):
    """Handles events, and is killed by one of them."""

    def __init__(self, topic: str, kills: int) -> None:
        super().__init__(topic)
        self._kills = kills

    async def handle(self, work: UnitOfWork, events: Sequence[Incoming[Happened]]) -> Mapping[UUID, MessageRejected]:
        if any(event.message.number == self._kills for event in events):
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().handle(work, events)


async def main(
    url: str, bootstrap_servers: str, topic: str, group: str, kills: int = -1, instance_id: str | None = None
) -> None:
    """Consume until SIGTERM; the event with the number `kills` is the one that kills."""
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    database = Database(database_settings(url, pool_size=4))
    settings = InboxSettings(group=group, instance_id=instance_id, session_timeout_seconds=6.0, max_batch_records=500)
    consumer = InboxConsumer(
        settings=settings,
        kafka=KafkaSettings(bootstrap_servers, client_id="test", request_timeout_seconds=10),
        database=database,
        units=UnitsOfWork(database),
        handler=DyingHandler(topic, kills),
        caution=Caution(database, group, settings.max_batch_records),
    )
    async with running([consumer]):
        await stopping.wait()
    await database.close()


if __name__ == "__main__":
    asyncio.run(main(**json.loads(sys.argv[1])))
