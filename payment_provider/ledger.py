"""The provider's own ledger: which money moved, and what was answered to which idempotency key.

A payment and its idempotency record are one SQLite transaction (WAL, synchronous=FULL), so a SIGKILL leaves both or
neither, and what was answered is on disk. One writer thread owns the write connection; requests that wait while it
commits share the next transaction (group commit), so the disk's flush is paid once a batch.
"""

import asyncio
import json
import queue
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

from payment_provider.charges import ChargeRequest, decimal_text

SCHEMA_VERSION = 1  # the user_version that _SCHEMA ends with
LARGEST_BATCH = 1000
BUSY_TIMEOUT_SECONDS = 5.0

_SCHEMA = """
CREATE TABLE payment (
    payment_id      TEXT NOT NULL PRIMARY KEY,
    kind            TEXT NOT NULL CHECK (kind IN ('charge', 'refund')),
    order_id        INTEGER NOT NULL CHECK (typeof(order_id) = 'integer' AND order_id > 0),
    amount_minor    INTEGER NOT NULL CHECK (typeof(amount_minor) = 'integer' AND amount_minor > 0),
    currency        TEXT NOT NULL CHECK (length(currency) = 3),
    status          TEXT NOT NULL CHECK (status IN ('captured', 'declined')),
    decline_reason  TEXT CHECK ((decline_reason IS NOT NULL) = (status = 'declined')),
    idempotency_key TEXT NOT NULL,
    created_at      TEXT NOT NULL
) WITHOUT ROWID;
CREATE UNIQUE INDEX payment_by_order ON payment (order_id, payment_id);
CREATE TABLE idempotency_record (
    idempotency_key TEXT NOT NULL PRIMARY KEY,
    fingerprint     TEXT NOT NULL,
    payment_id      TEXT NOT NULL REFERENCES payment (payment_id),
    response_status INTEGER NOT NULL,
    response_body   TEXT NOT NULL,
    created_unix    REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE tally (
    name  TEXT NOT NULL PRIMARY KEY CHECK (name IN ('attempts', 'replays')),
    value INTEGER NOT NULL
) WITHOUT ROWID;
INSERT INTO tally (name, value) VALUES ('attempts', 0), ('replays', 0);
PRAGMA user_version = 1;
"""

_COLUMNS = "payment_id, kind, order_id, amount_minor, currency, status, decline_reason, idempotency_key, created_at"

T = TypeVar("T")


class LedgerError(Exception):
    """The ledger cannot be used. Nothing of the request in hand was kept."""


@dataclass(frozen=True, slots=True)
class Payment:
    """One row of the ledger."""

    payment_id: str
    kind: Literal["charge", "refund"]
    order_id: int
    amount_minor: int
    currency: str
    status: Literal["captured", "declined"]
    decline_reason: str | None
    idempotency_key: str
    created_at: str

    def public(self) -> dict[str, Any]:
        """The payment as the API shows it; a decline names its reason."""
        shown = {
            "payment_id": self.payment_id,
            "order_id": self.order_id,
            "amount": decimal_text(self.amount_minor, self.currency),
            "currency": self.currency,
            "status": self.status,
            "idempotency_key": self.idempotency_key,
            "created_at": self.created_at,
        }
        return shown if self.decline_reason is None else shown | {"decline_reason": self.decline_reason}


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to this key, made now or read from the store (`replayed`); it is durable when the caller sees it."""

    status: int
    body: str
    payment_id: str
    replayed: bool


@dataclass(frozen=True, slots=True)
class KeyReused:
    """The key belongs to a request with another body; nothing moved."""


ChargeOutcome = Answered | KeyReused


@dataclass(frozen=True, slots=True)
class PageCursor:
    """Position after which a page starts; (0, "") is the beginning."""

    order_id: int = 0
    payment_id: str = ""


@dataclass(frozen=True, slots=True)
class CurrencySummary:
    currency: str
    captured_count: int
    captured_total: str
    declined_count: int


@dataclass(frozen=True, slots=True)
class Summary:
    """Sums over the rows themselves, at one moment. `attempts` counts well-formed charge requests, `replays` those
    answered from the store."""

    currencies: list[CurrencySummary]
    attempts: int
    replays: int


@dataclass(frozen=True, slots=True)
class _Charge:
    key: str
    request: ChargeRequest
    decline_reason: str | None


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A charge, or None for a probe that only asks whether the writer lives, and who waits for it."""

    charge: _Charge | None
    answer: "asyncio.Future[ChargeOutcome | None]"


class _Attempt:
    """A request that was counted and went no further."""


class _Stop:
    pass


