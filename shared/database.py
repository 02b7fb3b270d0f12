"""The database of a service: one engine, and the session settings on which the guarantees stand."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import asyncpg
import structlog
from sqlalchemy import MetaData, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from shared.errors import Refused

log = structlog.get_logger(__name__)

# What a crash or a failover to a synchronous standby cannot take back; `local` and `remote_write` can lose commits.
DURABLE = ("on", "remote_apply")

# What a transaction-pooling proxy carries from client to server by itself, and nothing depends on.
_CARRIED = frozenset({"application_name", "timezone"})

# Time limits: whatever the role has will do, as long as there is one.
_LIMITS = frozenset(
    {
        "client_connection_check_interval",
        "lock_timeout",
        "transaction_timeout",
        "idle_in_transaction_session_timeout",
    }
)

_IN_FORCE = """
    SELECT current_user AS role, current_database() AS database,
           (SELECT array_agg(coalesce(current_setting(s.name, true), '') ORDER BY s.place)
            FROM unnest($1::text[]) WITH ORDINALITY AS s (name, place)) AS found
"""

# One naming convention for both databases, so that a migration can name what it drops.
NAMING_CONVENTION = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


def new_metadata() -> MetaData:
    """Return metadata with the project's naming convention."""
    return MetaData(naming_convention=NAMING_CONVENTION)


@dataclass(frozen=True, slots=True)
class DatabaseSettings:
    """How to reach a database, and the time limits of its sessions.

    A writer that hangs after appending events holds up 1/96 of the keys, so no transaction may hang:
    `transaction_timeout` and `idle_in_transaction_session_timeout` end it, `lock_timeout` frees those who wait for it.
    `command_timeout_seconds` is the client's own, for a server that vanished without closing the connection.
    """

    url: str = field(repr=False)
    application_name: str
    pool_size: int = 10
    connect_timeout_seconds: float = 5.0
    pool_timeout_seconds: float = 5.0
    lock_timeout_seconds: float = 5.0
    transaction_timeout_seconds: float = 20.0
    idle_in_transaction_timeout_seconds: float = 10.0
    command_timeout_seconds: float = 40.0
    session_settings: Mapping[str, str] = field(default_factory=dict)


