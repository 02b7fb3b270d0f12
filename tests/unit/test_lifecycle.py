"""Background services survive what their work raises, and stop when told."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest
from sqlalchemy.exc import DBAPIError

from shared.errors import Refused
from shared.lifecycle import BackgroundService, Backoff, State, describe, running
from tests.support.outbox import until


class Flaky(BackgroundService):
    name = "flaky"

    def __init__(self, *outcomes: BaseException | None) -> None:
        super().__init__()
        self.backoff = Backoff(0.001, 0.002)
        self.outcomes = list(outcomes)
        self.runs = 0

    async def run(self) -> None:
        self.runs += 1
        if self.outcomes and (outcome := self.outcomes.pop(0)):
            raise outcome
        await self.stopping.wait()


async def test_a_service_that_fails_is_run_again() -> None:
    service = Flaky(ConnectionResetError(), ValueError("a bug"), None)
    async with running([service]):
        await until(lambda: service.runs == 3)
        assert service.ready().state is State.DEGRADED


async def test_a_cancellation_that_a_library_lets_out_does_not_end_a_service() -> None:
    service = Flaky(asyncio.CancelledError(), None)
    async with running([service]):
        await until(lambda: service.runs == 2)


async def test_a_service_past_its_stop_deadline_is_cancelled_for_good() -> None:
    class Hanging(BackgroundService):
        stop_deadline_seconds = 0.05
        runs = 0

        async def run(self) -> None:
            self.runs += 1
            await asyncio.Event().wait()

    service = Hanging()
    async with running([service]):
        await until(lambda: service.runs == 1)
    assert service.runs == 1
    assert service.ready().state is State.DOWN


async def test_a_refusal_is_told_as_down_with_its_reason() -> None:
    service = Flaky(Refused("set synchronous_commit to on"))
    async with running([service]):
        await until(lambda: service.ready().state is State.DOWN and "synchronous_commit" in service.ready().reason)


async def test_stopping_waits_for_the_unit_in_hand() -> None:
    finished = []

    class Unit(BackgroundService):
        async def run(self) -> None:
            await self.stopping.wait()
            await asyncio.sleep(0.05)
            finished.append(True)

    async with running([Unit()]):
        await asyncio.sleep(0)
    assert finished == [True]


async def test_a_service_that_does_not_stop_is_given_up_after_its_deadline() -> None:
    class Stuck(BackgroundService):
        stop_deadline_seconds = 0.05

        async def run(self) -> None:
            await asyncio.Event().wait()

    service = Stuck()
    await service.start()
    await asyncio.sleep(0)
    async with asyncio.timeout(3):
        await service.stop()
    assert service.ready().state is State.DOWN


@pytest.mark.parametrize("failures", [0, 3, 50])
def test_backoff_grows_to_its_most_and_keeps_some_jitter(failures: int) -> None:
    backoff = Backoff(0.1, 5.0)
    for _ in range(failures):
        backoff.next_seconds()
    ceiling = min(5.0, 0.1 * 2 ** min(failures, 30))
    waits = {round(Backoff.next_seconds(backoff), 6) for _ in range(1)}
    assert all(ceiling / 2 <= wait <= ceiling for wait in waits)
    backoff.reset()
    assert backoff.next_seconds() <= 0.1


async def test_an_error_that_even_the_classifier_cannot_read_does_not_end_the_service() -> None:
    class Unreadable(DBAPIError):
        def __init__(self) -> None:
            super().__init__("statement", {}, None)  # type: ignore[arg-type]

    service = Flaky(Unreadable(), None)
    async with running([service]):
        await until(lambda: service.runs == 2)


async def test_a_service_whose_task_ended_is_told_as_down() -> None:
    service = Flaky(None)
    await service.start()
    task = service._task
    assert task is not None
    task.cancel()
    await asyncio.wait({task})
    assert service.ready().state is State.DOWN
    await service.stop()


@pytest.mark.parametrize(
    "error",
    [
        asyncpg.InvalidSQLStatementNameError('prepared statement "__asyncpg_stmt_1__" does not exist'),
        asyncpg.DuplicatePreparedStatementError('prepared statement "__asyncpg_stmt_1__" already exists'),
    ],
)
def test_a_proxy_that_loses_prepared_statements_is_told_with_its_remedy(error: asyncpg.PostgresError) -> None:
    assert "max_prepared_statements" in describe(error)
    assert "max_prepared_statements" in describe(DBAPIError("SELECT 1", None, error))
    assert "max_prepared_statements" not in describe(asyncpg.UniqueViolationError("twice"))
