"""The HTTP side of every process: problem+json errors (RFC 9457), livez, readyz, metrics, limits, and a clean stop.

A process is one FastAPI application whose lifespan starts and stops the background services of its roles; processes
without the `api` role serve only health and metrics.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from types import FrameType
from typing import Any

import structlog
import uvicorn
import uvloop
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from fastapi_problem.error import Problem, ServerProblem
from fastapi_problem.handler import ExceptionHandler, add_exception_handler, new_exception_handler
from opentelemetry.trace import SpanKind
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared import memory, telemetry
from shared.database import Database
from shared.errors import (
    FieldError,
    InProgress,
    InvalidInput,
    Refused,
    ServiceError,
    TooLarge,
    Unavailable,
    is_transient,
)
from shared.lifecycle import Readiness, Service, State, describe, running

log = structlog.get_logger(__name__)

MAX_BODY_BYTES = 262_144
BODY_DEADLINE_SECONDS = 15.0
PROBLEM_JSON = "application/problem+json"
_RETRY_AFTER_SECONDS = 2
_MOST_FIELD_ERRORS = 20
_LONGEST_FIELD_NAME = 100


def create_app(
    *,
    title: str,
    version: str,
    database: Database,
    services: Sequence[Service],
    other_databases: Sequence[Database] = (),
    state: Mapping[str, object] | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    body_deadline_seconds: float = BODY_DEADLINE_SECONDS,
) -> FastAPI:
    """Return an application whose lifespan runs `services`, and closes every database at the end."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            async with running(services):
                log.info("process.started", services=[service.name for service in services])
                yield
        finally:
            for each in (database, *other_databases):
                await each.close()
            log.info("process.stopped")

    app = FastAPI(title=title, version=version, lifespan=lifespan)
    app.state.database = database
    app.state.services = tuple(services)
    for name, value in (state or {}).items():
        setattr(app.state, name, value)
    _add_problems(app)
    _add_health(app, database, services)
    app.add_middleware(BodyLimit, max_body_bytes=max_body_bytes, deadline_seconds=body_deadline_seconds)
    app.add_middleware(RequestSpan)
    return app


# ---------------------------------------------------------------------------------------------- errors


class InternalProblem(ServerProblem):
    """What a caller learns of a fault of ours: nothing but that it was one; the log has the rest."""

    title = "Something failed on our side."

    def __init__(self, _detail: str | None = None) -> None:
        super().__init__(detail="The fault is in the service's log under the trace id of this request.")


def _add_problems(app: FastAPI) -> None:
    handler = new_exception_handler(
        unhandled_wrappers={"default": InternalProblem},
        handlers={ServiceError: _service_problem, SQLAlchemyError: _database_problem, OSError: _database_problem},
        request_validation_handler=_validation_problem,
    )
    add_exception_handler(app, handler, generic_swagger_defaults=False)
    for expected in (ServiceError, SQLAlchemyError, OSError):
        app.add_exception_handler(expected, handler)


def _service_problem(_: ExceptionHandler, request: Request, error: ServiceError) -> Problem:
    extras: dict[str, Any] = {}
    headers: dict[str, str] = {}
    if isinstance(error, InvalidInput) and error.fields:
        extras["errors"] = [{"field": item.field, "message": item.message} for item in error.fields]
    if isinstance(error, Unavailable | InProgress):
        headers["Retry-After"] = str(error.retry_after_seconds)
    if error.status >= 500:
        log.warning("request.failed", path=request.url.path, code=error.code, error=describe(error))
    detail = error.detail if error.status != 500 else InternalProblem().detail
    return Problem(error.title, type_=error.code, detail=detail, status=error.status, headers=headers, **extras)


def _database_problem(handler: ExceptionHandler, request: Request, error: Exception) -> Problem:
    if is_transient(error):
        log.warning("request.database_away", path=request.url.path, error=describe(error))
        away = Unavailable(
            "The database did not answer in time. Whether a request that writes took effect is unknown until you look; "
            "try again after the time in Retry-After.",
            _RETRY_AFTER_SECONDS,
        )
        return _service_problem(handler, request, away)
    log.error("request.failed", path=request.url.path, exc_info=error)
    return InternalProblem()


def _validation_problem(handler: ExceptionHandler, request: Request, error: RequestValidationError) -> Problem:
    """Name each refused field and what is wrong with it; never echo what was sent."""
    errors = error.errors()
    if any(item["type"] == "model_attributes_type" and item["loc"] == ("body",) for item in errors) and not (
        request.headers.get("content-type", "").partition(";")[0].strip().endswith("json")
    ):
        return Problem(
            "The request was refused; nothing was stored.",
            type_="unsupported-media-type",
            detail="send the body as JSON with Content-Type: application/json",
            status=415,
        )
    # Names of unknown fields are the caller's: a few of them, cut short, are enough to find the mistake.
    fields = [FieldError(_field_name(item["loc"]), _message(item)) for item in errors[:_MOST_FIELD_ERRORS]]
    return _service_problem(
        handler, request, InvalidInput("; ".join(f"{f.field}: {f.message}" for f in fields), fields)
    )


def _field_name(location: Sequence[str | int]) -> str:
    source, *rest = location
    named = [str(part) for part in rest]
    return _cut(".".join(named) if named else str(source))


