"""The provider's HTTP API.

A charge moves money once per `Idempotency-Key`; every other answer to that key comes from the ledger. See `ledger.py`
for what is durable and `faults.py` for the failures that can be ordered.
"""

import asyncio
from collections.abc import Awaitable
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal, TypeVar
from uuid import UUID

import structlog
from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rfc9457 import Problem

from payment_provider.charges import LARGEST_ID, ChargeRequest, parse_idempotency_key
from payment_provider.faults import FaultPlan, FaultRule, Faults, InstalledPlan
from payment_provider.ledger import Answered, KeyReused, Ledger, LedgerError, PageCursor, Payment
from payment_provider.web import (
    LARGEST_FAULTS_BODY_BYTES,
    client_gone,
    invalid_fields,
    malformed_json,
    problem,
    read_json_body,
    reset_connection,
)

READY_DEADLINE_SECONDS = 2.0

_REMEDIES = {
    "body": "Send one JSON object with order_id, amount and currency.",
    "order_id": "Send a whole number of 1 or more.",
    "amount": 'Send a positive decimal string within the currency\'s decimals, such as "19.99".',
    "currency": 'Send the three capital letters of ISO 4217, such as "EUR".',
}

T = TypeVar("T")

log = structlog.get_logger("payment_provider")


class Metrics:
    """The provider's own registry, so that several providers can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.charges = Counter(
            "payment_provider_charge_requests", "Charge requests by outcome.", ["outcome"], registry=self.registry
        )
        self.faults = Counter(
            "payment_provider_faults", "Faults that were ordered and happened.", ["kind"], registry=self.registry
        )
        self.running = Gauge(
            "payment_provider_charges_running", "Keys whose first request has no answer yet.", registry=self.registry
        )
        self.batch = Histogram(
            "payment_provider_ledger_batch_requests",
            "Requests that shared one ledger transaction.",
            buckets=(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000),
            registry=self.registry,
        )
        self.commit = Histogram(
            "payment_provider_ledger_commit_seconds", "Time of one ledger transaction.", registry=self.registry
        )

    def committed(self, requests: int, seconds: float) -> None:
        self.batch.observe(requests)
        self.commit.observe(seconds)


@dataclass(slots=True)
class Provider:
    """Everything one server owns. `running` maps each key in flight to its request's fingerprint."""

    ledger: Ledger
    faults: Faults
    metrics: Metrics
    stopping: asyncio.Event
    running: dict[str, str] = field(default_factory=dict)


def provider_of(request: Request) -> Provider:
    provider = request.app.state.provider
    assert isinstance(provider, Provider)  # noqa: S101 - tells the type checker what create_app put there
    return provider


class PaymentBody(BaseModel):
    """A payment as it is listed; `decline_reason` is there when it was declined."""

    payment_id: UUID
    order_id: int
    amount: str
    currency: str
    status: Literal["captured", "declined"]
    idempotency_key: str
    created_at: str
    decline_reason: str | None = None


class PageQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    order_id: Annotated[int | None, Field(ge=1, le=LARGEST_ID, description="only payments of this order")] = None
    after_order_id: Annotated[int, Field(ge=0, le=LARGEST_ID)] = 0
    after_payment_id: UUID | None = None
    limit: Annotated[int, Field(ge=1, le=1000)] = 100


router = APIRouter()


@router.post(
    "/payments/charge",
    status_code=201,
    responses={201: {"model": PaymentBody}, 402: {"model": PaymentBody}},
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": ChargeRequest.model_json_schema()}},
        },
        "parameters": [{"name": "Idempotency-Key", "in": "header", "required": True, "schema": {"type": "string"}}],
    },
)
async def charge(request: Request) -> Response:
    """Move money once per key. 201 captured, 402 declined; a repeat gets the same answer and `Idempotent-Replayed`."""
    provider = provider_of(request)
    try:
        key = _read_key(request)
        wanted = await _read_charge(request)
    except Problem:
        provider.metrics.charges.labels("refused").inc()
        raise
    fault = provider.faults.draw(wanted)
    if fault is not None:
        provider.metrics.faults.labels(fault.kind).inc()
        log.info("provider.fault", kind=fault.kind, order_id=wanted.order_id)
        if fault.kind == "reset_before_capture":
            provider.ledger.note_attempt()
            return await reset_connection(request)
        if (refusal := _refusal(fault)) is not None:
            provider.ledger.note_attempt()
            raise refusal
    answered = await _charge_once(provider, key, wanted, fault)
    return await _deliver(request, provider, answered, fault)


