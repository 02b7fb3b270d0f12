"""One function tells transient from permanent."""

from __future__ import annotations

import asyncpg
import pytest
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from shared.errors import InvalidInput, KafkaFailure, LeaseLost, MessageRejected, Unavailable, is_transient


def database_error(state: str, constraint: str | None = None) -> asyncpg.PostgresError:
    """The driver's own exception for what a server told: C is the SQLSTATE, M the message, n the constraint."""
    told = {"C": state, "M": "told by the database"} | ({"n": constraint} if constraint else {})
    error: asyncpg.PostgresError = asyncpg.PostgresError.new(told)
    return error


@pytest.mark.parametrize(
    "state", ["08006", "40001", "40P01", "55P03", "57P01", "57P03", "53300", "25P03", "25P04", "25006"]
)
def test_lost_races_and_absent_servers_are_transient(state: str) -> None:
    assert is_transient(database_error(state))


@pytest.mark.parametrize("state", ["23505", "22P02", "42P01", "22003", "23502"])
def test_bad_statements_and_data_are_permanent(state: str) -> None:
    assert not is_transient(database_error(state))


def test_a_missing_partition_is_infrastructure_and_a_failed_check_is_not() -> None:
    assert is_transient(database_error("23514"))
    assert not is_transient(database_error("23514", "ck_charge_amount_positive"))


def test_a_wrapped_error_counts_as_what_it_wraps() -> None:
    class Wrapped(Exception):
        sqlstate = "40P01"

    assert is_transient(DBAPIError("statement", {}, Wrapped()))
    assert not is_transient(IntegrityError("statement", {}, Exception()))
    assert is_transient(DBAPIError("statement", {}, Exception(), connection_invalidated=True))


@pytest.mark.parametrize(
    "error", [ConnectionResetError(), TimeoutError(), PoolTimeout(), Unavailable(), LeaseLost(), KafkaFailure("away")]
)
def test_absence_is_transient(error: BaseException) -> None:
    assert is_transient(error)


@pytest.mark.parametrize(
    "error",
    [
        InvalidInput("x"),
        MessageRejected("not_json", "x"),
        KafkaFailure("x", permanent=True),
        KeyError(),
        FileNotFoundError(),
    ],
)
def test_refusals_and_bugs_are_permanent(error: BaseException) -> None:
    assert not is_transient(error)
