"""The payment provider as billing sees it: a port, and the HTTP client behind it.

Whatever happens on the wire comes back as an Outcome; nothing is raised. An answer that cannot be read says nothing
about the money, so it is Unknown and asked again with the same key; an answer that can be read and names another
payment is for a person.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from email.utils import parsedate_to_datetime
from typing import Annotated, Literal, Protocol

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import BytesPayload
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from billing_service.charge import (
    AnswerContradicts,
    Captured,
    ClaimedCharge,
    Declined,
    Forbidden,
    KeyReused,
    Outcome,
    RequestRefused,
    SlowDown,
    StillRunning,
    Unknown,
)
from shared import failpoints
from shared.errors import Unavailable
from shared.telemetry import trace_headers

LONGEST_RETRY_AFTER_SECONDS = 3600.0
_LARGEST_ANSWER_BYTES = 65_536
_KEY_REUSED = "idempotency-key-reused"


# Stored and logged as they are, so nothing but printable ASCII of a sane length.
_Reference = Annotated[str, Field(pattern=r"^[!-~]{1,128}$")]
_Reason = Annotated[str, Field(pattern=r"^[ -~]{1,200}$")]


class ProviderPayment(BaseModel):
    """A payment in the provider's ledger."""

    model_config = ConfigDict(frozen=True)

    payment_id: _Reference
    order_id: int
    amount: Decimal
    currency: str
    status: Literal["captured", "declined"]
    idempotency_key: str
    decline_reason: _Reason | None = None


class PaymentCursor(BaseModel):
    """Where the next page of payments begins."""

    model_config = ConfigDict(frozen=True)

    after_order_id: int
    after_payment_id: str


class PaymentPage(BaseModel):
    """Payments ascending by order and payment id; `next` is None at the end."""

    model_config = ConfigDict(frozen=True)

    payments: Sequence[ProviderPayment]
    next: PaymentCursor | None = None


class PaymentGateway(Protocol):
    """What the executor needs of a provider. It is open while the executor runs."""

    async def open(self) -> None:
        """Make ready for calls; connects to nothing yet."""

    async def close(self) -> None:
        """Give up every connection."""

    async def charge(self, claimed: ClaimedCharge, deadline_seconds: float) -> Outcome:
        """Ask for the payment with the charge's bytes and key; return within the deadline."""


class HttpPaymentGateway:
    """Calls the provider over HTTP/1.1, with kept connections between `open` and `close`.

    `observe` is told each call's outcome (a class name of `charge.Outcome`) and its seconds.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: SecretStr | None = None,
        connections: int = 16,
        observe: Callable[[str, float], None] = lambda _outcome, _seconds: None,
    ) -> None:
        self._base_url = base_url.rstrip("/")
        self._api_key = api_key
        self._connections = connections
        self._observe = observe
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        headers = {"User-Agent": "chargeonce-billing"}
        if self._api_key is not None:
            headers["Authorization"] = f"Bearer {self._api_key.get_secret_value()}"
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=self._connections),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def charge(self, claimed: ClaimedCharge, deadline_seconds: float) -> Outcome:
        """Send the charge's bytes with its event id as Idempotency-Key (R-KFK-IDEM-4); never raises for the wire."""
        began = time.monotonic()
        outcome = await self._charge(claimed, deadline_seconds)
        self._observe(type(outcome).__name__, time.monotonic() - began)
        return outcome

    async def _charge(self, claimed: ClaimedCharge, deadline_seconds: float) -> Outcome:
        headers = {"Idempotency-Key": str(claimed.event_id), **trace_headers()}
        try:
            async with (
                asyncio.timeout(deadline_seconds),
                self._open_session.post(
                    f"{self._base_url}/payments/charge",
                    data=_Request(claimed.request, content_type="application/json"),
                    headers=headers,
                    allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(total=None),
                ) as response,
            ):
                body = await response.content.read(_LARGEST_ANSWER_BYTES)
                while not response.content.at_eof() and len(body) < _LARGEST_ANSWER_BYTES:
                    body += await response.content.read(_LARGEST_ANSWER_BYTES - len(body))
                return read_answer(claimed, response.status, response.headers, body)
        except TimeoutError:
            return Unknown("timeout")
        except (aiohttp.ClientError, OSError):
            return Unknown("connection")

    async def payments_of(self, order_id: int, deadline_seconds: float = 10.0) -> Sequence[ProviderPayment]:
        """Return what the provider's ledger has for an order. Raises Unavailable when it does not tell."""
        return (await self._payments({"order_id": str(order_id), "limit": "1000"}, deadline_seconds)).payments

    async def page_of_payments(
        self, after_order_id: int, after_payment_id: str | None = None, deadline_seconds: float = 30.0
    ) -> PaymentPage:
        """Return the payments behind a place, ascending by order and payment. Raises Unavailable likewise."""
        place = {"after_order_id": str(after_order_id), "limit": "1000"}
        if after_payment_id is not None:
            place["after_payment_id"] = after_payment_id
        return await self._payments(place, deadline_seconds)

    async def _payments(self, query: Mapping[str, str], deadline_seconds: float) -> PaymentPage:
        try:
            async with (
                asyncio.timeout(deadline_seconds),
                self._open_session.get(f"{self._base_url}/payments", params=query, allow_redirects=False) as response,
            ):
                if response.status != 200:
                    raise Unavailable(f"the payment provider answered {response.status}; try again later")
                return PaymentPage.model_validate_json(await response.read())
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            raise Unavailable(f"the payment provider did not tell ({type(error).__name__}); try again later") from error

    @property
    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("the gateway is closed; open it first")
        return self._session


