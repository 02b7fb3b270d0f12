"""One PostgreSQL and one Kafka for the whole run; an empty database and names of its own for each test."""

import contextlib
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from chargeonce.stack import KafkaBroker, PostgresServer, Stack, prepare


@pytest.fixture(scope="session")
def stack_directory() -> Iterator[Path]:
    """A folder the user that PostgreSQL runs as can pass through, so that nothing has to be moved out of it."""
    directory = Path(tempfile.mkdtemp(prefix="chargeonce-tests-"))
    directory.chmod(0o711)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="session")
async def stack(stack_directory: Path) -> AsyncIterator[Stack]:
    """The stack all tests share. A test that stops or kills a part of it starts a stack of its own instead."""
    await prepare()
    stack = Stack(stack_directory / "stack")
    async with stack:
        yield stack
    stack.remove()


@pytest.fixture(scope="session")
def postgres(stack: Stack) -> PostgresServer:
    return stack.postgres


@pytest.fixture(scope="session")
def kafka(stack: Stack) -> KafkaBroker:
    return stack.kafka


@pytest.fixture
def unique_name() -> str:
    """A name no other test uses, fit for a topic, a group and a database."""
    return f"t{secrets.token_hex(6)}"


@pytest.fixture
def topic_prefix(unique_name: str) -> str:
    """What the names of a test's topics and consumer groups begin with."""
    return f"{unique_name}."


@pytest.fixture
async def new_database(postgres: PostgresServer) -> AsyncIterator[Callable[[], Awaitable[str]]]:
    """Makes an empty database at each call and returns its SQLAlchemy URL; all are dropped after the test."""
    names: list[str] = []

    async def make() -> str:
        name = f"t{secrets.token_hex(6)}"
        await postgres.create_database(name)
        names.append(name)
        return postgres.url(name)

    async with contextlib.AsyncExitStack() as cleanup:
        yield make
        for name in names:
            cleanup.push_async_callback(postgres.drop_database, name)


@pytest.fixture
async def database_url(new_database: Callable[[], Awaitable[str]]) -> str:
    """The SQLAlchemy URL of an empty database of the test's own."""
    return await new_database()
