"""Every query of the order service. Functions take a session and never commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Row, Select, insert, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from order_service.order import NewOrder, Order, OrderItem, OrderStatus, PaymentStatus
from order_service.tables import idempotency_key, order_item, orders
from shared.idempotency import IdempotencyKey


async def insert_order(session: AsyncSession, new: NewOrder, event_id: UUID) -> Order:
    """Insert a confirmed order with its items; two statements whatever the number of items."""
    row = (
        await session.execute(
            insert(orders)
            .values(
                customer_id=new.customer_id,
                currency=new.currency,
                total_amount=new.total_amount,
                status=OrderStatus.CONFIRMED,
                payment_status=PaymentStatus.PENDING,
                version=1,
                confirmed_event_id=event_id,
            )
            .returning(orders)
        )
    ).one()
    await session.execute(
        _INSERT_ITEMS,
        {
            "order_id": row.order_id,
            "skus": [item.sku for item in new.items],
            "quantities": [item.quantity for item in new.items],
            "unit_prices": [item.unit_price for item in new.items],
        },
    )
    return _order(row)


_INSERT_ITEMS = text("""
    INSERT INTO order_item (order_id, line, sku, quantity, unit_price)
    SELECT CAST(:order_id AS bigint), i.line, i.sku, i.quantity, i.unit_price
    FROM unnest(CAST(:skus AS text[]), CAST(:quantities AS integer[]), CAST(:unit_prices AS numeric[]))
         WITH ORDINALITY AS i (sku, quantity, unit_price, line)
""")


async def lock_key(session: AsyncSession, customer_id: int, key: str) -> bool:
    """Take a client's key for this transaction; False when another transaction has it."""
    return bool((await session.execute(_LOCK_KEY, {"name": f"{customer_id} {key}"})).scalar_one())


_LOCK_KEY = text("SELECT pg_try_advisory_xact_lock(hashtextextended(:name, 4948))")


@dataclass(frozen=True, slots=True)
class KnownKey:
    """What a client's key stands for."""

    fingerprint: bytes
    order: Order


async def find_by_key(session: AsyncSession, customer_id: int, key: str) -> KnownKey | None:
    """Return what a key stands for. Call under `lock_key`."""
    row = (
        await session.execute(
            select(orders, idempotency_key.c.fingerprint)
            .join(idempotency_key, idempotency_key.c.order_id == orders.c.order_id)
            .where(idempotency_key.c.customer_id == customer_id, idempotency_key.c.key == key)
        )
    ).one_or_none()
    return None if row is None else KnownKey(bytes(row.fingerprint), _order(row))


async def insert_key(session: AsyncSession, order: Order, key: IdempotencyKey) -> None:
    """Store which order a key made."""
    await session.execute(
        insert(idempotency_key).values(
            customer_id=order.customer_id, key=key.key, fingerprint=key.fingerprint, order_id=order.order_id
        )
    )


async def delete_old_keys(session: AsyncSession, retention_hours: float, limit: int) -> int:
    """Delete up to `limit` keys that are older; return how many."""
    result = await session.execute(_DELETE_KEYS, {"seconds": retention_hours * 3600, "limit": limit})
    return int(result.rowcount)  # type: ignore[attr-defined]  # a DELETE's result is a CursorResult


_DELETE_KEYS = text("""
    DELETE FROM idempotency_key WHERE (customer_id, key) IN (
        SELECT customer_id, key FROM idempotency_key
        WHERE created_at < clock_timestamp() - make_interval(secs => :seconds)
        ORDER BY created_at LIMIT :limit FOR UPDATE SKIP LOCKED
    )
""")


async def find_order(session: AsyncSession, order_id: int) -> Order | None:
    """Return an order, or None."""
    row = (await session.execute(_select_orders().where(orders.c.order_id == order_id))).one_or_none()
    return None if row is None else _order(row)