class _Request(BytesPayload):
    """The request's bytes, and the crash point behind them: they are on their way when it is reached."""

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        await super().write_with_length(writer, content_length)
        failpoints.hit("C2")


def read_answer(claimed: ClaimedCharge, status: int, headers: Mapping[str, str], body: bytes) -> Outcome:
    """Tell what an answer of `POST /payments/charge` means."""
    match status:
        case 402:
            return _payment(claimed, "declined", body)
        case _ if 200 <= status < 300:
            return _payment(claimed, "captured", body)
        case 409:
            return StillRunning(retry_after_seconds(headers.get("Retry-After")))
        case 429:
            return SlowDown(retry_after_seconds(headers.get("Retry-After")))
        case 408 | 425:
            return Unknown(f"status_{status}", retry_after_seconds(headers.get("Retry-After")))
        case 422 if _KEY_REUSED in _problem_type(body):
            return KeyReused()
        case 400 | 413 | 415 | 422:
            return RequestRefused(status)
        case _ if status >= 500:
            return Unknown("server_error", retry_after_seconds(headers.get("Retry-After")))
        case _:
            return Forbidden(status)  # 401, 403, and what a wrong address answers: redirects, 404, 405


def _payment(claimed: ClaimedCharge, status: Literal["captured", "declined"], body: bytes) -> Outcome:
    try:
        payment = ProviderPayment.model_validate_json(body)
    except ValidationError:
        return Unknown("unreadable_answer")
    wanted = {
        "order_id": claimed.order_id,
        "amount": claimed.amount,
        "currency": claimed.currency,
        "status": status,
        "idempotency_key": str(claimed.event_id),
    }
    different = tuple(name for name, value in wanted.items() if getattr(payment, name) != value)
    if different:
        return AnswerContradicts(different)
    if status == "captured":
        return Captured(payment.payment_id)
    return Declined(payment.payment_id, payment.decline_reason or "unspecified")


def _problem_type(body: bytes) -> str:
    try:
        return _Problem.model_validate_json(body).type
    except ValidationError:
        return ""


class _Problem(BaseModel):
    type: str = ""


def retry_after_seconds(value: str | None) -> float | None:
    """Return the wait that a Retry-After header asks for: seconds or an HTTP date (RFC 9110 §10.2.3), an hour at most.

    What cannot be read is as if it was not there.
    """
    if value is None:
        return None
    text = value.strip()
    if text.isascii() and text.isdigit():
        return min(float(text[:9]), LONGEST_RETRY_AFTER_SECONDS)
    try:
        moment = parsedate_to_datetime(text)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return min(max((moment - datetime.now(UTC)).total_seconds(), 0.0), LONGEST_RETRY_AFTER_SECONDS)
