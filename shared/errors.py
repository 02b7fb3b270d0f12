"""The one error tree of both services, and the one place that tells transient failures from permanent ones.

ServiceError                  status 500
├── InvalidInput        422   the caller sent something that can never be accepted
│   ├── TooLarge        413
│   ├── BadRequest      400   what surrounds the content is malformed: a header
│   └── KeyReused       422   an Idempotency-Key that stands for another request
├── NotFound            404
├── Conflict            409
│   └── InProgress      409   the same request is being worked on; carries Retry-After
├── Unavailable         503   try again later; carries Retry-After
├── Refused                   this process must not run as it is configured; says what to do
├── LeaseLost                 another process owns the work now
├── MessageRejected           a message that no retry can make acceptable; carries a reason code
└── KafkaFailure              the broker or the client failed; `permanent` when a retry cannot help
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import asyncpg
from sqlalchemy.dialects.postgresql.asyncpg import AsyncAdapt_asyncpg_dbapi as _Driver
from sqlalchemy.exc import DBAPIError, InterfaceError
from sqlalchemy.exc import TimeoutError as PoolTimeout


@dataclass(frozen=True, slots=True)
class FieldError:
    """One refused field: where it stands (`items.0.quantity`), and what to send instead."""

    field: str
    message: str


class ServiceError(Exception):
    """Root of the tree. `code` is stable and documented, `status` is the HTTP status it becomes."""

    code = "internal-error"
    title = "Something failed on our side."
    status = 500

    def __init__(self, detail: str = "") -> None:
        super().__init__(detail or self.title)
        self.detail = detail or self.title


class InvalidInput(ServiceError):
    """Input that can never be accepted. `fields` names each refused field."""

    code = "invalid-input"
    title = "The request was refused; nothing was stored."
    status = 422

    def __init__(self, detail: str, fields: Sequence[FieldError] = ()) -> None:
        super().__init__(detail)
        self.fields = tuple(fields)


class TooLarge(InvalidInput):
    """More bytes than the limit that the message names."""

    code = "too-large"
    title = "The request is too large; nothing was stored."
    status = 413


class BadRequest(InvalidInput):
    """A request whose headers are malformed."""

    code = "bad-request"
    status = 400


class KeyReused(InvalidInput):
    """An Idempotency-Key that was used for another request."""

    code = "idempotency-key-reused"


class NotFound(ServiceError):
    """No such resource."""

    code = "not-found"
    title = "There is no such resource."
    status = 404


class Conflict(ServiceError):
    """The request contradicts what is stored."""

    code = "conflict"
    title = "The request contradicts what is stored."
    status = 409


class InProgress(Conflict):
    """The same request is being worked on. `retry_after_seconds` becomes the Retry-After header."""

    code = "request-in-progress"
    title = "The same request is being worked on; try again."

    def __init__(self, detail: str = "", retry_after_seconds: int = 1) -> None:
        super().__init__(detail)
        self.retry_after_seconds = retry_after_seconds


class Unavailable(ServiceError):
    """Something this request needs is away for now. `retry_after_seconds` becomes the Retry-After header."""

    code = "unavailable"
    title = "Something this request needs is away for now; try again."
    status = 503

    def __init__(self, detail: str = "", retry_after_seconds: int = 1) -> None:
        super().__init__(detail)
        self.retry_after_seconds = retry_after_seconds


class Refused(ServiceError):
    """The process must not do its work as things are. The message names the cause and what to do about it."""

    code = "refused"
    title = "This process refuses to run as things are."


class LeaseLost(ServiceError):
    """Another process took over. What was done under the lease and not recorded is done again by its new owner."""

    code = "lease-lost"
    title = "Another process owns this work now."


class MessageRejected(ServiceError):
    """A message that no retry makes acceptable. `reason` is a code of docs/operations.md, never free text."""

    code = "message-rejected"
    title = "The message cannot be processed."

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class KafkaFailure(ServiceError):
    """A Kafka call failed. `permanent`: the broker refuses these very bytes, sending them again cannot succeed.

    `remedy` is for the operator, where no waiting helps and the record is not at fault (no such topic, no permission).
    """

    code = "kafka-failure"
    title = "Kafka did not take the request."

    def __init__(self, detail: str, *, permanent: bool = False, remedy: str = "") -> None:
        super().__init__(detail)
        self.permanent = permanent
        self.remedy = remedy

    @property
    def kind(self) -> str:
        """Return `refused`, `misconfigured` or `transient`: a label for metrics."""
        return "refused" if self.permanent else "misconfigured" if self.remedy else "transient"


# SQLSTATEs after which the same statement may succeed (PostgreSQL docs, appendix A): the classes connection (08),
# resources (53), operator intervention (57), system (58), and the codes of a lost race or a time limit.
_TRANSIENT_CLASSES = ("08", "53", "57", "58")
_TRANSIENT_CODES = frozenset(
    {
        "40001",  # serialization_failure
        "40P01",  # deadlock_detected
        "55P03",  # lock_not_available (lock_timeout)
        "25P03",  # idle_in_transaction_session_timeout
        "25P04",  # transaction_timeout
        "25006",  # read_only_sql_transaction: a failover in progress
        "55006",  # object_in_use
    }
)
_CHECK_VIOLATION = "23514"
# OSErrors of this machine's files: no network comes back from them.
_LOCAL_FILE_ERRORS = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)


def is_transient(error: BaseException) -> bool:
    """Tell whether the same work may succeed later without anyone changing it.

    A check violation without a constraint name is PostgreSQL's "no partition of relation found for row": the
    infrastructure lacks a partition, so the row is not at fault (design: inbox).
    """
    if isinstance(error, KafkaFailure):
        return not error.permanent
    if isinstance(error, _LOCAL_FILE_ERRORS):
        return False
    if isinstance(error, Unavailable | LeaseLost | PoolTimeout | InterfaceError | OSError | TimeoutError):
        return True
    if isinstance(error, DBAPIError):
        # A migration changed a column under a cached plan; the next attempt makes a new one.
        if error.connection_invalidated or isinstance(error.orig, _Driver.InvalidCachedStatementError):
            return True
        return _is_transient_state(sqlstate(error), constraint_name(error))
    if isinstance(error, asyncpg.PostgresError):
        return _is_transient_state(error.sqlstate or "", getattr(error, "constraint_name", None))
    return isinstance(error, asyncpg.InterfaceError)


def _is_transient_state(state: str, constraint: str | None) -> bool:
    if state == _CHECK_VIOLATION:
        return constraint is None
    return state in _TRANSIENT_CODES or state.startswith(_TRANSIENT_CLASSES)


def sqlstate(error: BaseException) -> str:
    """Return the five-character SQLSTATE of a database error, or an empty string."""
    original = getattr(error, "orig", None)
    return str(getattr(original, "sqlstate", None) or getattr(error, "sqlstate", None) or "")


def constraint_name(error: BaseException) -> str | None:
    """Return the name of the violated constraint, where the database told it."""
    # Not SQLAlchemy's driver_exception: that property raises for an error which no driver raised.
    original = getattr(error, "orig", None)
    for candidate in (original, getattr(original, "__cause__", None)):
        name = getattr(candidate, "constraint_name", None)
        if name is not None:
            return str(name)
    return None