class Database:
    """An engine with the project's session settings. It connects when first used, so it can be made while away."""

    def __init__(self, settings: DatabaseSettings) -> None:
        self.settings = settings
        self.engine: AsyncEngine = create_async_engine(
            make_url(settings.url).set(drivername="postgresql+asyncpg"),
            async_creator=self._connect,
            pool_size=settings.pool_size,
            max_overflow=0,
            pool_timeout=settings.pool_timeout_seconds,
            pool_use_lifo=True,
            hide_parameters=True,  # errors and logs carry no customer data
        )
        self._ping: asyncio.Task[None] | None = None

    async def _connect(self) -> asyncpg.Connection:
        # The driver reads the address itself, so that everything libpq's form allows works: sslmode, several hosts.
        try:
            connection = await asyncpg.connect(
                self.dsn,
                timeout=self.settings.connect_timeout_seconds,
                command_timeout=self.settings.command_timeout_seconds,
                server_settings=self.server_settings(),
            )
        except asyncpg.ProtocolViolationError as error:
            if "startup parameter" in str(error):
                raise Refused(self._unknown_to_the_proxy(str(error))) from error
            raise
        try:
            await self._check_session(connection)
        except BaseException:
            connection.terminate()
            raise
        return connection

    async def _check_session(self, connection: asyncpg.Connection) -> None:
        """Raise Refused when a setting is not in force. Asked, not assumed: a proxy may have dropped it on its way."""
        wanted = {name: value for name, value in self.server_settings().items() if name not in _CARRIED}
        [row] = await connection.fetch(_IN_FORCE, list(wanted))
        found = dict(zip(wanted, row["found"], strict=True))
        durable = found["synchronous_commit"]
        if durable not in DURABLE:
            raise Refused(
                f"synchronous_commit is {durable} in the sessions of {self.settings.application_name}: a crash may "
                "forget orders or charges that were acknowledged. Set it to on, here and in a proxy."
            )
        lost = {name: value for name, value in wanted.items() if not _holds(name, value, found[name])}
        if lost:
            raise Refused(
                f"a proxy drops settings that the sessions of {self.settings.application_name} ask for: "
                f"{', '.join(lost)}. Without them a session that hangs holds up others for ever, or a query takes "
                "a slow plan. Give them to the role, then let the proxy reconnect to the server: "
                + _given_to_role(row["role"], row["database"], lost)
            )

    def _unknown_to_the_proxy(self, error: str) -> str:
        url = make_url(self.settings.url)
        wanted = {name: value for name, value in self.server_settings().items() if name not in _CARRIED}
        return (
            f"a proxy refuses the settings that the sessions of {self.settings.application_name} ask for ({error}). "
            f"List them in its ignore_startup_parameters ({','.join(wanted)}), give them to the role, and let it "
            "reconnect to the server: " + _given_to_role(url.username or "", url.database or "", wanted)
        )

    async def driver_connection(self) -> asyncpg.Connection:
        """Return a new connection of the driver itself, outside of the pool; the caller closes it."""
        return await self._connect()

    def server_settings(self) -> dict[str, str]:
        """Return the run-time settings of every session, in PostgreSQL's own names and units (milliseconds)."""
        limits = self.settings
        return {
            "application_name": limits.application_name,
            "timezone": "UTC",
            "jit": "off",
            "synchronous_commit": "on",
            "client_connection_check_interval": "2000",  # a query whose client is gone keeps its locks no longer
            "lock_timeout": _milliseconds(limits.lock_timeout_seconds),
            "transaction_timeout": _milliseconds(limits.transaction_timeout_seconds),
            "idle_in_transaction_session_timeout": _milliseconds(limits.idle_in_transaction_timeout_seconds),
            **limits.session_settings,
        }

    @property
    def dsn(self) -> str:
        """Return the address in libpq's form, for the driver's own connections."""
        return libpq_dsn(self.settings.url)

    def session(self) -> AsyncSession:
        """Return a new session. Objects stay readable after the commit; nothing is flushed behind the caller's back."""
        return AsyncSession(self.engine, expire_on_commit=False, autoflush=False)

    async def ping(self, deadline_seconds: float = 2.0) -> None:
        """Return when the database answered. Raises what `errors.is_transient` understands.

        The question itself is not cancelled at the deadline, for a query that is cut off costs its connection: whoever
        asks next waits for the same answer.
        """
        if self._ping is None or self._ping.done():
            self._ping = asyncio.create_task(self._ask())
            self._ping.add_done_callback(lambda ping: ping.cancelled() or ping.exception())
        done, _ = await asyncio.wait({self._ping}, timeout=deadline_seconds)
        if not done:
            raise TimeoutError(f"the database did not answer within {deadline_seconds:g} s")
        self._ping.result()

    async def _ask(self) -> None:
        try:
            await self._ask_once()
        except DBAPIError as error:
            if not error.connection_invalidated:
                raise
            await self._ask_once()  # that connection was dead already; the pool makes a new one

    async def _ask_once(self) -> None:
        async with self.engine.connect() as connection:
            await connection.execute(text("SELECT 1"))

    async def close(self) -> None:
        """Close every connection of the pool."""
        if self._ping is not None and not self._ping.done():
            self._ping.cancel()
        await self.engine.dispose()


def libpq_dsn(url: str) -> str:
    """Return the address without SQLAlchemy's driver name."""
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


def _holds(name: str, wanted: str, found: str) -> bool:
    return found not in ("", "0") if name in _LIMITS else found == wanted


def _given_to_role(role: str, database: str, settings: Mapping[str, str]) -> str:
    return " ".join(
        f'ALTER ROLE "{role}" IN DATABASE "{database}" SET {name} = \'{value}\';' for name, value in settings.items()
    )


def _milliseconds(seconds: float) -> str:
    return str(int(seconds * 1000))
