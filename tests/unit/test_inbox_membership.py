"""The membership's bookkeeping over rebalances, with a scripted client in the place of aiokafka's."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.structs import ConsumerRecord

from shared.kafka import consumer as module
from shared.kafka.consumer import ConsumerSettings, GroupConsumer
from shared.kafka.records import Partition
from shared.kafka.settings import KafkaSettings

HERE = TopicPartition("t", 0)


class ScriptedClient:
    """Returns what the test puts into `answers` and notes what it is told."""

    def __init__(self) -> None:
        self.answers: asyncio.Queue[dict[TopicPartition, list[ConsumerRecord]]] = asyncio.Queue()
        self.sought: list[tuple[TopicPartition, int]] = []
        self.paused: set[TopicPartition] = set()
        self.commits: list[dict[TopicPartition, int]] = []
        self.listener: Any = None
        self._coordinator = type("Coordinator", (), {"member_id": "m", "coordinator_id": 1})()

    def subscribe(self, topics: list[str], listener: object) -> None:
        self.listener = listener

    def assignment(self) -> set[TopicPartition]:
        return {HERE}

    async def getmany(self, **_: object) -> dict[TopicPartition, list[ConsumerRecord]]:
        return await self.answers.get()

    async def committed(self, _partition: TopicPartition) -> int | None:
        return None

    async def commit(self, offsets: dict[TopicPartition, int]) -> None:
        self.commits.append(offsets)

    def seek(self, partition: TopicPartition, offset: int) -> None:
        self.sought.append((partition, offset))

    def pause(self, *partitions: TopicPartition) -> None:
        self.paused |= set(partitions)

    def resume(self, *partitions: TopicPartition) -> None:
        self.paused -= set(partitions)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> ScriptedClient:
    made = ScriptedClient()
    monkeypatch.setattr(module, "_new_client", lambda kafka, settings: made)
    return made


@pytest.fixture
def member(client: ScriptedClient) -> GroupConsumer:
    async def nothing_in_hand() -> None: ...

    settings = ConsumerSettings(
        group="g",
        topics=("t",),
        instance_id=None,
        session_timeout_seconds=6,
        rebalance_timeout_seconds=10,
        max_poll_interval_seconds=60,
        commit_deadline_seconds=1,
        leave_deadline_seconds=1,
    )
    return GroupConsumer(
        KafkaSettings("x:1", client_id="test"),
        settings,
        before_rebalance=nothing_in_hand,
        after_rebalance=lambda: None,
    )


def records(*offsets: int) -> dict[TopicPartition, list[ConsumerRecord]]:
    return {HERE: [ConsumerRecord("t", 0, offset, 0, 0, None, b"", None, 0, 0, ()) for offset in offsets]}


async def rebalance(client: ScriptedClient) -> None:
    await client.listener.on_partitions_revoked({HERE})
    await client.listener.on_partitions_assigned({HERE})


async def test_f47_records_of_a_poll_that_a_revoke_overtook_are_void(
    client: ScriptedClient, member: GroupConsumer
) -> None:
    await rebalance(client)
    assert not (await member.poll(max_records=10, wait_seconds=0.0)).records
    client.answers.put_nowait(records(5, 6))
    assert member._poll_task is not None
    await asyncio.wait({member._poll_task})
    await rebalance(client)
    assert not (await member.poll(max_records=10, wait_seconds=0.0)).records
    client.answers.put_nowait(records(3))
    fetched = await member.poll(max_records=10, wait_seconds=1.0)
    assert [record.offset for record in fetched.records] == [3]


async def test_records_that_arrive_between_the_assignment_and_its_callback_are_kept(
    client: ScriptedClient, member: GroupConsumer
) -> None:
    await rebalance(client)
    await client.listener.on_partitions_revoked({HERE})
    client.answers.put_nowait(records(7))
    await member.poll(max_records=10, wait_seconds=0.0)  # begins, and may end here or below
    await client.listener.on_partitions_assigned({HERE})
    client.answers.put_nowait(records(8))
    seen = [(await member.poll(max_records=10, wait_seconds=0.2)).records for _ in range(2)]
    assert [record.offset for batch in seen for record in batch][-1] == 8


async def test_f21_progress_of_an_older_assignment_is_neither_sought_nor_committed(
    client: ScriptedClient, member: GroupConsumer
) -> None:
    await rebalance(client)
    old = member.epoch
    member.settled({Partition("t", 0): 4}, old)
    await rebalance(client)
    member.settled({Partition("t", 0): 5}, old)
    member.seek_back({Partition("t", 0): 5}, old)
    assert await member.commit()
    assert client.commits == []
    assert client.sought == []
    member.settled({Partition("t", 0): 6}, member.epoch)
    assert await member.commit()
    assert client.commits == [{HERE: 6}]
    assert not member.has_uncommitted


async def test_f47_a_pause_outlives_a_rebalance_and_its_polls_lose_no_record(
    client: ScriptedClient, member: GroupConsumer
) -> None:
    await rebalance(client)
    member.pause()
    client.paused.clear()  # what aiokafka does
    await rebalance(client)
    assert client.paused == {HERE}
    client.answers.put_nowait(records(9, 10))
    await member.poll_paused(1.0)
    assert client.sought == [(HERE, 9)]
    member.resume()
    assert client.paused == set()