def prepare_ledger(path: Path) -> None:
    """Create the ledger file, or check that the one there is ours.

    Raises LedgerError with cause and remedy: not writable, not a database, or written by another version.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with closing(_connect(path)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("BEGIN IMMEDIATE")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if version == 0 and tables == 0:
                # executescript would commit first; statement by statement keeps creation all or nothing.
                for statement in _SCHEMA.split(";\n"):
                    connection.execute(statement)
            elif version != SCHEMA_VERSION:
                raise LedgerError(
                    f"The ledger {path} has schema version {version}, this provider knows {SCHEMA_VERSION}: "
                    "it was written by something else. Give another file with --ledger."
                )
            connection.execute("COMMIT")
    except (sqlite3.Error, OSError) as error:
        raise LedgerError(
            f"The ledger {path} cannot be opened ({error}), so no payment could be recorded. "
            "Give a writable file with --ledger."
        ) from error


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_SECONDS, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


class Ledger:
    """The ledger in use by one server: `await start()`, then charges and reads, then `await close()`.

    All methods belong to one event loop and none blocks it. After `idempotency_window_seconds` a key is unknown again,
    as at real providers: the same request would then move the money a second time.
    """

    def __init__(
        self,
        path: Path,
        idempotency_window_seconds: float,
        on_commit: Callable[[int, float], None] = lambda _requests, _seconds: None,
    ) -> None:
        self._path = path
        self._window_seconds = idempotency_window_seconds
        self._on_commit = on_commit
        self._inbox: queue.SimpleQueue[_Waiting | _Attempt | _Stop] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None
        self._readers = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger-reader")

    async def start(self) -> None:
        """Raises LedgerError as `prepare_ledger` does."""
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(prepare_ledger, self._path)
        connection = _connect(self._path)
        self._reading = _connect(self._path)
        self._writer = threading.Thread(target=self._write, args=(connection,), name="ledger-writer", daemon=True)
        self._writer.start()

    async def close(self) -> None:
        """Commit what waits, then let go of the file."""
        if self._writer is None:
            return
        self._inbox.put(_Stop())
        await asyncio.to_thread(self._writer.join)
        self._readers.shutdown()
        self._reading.close()

    # Writing

    async def charge(self, key: str, request: ChargeRequest, decline_reason: str | None = None) -> ChargeOutcome:
        """Move the money once for this key, or give the stored answer. `decline_reason` refuses a new payment.

        Raises LedgerError if the transaction failed; then nothing moved and the same key may be sent again.
        """
        outcome = await self._submit(_Charge(key, request, decline_reason))
        if outcome is None:
            raise LedgerError("The ledger gave no answer.")
        return outcome

    def note_attempt(self) -> None:
        """Count a well-formed request that is answered without the ledger. Written with the next batch, not awaited."""
        self._inbox.put(_Attempt())

    async def probe(self, deadline_seconds: float) -> None:
        """Raises LedgerError unless the writer takes and ends a transaction within the deadline."""
        try:
            await asyncio.wait_for(self._submit(None), deadline_seconds)
        except TimeoutError as error:
            raise LedgerError(f"The ledger did not answer within {deadline_seconds:g} s.") from error

    async def _submit(self, charge: _Charge | None) -> ChargeOutcome | None:
        answer: asyncio.Future[ChargeOutcome | None] = self._loop.create_future()
        self._inbox.put(_Waiting(charge, answer))
        return await answer

    def _write(self, connection: sqlite3.Connection) -> None:
        """The writer thread: one transaction for everything that waits."""
        stopping = False
        while not stopping:
            batch = self._next_batch()
            stopping = any(isinstance(item, _Stop) for item in batch)
            waiting = [item for item in batch if isinstance(item, _Waiting)]
            attempts = sum(not isinstance(item, _Stop) for item in batch)
            attempts -= sum(item.charge is None for item in waiting)
            began = time.monotonic()
            try:
                outcomes = self._commit_batch(connection, waiting, attempts)
            except Exception as error:
                # Whatever it was: a dead writer would leave every caller waiting for ever.
                _roll_back(connection)
                failure = LedgerError(f"The ledger could not write: {error}.")
                self._tell(_fail, [item.answer for item in waiting], failure)
            else:
                self._on_commit(len(waiting), time.monotonic() - began)
                self._tell(_resolve, [item.answer for item in waiting], outcomes)
        connection.close()

    def _next_batch(self) -> list[_Waiting | _Attempt | _Stop]:
        batch = [self._inbox.get()]
        while len(batch) < LARGEST_BATCH:
            try:
                batch.append(self._inbox.get_nowait())
            except queue.Empty:
                break
        return batch

    def _commit_batch(
        self, connection: sqlite3.Connection, waiting: Iterable[_Waiting], attempts: int
    ) -> list[ChargeOutcome | None]:
        connection.execute("BEGIN IMMEDIATE")
        outcomes = [None if item.charge is None else self._settle(connection, item.charge) for item in waiting]
        replays = sum(isinstance(outcome, Answered) and outcome.replayed for outcome in outcomes)
        for name, count in (("attempts", attempts), ("replays", replays)):
            if count:
                connection.execute("UPDATE tally SET value = value + ? WHERE name = ?", (count, name))
        connection.execute("COMMIT")
        return outcomes

    def _settle(self, connection: sqlite3.Connection, charge: _Charge) -> ChargeOutcome:
        now = time.time()
        stored = connection.execute(
            "SELECT fingerprint, response_status, response_body, payment_id FROM idempotency_record"
            " WHERE idempotency_key = ? AND created_unix > ?",
            (charge.key, now - self._window_seconds),
        ).fetchone()
        if stored is None:
            return _move_money(connection, charge, now)
        fingerprint, status, body, payment_id = stored
        if fingerprint != charge.request.fingerprint:
            return KeyReused()
        return Answered(status, body, payment_id, replayed=True)

    def _tell(self, settle: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(settle, *args)
        except RuntimeError:
            return  # the loop is closed: nobody waits any more

    # Reading

    async def page(self, after: PageCursor, limit: int, order_id: int | None = None) -> list[Payment]:
        """Up to `limit` payments after the cursor, ascending by (order_id, payment_id); of one order if given."""
        where, args = "(order_id, payment_id) > (?, ?)", [after.order_id, after.payment_id]
        if order_id is not None:
            where, args = f"{where} AND order_id = ?", [*args, order_id]
        rows = await self._read(
            f"SELECT {_COLUMNS} FROM payment WHERE {where} ORDER BY order_id, payment_id LIMIT ?",  # noqa: S608
            (*args, limit),
        )
        return [Payment(*row) for row in rows]

    async def find(self, payment_id: str) -> Payment | None:
        rows = await self._read(f"SELECT {_COLUMNS} FROM payment WHERE payment_id = ?", (payment_id,))  # noqa: S608
        return Payment(*rows[0]) if rows else None

    async def summary(self) -> Summary:
        # The sum is carried in two halves: a plain SUM over 64-bit integers can overflow, and TOTAL is a float.
        rows = await self._read(
            """
            SELECT 0, currency, count(*) FILTER (WHERE status = 'captured'),
                   coalesce(sum(amount_minor / 1000000000) FILTER (WHERE status = 'captured'), 0),
                   coalesce(sum(amount_minor % 1000000000) FILTER (WHERE status = 'captured'), 0),
                   count(*) FILTER (WHERE status = 'declined')
            FROM payment WHERE kind = 'charge' GROUP BY currency
            UNION ALL SELECT 1, name, value, 0, 0, 0 FROM tally
            ORDER BY 1, 2
            """,
            (),
        )
        currencies = [
            CurrencySummary(currency, captured, decimal_text(high * 10**9 + low, currency), declined)
            for part, currency, captured, high, low, declined in rows
            if part == 0
        ]
        tally = {name: value for part, name, value, *_ in rows if part == 1}
        return Summary(currencies, attempts=tally["attempts"], replays=tally["replays"])

    async def _read(self, statement: str, args: tuple[Any, ...]) -> list[Any]:
        def fetch() -> list[Any]:
            return self._reading.execute(statement, args).fetchall()

        try:
            return await self._loop.run_in_executor(self._readers, fetch)
        except sqlite3.Error as error:
            raise LedgerError(f"The ledger could not be read: {error}.") from error


def _move_money(connection: sqlite3.Connection, charge: _Charge, now: float) -> Answered:
    """The payment row and the answer to its key, in the caller's transaction."""
    payment = Payment(
        payment_id=str(uuid.uuid4()),
        kind="charge",
        order_id=charge.request.order_id,
        amount_minor=charge.request.amount_minor,
        currency=charge.request.currency,
        status="captured" if charge.decline_reason is None else "declined",
        decline_reason=charge.decline_reason,
        idempotency_key=charge.key,
        created_at=datetime.fromtimestamp(now, UTC).isoformat(timespec="microseconds"),
    )
    status = 201 if payment.status == "captured" else 402
    body = json.dumps(payment.public(), separators=(",", ":"))
    connection.execute(
        f"INSERT INTO payment ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",  # noqa: S608
        (
            payment.payment_id,
            payment.kind,
            payment.order_id,
            payment.amount_minor,
            payment.currency,
            payment.status,
            payment.decline_reason,
            payment.idempotency_key,
            payment.created_at,
        ),
    )
    # A record that is past its window gives way to the new one; its payment stays.
    connection.execute(
        "INSERT OR REPLACE INTO idempotency_record VALUES (?, ?, ?, ?, ?, ?)",
        (charge.key, charge.request.fingerprint, payment.payment_id, status, body, now),
    )
    return Answered(status, body, payment.payment_id, replayed=False)


def _roll_back(connection: sqlite3.Connection) -> None:
    if connection.in_transaction:
        connection.execute("ROLLBACK")


def _resolve(answers: list["asyncio.Future[ChargeOutcome | None]"], outcomes: list[ChargeOutcome | None]) -> None:
    for answer, outcome in zip(answers, outcomes, strict=True):
        if not answer.done():
            answer.set_result(outcome)


def _fail(answers: list["asyncio.Future[ChargeOutcome | None]"], failure: LedgerError) -> None:
    for answer in answers:
        if not answer.done():
            answer.set_exception(failure)