async def find_items(session: AsyncSession, order_id: int) -> Sequence[OrderItem]:
    """Return the items of an order by line."""
    query = select(order_item).where(order_item.c.order_id == order_id).order_by(order_item.c.line)
    return [OrderItem(row.sku, row.quantity, row.unit_price) for row in await session.execute(query)]


async def page_of_orders(session: AsyncSession, after_order_id: int, limit: int) -> Sequence[Order]:
    """Return up to `limit` orders with higher ids, ascending."""
    query = _select_orders().where(orders.c.order_id > after_order_id).order_by(orders.c.order_id).limit(limit)
    return [_order(row) for row in await session.execute(query)]


@dataclass(frozen=True, slots=True)
class PublishedEvent:
    """An event of an order. `published_at` is None while it waits, or when it left longer ago than progress is kept."""

    event_id: UUID
    published: bool
    published_at: datetime | None


async def find_publication(session: AsyncSession, event_id: UUID) -> PublishedEvent:
    """Tell whether and when an event left the outbox.

    An event at or below the first progress mark at its position has been acknowledged by the broker; an event that is
    no longer in the log was published and cleaned away, for nothing unpublished is ever deleted.
    """
    row = (await session.execute(_PUBLICATION, {"event_id": event_id})).one_or_none()
    if row is None:
        return PublishedEvent(event_id, published=True, published_at=None)
    return PublishedEvent(event_id, published=row.published_at is not None, published_at=row.published_at)


_PUBLICATION = text("""
    SELECT (SELECT p.published_at FROM outbox_progress p
            WHERE p.bucket = e.bucket AND p.position >= e.position ORDER BY p.position LIMIT 1) AS published_at
    FROM outbox_event e WHERE e.event_id = :event_id
""")


async def settle_payments(
    session: AsyncSession, order_ids: Sequence[int], statuses: Sequence[PaymentStatus], event_ids: Sequence[UUID]
) -> set[int]:
    """Move pending orders to their payment's result; return the ids of those that moved. One id at most once a call."""
    result = await session.execute(
        _SETTLE_PAYMENTS,
        {"order_ids": list(order_ids), "statuses": [str(status) for status in statuses], "event_ids": list(event_ids)},
    )
    return set(result.scalars())


# Rows are locked in the order of their ids: two batches that share orders wait for each other instead of deadlocking.
_SETTLE_PAYMENTS = text("""
    WITH result AS (
        SELECT * FROM unnest(CAST(:order_ids AS bigint[]), CAST(:statuses AS text[]), CAST(:event_ids AS uuid[]))
                      AS r (order_id, payment_status, event_id)
    ), locked AS (
        SELECT order_id FROM orders
        WHERE order_id IN (SELECT order_id FROM result) AND payment_status = 'pending'
        ORDER BY order_id FOR NO KEY UPDATE
    )
    UPDATE orders SET payment_status = result.payment_status, payment_event_id = result.event_id,
                      payment_updated_at = clock_timestamp()
    FROM result JOIN locked USING (order_id)
    WHERE orders.order_id = result.order_id
    RETURNING orders.order_id
""")


async def payment_statuses(session: AsyncSession, order_ids: Sequence[int]) -> dict[int, PaymentStatus]:
    """Return the payment status of those orders that exist."""
    query = select(orders.c.order_id, orders.c.payment_status).where(orders.c.order_id.in_(order_ids))
    return {row.order_id: PaymentStatus(row.payment_status) for row in await session.execute(query)}


def _select_orders() -> Select[Any]:
    return select(orders)


def _order(row: Row[Any]) -> Order:
    return Order(
        order_id=row.order_id,
        customer_id=row.customer_id,
        currency=row.currency,
        total_amount=row.total_amount,
        status=OrderStatus(row.status),
        payment_status=PaymentStatus(row.payment_status),
        version=row.version,
        confirmed_at=row.confirmed_at,
        confirmed_event_id=row.confirmed_event_id,
    )