def _read_key(request: Request) -> str:
    try:
        return parse_idempotency_key(request.headers.getlist("idempotency-key"))
    except ValueError as error:
        raise problem(
            400,
            "idempotency-key",
            "The Idempotency-Key is not usable",
            f"The header Idempotency-Key {error}, so no money was moved. Send one unique key for each payment.",
            errors=[{"field": "Idempotency-Key", "detail": str(error)}],
        ) from error


async def _read_charge(request: Request) -> ChargeRequest:
    body = await read_json_body(request)
    try:
        return ChargeRequest.model_validate_json(body)
    except ValidationError as error:
        raise malformed_json(error) or invalid_fields(error.errors(include_url=False), _REMEDIES) from error


def _refusal(fault: FaultRule) -> Problem | None:
    """The answer of a fault that stops the request before any money moves; None if the fault is of another sort."""
    retry_after = {"Retry-After": str(fault.retry_after_seconds)}
    same_again = "Send the same request with the same key again"
    match fault.kind:
        case "error_500":
            return problem(500, "internal", "Internal error", f"The provider failed. {same_again}.")
        case "unavailable_503":
            detail = f"The provider is not available. {same_again} after Retry-After."
            return problem(503, "unavailable", "Unavailable", detail, retry_after)
        case "rate_limited_429":
            detail = f"Too many requests. {same_again} after Retry-After, and slower."
            return problem(429, "rate-limited", "Too many requests", detail, retry_after)
        case "conflict_409":
            return _still_running()
        case _:
            return None


def _still_running() -> Problem:
    return problem(
        409,
        "request-running",
        "The first request with this key is still running",
        "Its outcome is not known yet. Send the same request with the same key again in a moment.",
    )


def _key_reused() -> Problem:
    return problem(
        422,
        "idempotency-key-reused",
        "The Idempotency-Key belongs to another request",
        "The key was used with another order, amount or currency, so no money was moved. Use a new key.",
        errors=[{"field": "Idempotency-Key", "detail": "used with another body"}],
    )


async def _charge_once(provider: Provider, key: str, wanted: ChargeRequest, fault: FaultRule | None) -> Answered:
    """Let one request a key through to the ledger at a time. Raises 409, 422 or 503 problems."""
    counted = provider.metrics.charges
    in_flight = provider.running.get(key)
    if in_flight is not None:
        provider.ledger.note_attempt()
        same_body = in_flight == wanted.fingerprint
        counted.labels("still_running" if same_body else "key_reused").inc()
        raise _still_running() if same_body else _key_reused()

    provider.running[key] = wanted.fingerprint
    provider.metrics.running.set(len(provider.running))
    try:
        if fault is not None and fault.kind == "slow":
            await _pause(provider.stopping, fault.bounded_delay_seconds)
        decline_reason = fault.decline_reason if fault is not None and fault.kind == "declined" else None
        outcome = await provider.ledger.charge(key, wanted, decline_reason)
    except LedgerError as error:
        counted.labels("ledger_unavailable").inc()
        raise _ledger_unavailable(error) from error
    finally:
        del provider.running[key]
        provider.metrics.running.set(len(provider.running))

    match outcome:
        case KeyReused():
            counted.labels("key_reused").inc()
            raise _key_reused()
        case Answered():
            first = "captured" if outcome.status == 201 else "declined"
            counted.labels("replayed" if outcome.replayed else first).inc()
            return outcome


