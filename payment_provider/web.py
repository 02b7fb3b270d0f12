"""Plumbing of the HTTP server: problem+json (RFC 9457), connections that can be reset, a clean shutdown, logs."""

import asyncio
import json
import logging
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import structlog
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from rfc9457 import Problem
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.h11_impl import H11Protocol

LARGEST_BODY_BYTES = 16 * 1024
LARGEST_FAULTS_BODY_BYTES = 4 * 1024 * 1024
SHUTDOWN_SECONDS = 10

log = structlog.get_logger("payment_provider")

_PROBLEM_TYPE = "urn:payment-provider:problem:{type}"


def problem(
    status: int, type_: str, title: str, detail: str, headers: Mapping[str, str] | None = None, **members: Any
) -> Problem:
    """An RFC 9457 problem to raise; `detail` is cause, meaning and one thing to do."""
    return Problem(title, type_=type_, detail=detail, status=status, headers=dict(headers or {}), **members)


def invalid_fields(errors: Sequence[Mapping[str, Any]], remedies: Mapping[str, str]) -> Problem:
    """A 422 that names each field and its remedy, from pydantic's errors. Values are not repeated back."""
    fields = []
    for error in errors:
        path = ".".join(str(part) for part in error["loc"] if part not in ("query", "path", "body"))[:100] or "body"
        remedy = "Remove it." if error["type"] == "extra_forbidden" else remedies.get(path, "See /openapi.json.")
        fields.append({"field": path, "detail": f"{error['msg'].rstrip('.')}. {remedy}"})
    detail = "; ".join(f"{entry['field']}: {entry['detail']}" for entry in fields[:5])
    return problem(422, "invalid-request", "The request is not valid", detail, errors=fields)


async def read_json_body(request: Request, largest_bytes: int = LARGEST_BODY_BYTES) -> bytes:
    """The body of a JSON request. Raises a 415 or 413 problem."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise problem(
            415, "not-json", "Unsupported media type", "The body is not declared as JSON. Send application/json."
        )
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > largest_bytes:
            raise problem(
                413,
                "too-large",
                "The body is too large",
                f"More than {largest_bytes} bytes were sent, so nothing was done. Send less.",
            )
    return bytes(body)


def malformed_json(error: ValidationError) -> Problem | None:
    """A 400 problem if pydantic could not read the JSON at all, else None."""
    if any(entry["type"] == "json_invalid" for entry in error.errors(include_url=False)):
        return problem(
            400, "malformed-json", "The body is not JSON", "The body cannot be parsed. Send one JSON object."
        )
    return None


def problem_response(_request: Request, error: Exception) -> Response:
    """Answer a Problem, and what the framework raises, as application/problem+json."""
    match error:
        case Problem():
            shown = error
        case RequestValidationError():
            shown = invalid_fields(error.errors(), {})
        case HTTPException():
            detail = "See /openapi.json for what this server offers."
            shown = problem(error.status_code, "http", str(error.detail), detail, error.headers)
        case ClientDisconnect():
            return Response(status_code=400)  # nobody reads it
        case _:
            detail = (
                "The provider failed unexpectedly; the outcome is unknown. Send the same request with the same key."
            )
            shown = problem(500, "internal", "Internal error", detail)
    return JSONResponse(
        shown.marshal(uri=_PROBLEM_TYPE),
        status_code=shown.status,
        headers=shown.headers,
        media_type="application/problem+json",
    )


def answer_with_problems(app: FastAPI) -> None:
    for kind in (Problem, RequestValidationError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, problem_response)


class ResettableProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, which also hands the application its connection, as `request.state.transport`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.app_state = {**self.app_state, "transport": transport}
        super().connection_made(transport)


async def reset_connection(request: Request) -> Response:
    """Cut the TCP connection (RST, not a clean end) without an answer. The response returned is never sent."""
    transport: asyncio.Transport = request.state.transport
    connection = transport.get_extra_info("socket")
    if connection is not None:
        # Closing with a linger time of zero sends RST at once instead of FIN.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
    await client_gone(request)
    return Response()


async def client_gone(request: Request) -> None:
    """Return when the connection is closed. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Server(uvicorn.Server):
    """uvicorn that says when and where it serves, and sets `stopping` when it begins to shut down, so that answers held
    back on purpose let go."""

    def __init__(self, config: uvicorn.Config, stopping: asyncio.Event) -> None:
        super().__init__(config)
        self._stopping = stopping

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or []:
            host, port = listener.getsockname()[:2]
            log.info("provider.listening", host=host, port=port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stopping.set()
        await super().shutdown(sockets)


def build_server(app: FastAPI, stopping: asyncio.Event) -> Server:
    config = uvicorn.Config(
        app,
        http=ResettableProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        timeout_keep_alive=60,
    )
    return Server(config, stopping)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 lets the system choose. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=2048)
    # Accepted sockets inherit it. asyncio does so itself only where it made the listener; without it each answer, sent
    # as head and body, waits 40 ms for the client's delayed ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def log_as_json_lines(level: str) -> None:
    """One JSON object a line on standard output, for our events and for uvicorn's warnings alike."""
    stamps: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    rendering: list[structlog.typing.Processor] = [
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(serializer=json.dumps),
    ]
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, *stamps, *rendering],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stdout),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=stamps,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
