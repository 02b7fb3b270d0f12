"""The three ledgers that the audit compares, read through their APIs: orders, charges, the provider's payments.

Each is a stream ascending by order id, one page in hand and one on its way, and each can be asked about one order.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Generic, Literal, Self, TypeVar
from uuid import UUID

import aiohttp
from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError

PAGE_ENTRIES = 1000
_RETRY_STATUSES = frozenset({429, 500, 502, 503, 504})
_REQUEST_DEADLINE_SECONDS = 10.0
_PAUSE_SECONDS = 0.2


class LedgerAwayError(Exception):
    """A ledger cannot be read, so nothing can be said; the message names the service and what to do."""


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True)

    order_id: int


class OrderEvent(BaseModel):
    """An event of an order, and whether it has left the outbox."""

    model_config = ConfigDict(frozen=True)

    published: bool
    published_at: AwareDatetime | None


class OrderEntry(_Entry):
    """A confirmed order. `events` is there only when the order was asked for by id."""

    payment_status: str
    currency: str
    total_amount: Decimal
    confirmed_at: AwareDatetime
    event_id: UUID
    events: tuple[OrderEvent, ...] = ()


class ChargeEntry(_Entry):
    """A charge as billing has it. Amount, currency and event id are null for an order that was cancelled first."""

    charge_id: UUID
    event_id: UUID | None
    amount: Decimal | None
    currency: str | None
    state: str
    provider_reference: str | None


class PaymentEntry(_Entry):
    """A payment in the provider's own ledger."""

    payment_id: str
    amount: Decimal
    currency: str
    status: Literal["captured", "declined"]
    idempotency_key: str


class Inbox(BaseModel):
    """What a service's inbox has done since its beginning."""

    group: str
    duplicates_absorbed: int
    dead: int
    dead_letters_open: Mapping[str, int]


class _OrderPage(BaseModel):
    orders: list[OrderEntry]
    next: int | None


class _ChargePage(BaseModel):
    charges: list[ChargeEntry]
    next: int | None


class _PaymentCursor(BaseModel):
    after_order_id: int
    after_payment_id: str


class _PaymentPage(BaseModel):
    payments: list[PaymentEntry]
    next: _PaymentCursor | None


E = TypeVar("E", bound=_Entry)
B = TypeVar("B", bound=BaseModel)
Parameters = Mapping[str, str | int]


class Source:
    """One service's API. A failure that may pass is tried again until the deadline (seconds)."""

    def __init__(
        self, session: aiohttp.ClientSession, name: str, url: str, option: str, deadline_seconds: float
    ) -> None:
        self.name = name
        self._session = session
        self._url = url.rstrip("/")
        self._option = option
        self._deadline_seconds = deadline_seconds

    async def get(self, path: str, model: type[B], parameters: Parameters | None = None) -> B | None:
        """Read and check an answer; None for 404. Raises LedgerAwayError."""
        status, body, _ = await self._ask(path, parameters)
        if status == 404:
            return None
        if status != 200:
            raise LedgerAwayError(f"{self.name} at {self._url} answered {status} to {path}{self._remedy}")
        try:
            return model.model_validate_json(body)
        except ValidationError as error:
            wrong = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(map(str, wrong["loc"]))
            raise LedgerAwayError(
                f"{self.name} at {self._url} answered {path} with something else than its contract "
                f"({field}: {wrong['msg']}){self._remedy}"
            ) from None

    async def need(self, path: str, model: type[B], parameters: Parameters | None = None) -> B:
        """Read and check an answer that must exist. Raises LedgerAwayError."""
        answer = await self.get(path, model, parameters)
        if answer is None:
            raise LedgerAwayError(f"{self.name} at {self._url} does not know {path}{self._remedy}")
        return answer

    async def clock(self) -> datetime:
        """The time on the service's machine (Date header, RFC 9110 §6.6.1; whole seconds). Raises LedgerAwayError."""
        _, _, date = await self._ask("/livez", None)
        try:
            return parsedate_to_datetime(date).astimezone(UTC)
        except (TypeError, ValueError):
            return datetime.now(UTC)

    @property
    def _remedy(self) -> str:
        return f": nothing can be audited. Start it, or name its address with {self._option}"

    async def _ask(self, path: str, parameters: Parameters | None) -> tuple[int, bytes, str]:
        deadline = asyncio.get_running_loop().time() + self._deadline_seconds
        while True:
            problem = ""
            try:
                async with (
                    asyncio.timeout(_REQUEST_DEADLINE_SECONDS),
                    self._session.get(self._url + path, params=parameters) as response,
                ):
                    if response.status not in _RETRY_STATUSES:
                        return response.status, await response.read(), response.headers.get("Date", "")
                    problem = f"it answered {response.status}"
            except aiohttp.InvalidURL:
                raise LedgerAwayError(f"{self._url!r} is no address{self._remedy}") from None
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                problem = f"{type(error).__name__}: {error}".rstrip(": ")
            if asyncio.get_running_loop().time() > deadline:
                raise LedgerAwayError(f"{self.name} at {self._url} is away ({problem}){self._remedy}")
            await asyncio.sleep(_PAUSE_SECONDS)


