"""The command `payment-provider`: settings, application and server put together."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import structlog
import typer
from fastapi import FastAPI
from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from payment_provider.api import Metrics, Provider, router
from payment_provider.faults import Faults
from payment_provider.ledger import Ledger, LedgerError, prepare_ledger
from payment_provider.web import answer_with_problems, build_server, listen, log_as_json_lines

log = structlog.get_logger("payment_provider")


class Settings(BaseSettings):
    """Environment variables PAYMENT_PROVIDER_*; the command's options win over them."""

    model_config = SettingsConfigDict(env_prefix="PAYMENT_PROVIDER_")

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8003
    ledger: Path = Path("var/payment-provider/ledger.sqlite3")
    idempotency_window_seconds: Annotated[float, Field(gt=0, le=10 * 365 * 86400)] = 86400
    log_level: Literal["debug", "info", "warning", "error"] = "info"


def create_app(settings: Settings, stopping: asyncio.Event) -> FastAPI:
    """The application; its lifespan opens and closes the ledger. `stopping` frees answers that are held back."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        counted = Metrics()
        ledger = Ledger(settings.ledger, settings.idempotency_window_seconds, counted.committed)
        await ledger.start()
        app.state.provider = Provider(ledger, Faults(), counted, stopping)
        try:
            yield
        finally:
            await ledger.close()

    app = FastAPI(title="Payment provider sandbox", lifespan=lifespan)
    app.include_router(router)
    answer_with_problems(app)
    return app


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on. Default: 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 lets the system choose. Default: 8003.")] = None,
    ledger: Annotated[
        Path | None, typer.Option(help="The ledger's file, made where missing. Default: below var/.")
    ] = None,
    idempotency_window_seconds: Annotated[
        float | None, typer.Option(help="How long a key is remembered. Default: 86400.")
    ] = None,
) -> None:
    """Run the payment provider sandbox until SIGTERM or Ctrl-C. Each option is also a variable PAYMENT_PROVIDER_…"""
    options: dict[str, Any] = {
        "host": host,
        "port": port,
        "ledger": ledger,
        "idempotency_window_seconds": idempotency_window_seconds,
    }
    try:
        settings = Settings(**{name: value for name, value in options.items() if value is not None})
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, entry['loc']))}: {entry['msg']}" for entry in error.errors())
        raise _give_up(
            f"Settings are not valid, so the provider did not start: {wrong}. Correct the option or PAYMENT_PROVIDER_…."
        ) from error
    log_as_json_lines(settings.log_level)
    try:
        prepare_ledger(settings.ledger)
    except LedgerError as error:
        raise _give_up(str(error)) from error
    try:
        listener = listen(settings.host, settings.port)
    except OSError as error:
        raise _give_up(
            f"Cannot listen on {settings.host} port {settings.port} ({error.strerror or error}), so the provider did"
            " not start. Stop what uses it, or give another with --port."
        ) from error

    stopping = asyncio.Event()
    server = build_server(create_app(settings, stopping), stopping)

    def stop(_signal: int, _frame: object) -> None:
        server.should_exit = True

    # uvicorn raises a signal that it caught once more when it is done; then, and before it listens, it means: exit 0.
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    log.info("provider.starting", ledger=str(settings.ledger), window_seconds=settings.idempotency_window_seconds)
    server.run(sockets=[listener])
    log.info("provider.stopped")


def _give_up(message: str) -> typer.Exit:
    typer.echo(message, err=True)
    return typer.Exit(1)


def main() -> None:
    """Entry point of the command `payment-provider`."""
    typer.run(serve)