async def _pause(stopping: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(stopping.wait(), seconds)
    except TimeoutError:
        return


def _ledger_unavailable(error: LedgerError) -> Problem:
    log.error("provider.ledger_unavailable", reason=str(error))
    return problem(
        503,
        "ledger-unavailable",
        "The ledger is not available",
        "Nothing was recorded and no money was moved. Send the same request with the same key after Retry-After.",
        {"Retry-After": "1"},
    )


async def _deliver(request: Request, provider: Provider, answered: Answered, fault: FaultRule | None) -> Response:
    """Send the answer, or lose it on its way as the fault says: the money has moved by now."""
    headers = {"Location": f"/payments/{answered.payment_id}"}
    if answered.replayed:
        headers["Idempotent-Replayed"] = "true"
    response = Response(answered.body, answered.status, headers, "application/json")
    match fault.kind if fault is not None else None:
        case "reset_after_capture":
            return await reset_connection(request)
        case "timeout_after_capture":
            assert fault is not None  # noqa: S101 - implied by the case
            return await _hold_back(request, provider.stopping, response, fault.bounded_delay_seconds)
        case "wrong_body":
            return JSONResponse({"result": "ok"}, 201)
        case _:
            return response


async def _hold_back(request: Request, stopping: asyncio.Event, response: Response, seconds: float) -> Response:
    """Answer only after `seconds`, unless the client goes first; a server that stops cuts the connection instead."""
    gone = asyncio.ensure_future(client_gone(request))
    stopped = asyncio.ensure_future(stopping.wait())
    await asyncio.wait({gone, stopped}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    cut = stopped.done() and not gone.done()
    for waiter in (gone, stopped):
        waiter.cancel()
    await asyncio.gather(gone, stopped, return_exceptions=True)
    return await reset_connection(request) if cut else response


@router.get("/payments", responses={200: {"description": "ascending by (order_id, payment_id)"}})
async def list_payments(request: Request, query: Annotated[PageQuery, Query()]) -> Response:
    """A page after (after_order_id, after_payment_id), and the cursor of the next; null at the end."""
    after = PageCursor(query.after_order_id, str(query.after_payment_id or ""))
    if query.after_order_id and query.after_payment_id is None:
        after = PageCursor(query.after_order_id, "~")  # greater than any payment id: the whole order is passed over
    found = await _reading(provider_of(request).ledger.page(after, query.limit + 1, query.order_id))
    page = found[: query.limit]
    more = len(found) > query.limit
    return JSONResponse(
        {"payments": [payment.public() for payment in page], "next": _cursor(page[-1]) if more else None}
    )


async def _reading(reading: Awaitable[T]) -> T:
    try:
        return await reading
    except LedgerError as error:
        raise _ledger_unavailable(error) from error


def _cursor(last: Payment) -> dict[str, Any]:
    return {"after_order_id": last.order_id, "after_payment_id": last.payment_id}


@router.get("/payments/summary")
async def summarise(request: Request) -> Response:
    """Exact totals for each currency, charge requests received, and those answered from the store."""
    return JSONResponse(asdict(await _reading(provider_of(request).ledger.summary())))


@router.get("/payments/{payment_id}", responses={200: {"model": PaymentBody}})
async def show_payment(request: Request, payment_id: UUID) -> Response:
    payment = await _reading(provider_of(request).ledger.find(str(payment_id)))
    if payment is None:
        raise problem(404, "unknown-payment", "No such payment", "No payment has this id. Look in GET /payments.")
    return JSONResponse(payment.public())


@router.put("/faults", response_model=InstalledPlan)
async def install_faults(request: Request) -> InstalledPlan:
    """Replace every rule; counts and the seeded draws begin afresh."""
    body = await read_json_body(request, LARGEST_FAULTS_BODY_BYTES)
    try:
        plan = FaultPlan.model_validate_json(body)
    except ValidationError as error:
        raise malformed_json(error) or invalid_fields(error.errors(include_url=False), {}) from error
    faults = provider_of(request).faults
    faults.install(plan)
    log.info("provider.faults_installed", kinds=[rule.kind for rule in plan.rules])
    return faults.installed()


@router.get("/faults")
async def show_faults(request: Request) -> InstalledPlan:
    return provider_of(request).faults.installed()


@router.delete("/faults", status_code=204)
async def clear_faults(request: Request) -> None:
    provider_of(request).faults.install(FaultPlan())
    log.info("provider.faults_cleared")


@router.get("/livez")
async def live() -> dict[str, str]:
    return {"status": "alive"}


@router.get("/readyz")
async def ready(request: Request) -> dict[str, str]:
    """Ready when the ledger's writer ends a transaction in time; 503 otherwise."""
    try:
        await provider_of(request).ledger.probe(READY_DEADLINE_SECONDS)
    except LedgerError as error:
        raise _ledger_unavailable(error) from error
    return {"status": "ready"}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    return Response(generate_latest(provider_of(request).metrics.registry), media_type=CONTENT_TYPE_LATEST)