class Stream(Generic[E]):
    """Entries ascending by order id, with the next page on its way; `take` hands out one order's entries at a time.

    A page read out of order is an error: the comparison rests on the order.
    """

    def __init__(self, name: str, pages: AsyncGenerator[Sequence[E], None]) -> None:
        self._name = name
        self._pages = pages
        self._page: Sequence[E] = ()
        self._index = 0
        self._upcoming: asyncio.Task[Sequence[E] | None] | None = None

    async def first_id(self) -> int | None:
        """The order id that comes next, None at the end. Raises LedgerAwayError."""
        while self._index == len(self._page):
            page = await (self._upcoming or self._fetch())
            if page is None:
                self._upcoming = self._fetch()
                return None
            self._check(page)
            self._page, self._index = page, 0
            self._upcoming = self._fetch()
        return self._page[self._index].order_id

    async def take(self, order_id: int) -> tuple[E, ...]:
        """The entries of this order, if they come next. Raises LedgerAwayError."""
        found: list[E] = []
        while await self.first_id() == order_id:
            found.append(self._page[self._index])
            self._index += 1
        return tuple(found)

    async def close(self) -> None:
        """Give up the page that is on its way."""
        if self._upcoming is not None:
            self._upcoming.cancel()
            await asyncio.gather(self._upcoming, return_exceptions=True)
        await self._pages.aclose()

    def _fetch(self) -> asyncio.Task[Sequence[E] | None]:
        return asyncio.ensure_future(_next_page(self._pages))

    def _check(self, page: Sequence[E]) -> None:
        last = self._page[-1].order_id if self._page else 0
        for entry in page:
            if entry.order_id < last:
                raise LedgerAwayError(
                    f"{self._name} lists order {entry.order_id} after {last}: its pages are not ascending, so they "
                    "cannot be compared. Ask its maintainers"
                )
            last = entry.order_id


async def _next_page(pages: AsyncGenerator[Sequence[E], None]) -> Sequence[E] | None:
    return await anext(pages, None)


class Ledgers:
    """Orders, charges and payments behind their three addresses.

    `patience_seconds` is how long a service may be away before LedgerAwayError is raised.
    """

    def __init__(
        self,
        orders_url: str,
        billing_url: str,
        provider_url: str,
        *,
        patience_seconds: float = 10.0,
        page_entries: int = PAGE_ENTRIES,
    ) -> None:
        self._session = aiohttp.ClientSession()
        self._page_entries = page_entries
        self._orders = Source(self._session, "the order service", orders_url, "--orders-url", patience_seconds)
        self._billing = Source(self._session, "the billing service", billing_url, "--billing-url", patience_seconds)
        self._provider = Source(self._session, "the payment provider", provider_url, "--provider-url", patience_seconds)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._session.close()

    async def clock(self) -> datetime:
        """The time where orders are confirmed. Raises LedgerAwayError."""
        return await self._orders.clock()

    def orders(self) -> Stream[OrderEntry]:
        """All orders."""
        return Stream("the order service", self._order_pages())

    def charges(self) -> Stream[ChargeEntry]:
        """All charges."""
        return Stream("the billing service", self._charge_pages())

    def payments(self) -> Stream[PaymentEntry]:
        """All payments."""
        return Stream("the payment provider", self._payment_pages())

    async def order(self, order_id: int) -> OrderEntry | None:
        """One order, with its events. Raises LedgerAwayError."""
        return await self._orders.get(f"/orders/{order_id}", OrderEntry)

    async def charges_of(self, order_id: int) -> tuple[ChargeEntry, ...]:
        """The charges of one order. Raises LedgerAwayError."""
        page = await self._billing.need("/charges", _ChargePage, {"order_id": order_id})
        return tuple(page.charges)

    async def payments_of(self, order_id: int) -> tuple[PaymentEntry, ...]:
        """The payments of one order. Raises LedgerAwayError."""
        page = await self._provider.need("/payments", _PaymentPage, {"order_id": order_id, "limit": PAGE_ENTRIES})
        return tuple(page.payments)

    async def inboxes(self) -> dict[str, Inbox]:
        """What each service's inbox has done, by service. Raises LedgerAwayError."""
        orders, billing = await asyncio.gather(self._orders.need("/inbox", Inbox), self._billing.need("/inbox", Inbox))
        return {"order-service": orders, "billing-service": billing}

    async def _order_pages(self) -> AsyncGenerator[Sequence[OrderEntry], None]:
        async for page in self._pages_by_order(self._orders, "/orders", _OrderPage, lambda page: page.next):
            yield page.orders

    async def _charge_pages(self) -> AsyncGenerator[Sequence[ChargeEntry], None]:
        async for page in self._pages_by_order(self._billing, "/charges", _ChargePage, lambda page: page.next):
            yield page.charges

    async def _pages_by_order(
        self, source: Source, path: str, model: type[B], next_of: Callable[[B], int | None]
    ) -> AsyncGenerator[B, None]:
        after: int | None = 0
        while after is not None:
            page = await source.need(path, model, {"after_order_id": after, "limit": self._page_entries})
            yield page
            after = _advanced(source, path, after, next_of(page))

    async def _payment_pages(self) -> AsyncGenerator[Sequence[PaymentEntry], None]:
        parameters: dict[str, str | int] | None = {"limit": self._page_entries}
        while parameters is not None:
            page = await self._provider.need("/payments", _PaymentPage, parameters)
            yield page.payments
            parameters = {"limit": self._page_entries, **page.next.model_dump()} if page.next else None


def _advanced(source: Source, path: str, after: int, following: int | None) -> int | None:
    if following is not None and following <= after:
        raise LedgerAwayError(f"{source.name} pages {path} in a circle (next={following}): nothing can be audited")
    return following