def _cut(name: str) -> str:
    return name if len(name) <= _LONGEST_FIELD_NAME else f"{name[:_LONGEST_FIELD_NAME]}…"


def _message(item: Mapping[str, Any]) -> str:
    message = str(item["msg"]).removeprefix("Value error, ")
    return "unknown field; leave it out" if item["type"] == "extra_forbidden" else message


# ---------------------------------------------------------------------------------------------- health


def _add_health(app: FastAPI, database: Database, services: Sequence[Service]) -> None:
    @app.get("/livez", tags=["health"])
    async def livez() -> dict[str, str]:
        """Answer as long as the process runs its event loop."""
        return {"status": "ok"}

    @app.get("/readyz", tags=["health"])
    async def readyz(response: Response) -> dict[str, Any]:
        """Tell what works: 200 for ready or degraded (with reasons), 503 when the process cannot do its work."""
        checks = {service.name: service.ready() for service in services}
        checks["database"] = await _database_readiness(database)
        worst = worst_of(checks.values())
        if worst is State.DOWN:
            response.status_code = 503
        return {
            "status": worst,
            "checks": {name: {"status": check.state, "reason": check.reason} for name, check in checks.items()},
        }

    @app.get("/metrics", tags=["health"], response_class=Response)
    async def metrics() -> Response:
        """Metrics in Prometheus' text format."""
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)


def worst_of(checks: Any) -> State:
    """Return the worst state of the checks; no check at all is ready."""
    order = [State.READY, State.DEGRADED, State.DOWN]
    return max((check.state for check in checks), key=order.index, default=State.READY)


async def _database_readiness(database: Database) -> Readiness:
    try:
        await database.ping()
    except Refused as refusal:
        return Readiness(State.DOWN, refusal.detail)
    except (SQLAlchemyError, OSError, TimeoutError) as error:
        return Readiness(State.DOWN, f"the database does not answer ({type(error).__name__}); requests get 503")
    return Readiness(State.READY)


# ---------------------------------------------------------------------------------------------- middleware


class BodyLimit:
    """Refuse a body over the limit with 413, whether it announces its length or streams, and with 408 one that does
    not end: a client that sends a byte now and then would hold its connection for ever.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int, deadline_seconds: float) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._deadline_seconds = deadline_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._max_body_bytes:
            await self._refusal()(scope, receive, send)
            return
        received = 0
        complete = False
        deadline = asyncio.get_running_loop().time() + self._deadline_seconds

        async def counted() -> Message:
            nonlocal received, complete
            try:
                async with asyncio.timeout_at(None if complete else deadline):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(
                    408,
                    f"the body did not arrive within {self._deadline_seconds:g} s; nothing was stored; send it again",
                    headers={"Connection": "close"},
                ) from None
            complete = complete or not message.get("more_body", False)
            received += len(message.get("body", b""))
            if received > self._max_body_bytes:
                # Of all exceptions, only this one passes through FastAPI's reading of a body as it is.
                raise HTTPException(413, self._detail)
            return message

        await self._app(scope, counted, send)

    @property
    def _detail(self) -> str:
        return f"a body may have {self._max_body_bytes} bytes; nothing was stored; send less"

    def _refusal(self) -> JSONResponse:
        problem = TooLarge(self._detail)
        body = {"type": problem.code, "title": problem.title, "status": 413, "detail": problem.detail}
        return JSONResponse(body, status_code=413, media_type=PROBLEM_JSON, headers={"Connection": "close"})


class StrictJsonRoute(APIRoute):
    """A route that refuses a JSON body which names a field twice: which of two amounts was meant?"""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strictly(request: Request) -> Response:
            return await handle(_StrictJsonRequest(request.scope, request.receive))

        return strictly


class _StrictJsonRequest(Request):
    async def json(self) -> Any:
        return json.loads(await self.body(), object_pairs_hook=_no_field_twice)


def _no_field_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in fields if names.count(name) > 1)
        # Of all exceptions, only this one passes through FastAPI's reading of a body as it is.
        raise HTTPException(422, f"{_cut(twice)}: the field is there more than once; send it once. Nothing was stored")
    return fields


class RequestSpan:
    """One server span a request, continuing the caller's trace: its id is in every log line and in the event."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in ("/livez", "/readyz", "/metrics"):
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        with telemetry.tracer.start_as_current_span(
            f"{scope['method']} {scope['path']}", context=telemetry.continued_from(headers), kind=SpanKind.SERVER
        ):
            await self._app(scope, receive, send)


# ---------------------------------------------------------------------------------------------- serving


class _Server(uvicorn.Server):
    """uvicorn that ends with exit status 0 after a graceful stop, where the original raises the signal once more."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True


def serve(build: Callable[[], FastAPI], *, host: str, port: int, graceful_seconds: int = 10) -> None:
    """Build the application inside the event loop and serve it until SIGTERM or SIGINT; return after a clean stop."""

    async def main() -> None:
        app = build()
        memory.settle()
        config = uvicorn.Config(
            app,
            host=host,
            port=port,
            log_config=None,
            access_log=False,
            lifespan="on",
            server_header=False,
            timeout_graceful_shutdown=graceful_seconds,
        )
        await _Server(config).serve()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
