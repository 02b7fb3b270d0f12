"""However many orders there are, the audit holds a few pages."""

from __future__ import annotations

import tracemalloc
from collections.abc import AsyncGenerator, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from uuid import UUID

from chargeonce.audit import Audit, AuditResult, Kind
from chargeonce.ledgers import ChargeEntry, Inbox, Ledgers, OrderEntry, PaymentEntry, Stream

_PAGE = 500
_CONFIRMED = datetime(2026, 1, 1, tzinfo=UTC)


class MadeUpLedgers(Ledgers):
    """Orders 1 to `count`, made while they are read; order `doubled` has two payments."""

    def __init__(self, count: int, doubled: int) -> None:
        super().__init__("http://orders", "http://billing", "http://provider")
        self._count = count
        self._doubled = doubled

    async def clock(self) -> datetime:
        return _CONFIRMED + timedelta(days=1)

    async def inboxes(self) -> dict[str, Inbox]:
        return {}

    def orders(self) -> Stream[OrderEntry]:
        return Stream("orders", self._order_entries())

    def charges(self) -> Stream[ChargeEntry]:
        return Stream("charges", self._charge_entries())

    def payments(self) -> Stream[PaymentEntry]:
        return Stream("payments", self._payment_entries())

    async def order(self, order_id: int) -> OrderEntry:
        return _order(order_id)

    async def charges_of(self, order_id: int) -> tuple[ChargeEntry, ...]:
        return (_charge(order_id),)

    async def payments_of(self, order_id: int) -> tuple[PaymentEntry, ...]:
        return (_payment(order_id),) * (2 if order_id == self._doubled else 1)

    def _pages(self) -> Sequence[range]:
        return [range(first, min(first + _PAGE, self._count + 1)) for first in range(1, self._count + 1, _PAGE)]

    async def _order_entries(self) -> AsyncGenerator[Sequence[OrderEntry], None]:
        for page in self._pages():
            yield [_order(order_id) for order_id in page]

    async def _charge_entries(self) -> AsyncGenerator[Sequence[ChargeEntry], None]:
        for page in self._pages():
            yield [_charge(order_id) for order_id in page]

    async def _payment_entries(self) -> AsyncGenerator[Sequence[PaymentEntry], None]:
        for page in self._pages():
            yield [payment for order_id in page for payment in await self.payments_of(order_id)]


def _order(order_id: int) -> OrderEntry:
    return OrderEntry.model_construct(
        order_id=order_id,
        payment_status="charged",
        currency="EUR",
        total_amount=Decimal("1.00"),
        confirmed_at=_CONFIRMED,
        event_id=UUID(int=order_id),
        events=(),
    )


def _charge(order_id: int) -> ChargeEntry:
    return ChargeEntry.model_construct(
        order_id=order_id,
        charge_id=UUID(int=order_id),
        event_id=UUID(int=order_id),
        amount=Decimal("1.00"),
        currency="EUR",
        state="captured",
        provider_reference="p",
    )


def _payment(order_id: int) -> PaymentEntry:
    return PaymentEntry.model_construct(
        order_id=order_id,
        payment_id="p",
        amount=Decimal("1.00"),
        currency="EUR",
        status="captured",
        idempotency_key=str(UUID(int=order_id)),
    )


async def _audit(count: int, doubled: int = 0) -> AuditResult:
    async with MadeUpLedgers(count, doubled) as ledgers:
        return await Audit(ledgers, recheck_seconds=0).run()


async def test_a_double_charge_among_many_orders_is_found() -> None:
    result = await _audit(30_000, doubled=17_777)
    assert result.findings == {Kind.DOUBLE_CHARGE: [17_777]}
    assert result.payments_captured == 30_001
    assert result.sums["EUR"].orders == Decimal(30_000)


async def test_memory_does_not_grow_with_the_number_of_orders() -> None:
    async def peak_bytes(count: int) -> int:
        tracemalloc.reset_peak()
        assert (await _audit(count)).clean
        return tracemalloc.get_traced_memory()[1]

    await _audit(10)
    tracemalloc.start()
    try:
        few, many = await peak_bytes(2_000), await peak_bytes(16_000)
    finally:
        tracemalloc.stop()
    assert many < 1.5 * few
