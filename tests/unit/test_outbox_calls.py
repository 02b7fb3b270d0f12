"""What wakes a relay tells it where to look, and is only a hint."""

from __future__ import annotations

import asyncio

import pytest

from shared.outbox.calls import Calls, call_for


def test_a_call_names_its_buckets_once_and_in_order() -> None:
    assert call_for([7, 3, 7, 95]) == "3,7,95"


def test_a_call_for_many_buckets_is_one_for_everything() -> None:
    assert call_for(range(24)) != ""
    assert call_for(range(25)) == ""


def test_calls_are_gathered_until_they_are_taken() -> None:
    calls = Calls()
    assert calls.take() == set(), "the first look is at everything"
    calls.hear("3")
    calls.hear("7,3")
    assert calls.take() == {3, 7}
    assert calls.take() == set()


@pytest.mark.parametrize("call", ["", "x", "3,", "3;4", "{3}"])
def test_a_call_for_everything_outweighs_one_for_a_bucket(call: str) -> None:
    calls = Calls()
    calls.take()
    calls.hear("3")
    calls.hear(call)
    assert calls.take() == set()


def test_buckets_that_do_not_exist_are_passed_over() -> None:
    calls = Calls()
    calls.take()
    calls.hear("-1,5,96,100000")
    assert calls.take() == {5}


async def test_waiting_ends_with_a_call_or_in_time() -> None:
    calls = Calls()
    await calls.wait(60)  # nothing was looked at yet
    calls.take()
    await calls.wait(0.01)
    assert calls.take() == set()
    for call in (calls.call, lambda: calls.hear("5")):
        waiting = asyncio.create_task(calls.wait(60))
        await asyncio.sleep(0)
        call()
        call()
        async with asyncio.timeout(5):
            await waiting
        await calls.wait(60)  # it is still to be taken
        calls.take()


async def test_a_cancelled_wait_leaves_nothing_to_wake() -> None:
    calls = Calls()
    calls.take()
    waiting = asyncio.create_task(calls.wait(60))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    calls.call()
    await calls.wait(60)
