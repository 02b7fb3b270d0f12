"""A consumer group's member closes whatever its client library does, here without any broker."""

from __future__ import annotations

import asyncio

import pytest

from shared.kafka.consumer import ConsumerSettings, GroupConsumer
from shared.kafka.settings import KafkaSettings


async def nothing() -> None:
    """What a member does before a rebalance."""


def a_member(leave_deadline_seconds: float = 5.0) -> GroupConsumer:
    settings = ConsumerSettings(
        group="a-group",
        topics=("a-topic",),
        instance_id=None,
        session_timeout_seconds=10,
        rebalance_timeout_seconds=40,
        max_poll_interval_seconds=300,
        commit_deadline_seconds=10,
        leave_deadline_seconds=leave_deadline_seconds,
    )
    kafka = KafkaSettings("127.0.0.1:1", client_id="a-client")
    return GroupConsumer(kafka, settings, before_rebalance=nothing, after_rebalance=lambda: None)


async def test_closing_survives_the_cancellation_of_a_fetch_that_the_client_lets_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    member = a_member()
    really_stop = member._consumer.stop

    async def stop() -> None:
        await really_stop()
        raise asyncio.CancelledError

    monkeypatch.setattr(member._consumer, "stop", stop)
    await member.close()


async def test_closing_gives_up_on_a_client_that_hangs_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    member = a_member(leave_deadline_seconds=0.05)
    really_stop = member._consumer.stop

    async def stop() -> None:
        await really_stop()
        await asyncio.Event().wait()

    monkeypatch.setattr(member._consumer, "stop", stop)
    async with asyncio.timeout(5):
        await member.close()


async def test_closing_ends_when_the_closing_task_itself_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    member = a_member()
    really_stop = member._consumer.stop
    stopping = asyncio.Event()

    async def stop() -> None:
        await really_stop()
        stopping.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(member._consumer, "stop", stop)
    closing = asyncio.create_task(member.close())
    await stopping.wait()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
