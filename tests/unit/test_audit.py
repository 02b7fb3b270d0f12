"""What the audit calls wrong, what it calls pending, and that it looks twice before it does."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import aiohttp.web
import pytest

from chargeonce.audit import Audit, AuditResult, Case, Kind, Rules, Verdict, judge
from chargeonce.ledgers import ChargeEntry, LedgerAwayError, Ledgers, OrderEntry, OrderEvent, PaymentEntry

NOW = datetime(2026, 7, 1, 12, tzinfo=UTC)
OLD = NOW - timedelta(hours=1)
RUNNING = Rules(NOW - timedelta(seconds=60))
SETTLED = Rules(NOW, settled=True)


def event_of(order_id: int) -> uuid.UUID:
    return uuid.UUID(int=order_id)


def order(order_id: int, **changes: Any) -> dict[str, Any]:
    return {
        "order_id": order_id,
        "status": "confirmed",
        "payment_status": "charged",
        "currency": "EUR",
        "total_amount": "10.00",
        "confirmed_at": OLD.isoformat(),
        "event_id": str(event_of(order_id)),
        **changes,
    }


def charge(order_id: int, **changes: Any) -> dict[str, Any]:
    return {
        "charge_id": str(uuid.uuid4()),
        "order_id": order_id,
        "event_id": str(event_of(order_id)),
        "amount": "10.00",
        "currency": "EUR",
        "state": "captured",
        "provider_reference": f"payment-{order_id}",
        **changes,
    }


def payment(order_id: int, **changes: Any) -> dict[str, Any]:
    return {
        "payment_id": f"payment-{order_id}",
        "order_id": order_id,
        "amount": "10.00",
        "currency": "EUR",
        "status": "captured",
        "idempotency_key": str(event_of(order_id)),
        **changes,
    }


# ------------------------------------------------------------------------------------------------ one order


def case(
    orders: dict[str, Any] | None, charges: list[dict[str, Any]], payments: list[dict[str, Any]], **changes: Any
) -> Case:
    entry = None if orders is None else OrderEntry.model_validate(orders).model_copy(update=changes)
    return Case(
        1,
        entry,
        tuple(ChargeEntry.model_validate(each) for each in charges),
        tuple(PaymentEntry.model_validate(each) for each in payments),
    )


def test_an_order_with_its_charge_and_its_payment_is_in_order() -> None:
    assert judge(case(order(1), [charge(1)], [payment(1)]), SETTLED) == Verdict()


def test_a_declined_order_is_in_order_without_money() -> None:
    declined = case(order(1, payment_status="declined"), [charge(1, state="declined")], [payment(1, status="declined")])
    assert judge(declined, SETTLED) == Verdict()


@pytest.mark.parametrize(
    ("found", "wrong"),
    [
        pytest.param(case(order(1), [], []), {Kind.MISSING_CHARGE}, id="lost charge"),
        pytest.param(case(order(1), [charge(1)], []), {Kind.CHARGE_WITHOUT_PAYMENT}, id="no money moved"),
        pytest.param(
            case(order(1), [charge(1)], [payment(1), payment(1, payment_id="other", idempotency_key="other")]),
            {Kind.DOUBLE_CHARGE, Kind.EVENT_DIFFERENCE},
            id="two payments",
        ),
        pytest.param(case(order(1), [charge(1), charge(1)], [payment(1)]), {Kind.DOUBLE_CHARGE}, id="two charges"),
        pytest.param(
            case(order(1), [charge(1, amount="1.00")], [payment(1, amount="1.00")]),
            {Kind.AMOUNT_DIFFERENCE},
            id="charged another amount",
        ),
        pytest.param(
            case(order(1), [charge(1)], [payment(1, currency="USD")]), {Kind.AMOUNT_DIFFERENCE}, id="other currency"
        ),
        pytest.param(case(None, [charge(1)], [payment(1)]), {Kind.CHARGE_WITHOUT_ORDER}, id="order unknown"),
        pytest.param(case(None, [], [payment(1)]), {Kind.PAYMENT_WITHOUT_CHARGE}, id="payment of nothing"),
        pytest.param(
            case(order(1), [charge(1, state="declined")], [payment(1)], payment_status="declined"),
            {Kind.PAYMENT_WITHOUT_CHARGE},
            id="declined and paid",
        ),
        pytest.param(
            case(order(1), [charge(1, event_id=str(event_of(2)))], [payment(1)]),
            {Kind.EVENT_DIFFERENCE},
            id="another key",
        ),
        pytest.param(
            case(order(1), [charge(1, provider_reference="payment-9")], [payment(1)]),
            {Kind.EVENT_DIFFERENCE},
            id="another reference",
        ),
        pytest.param(
            case(order(1, payment_status="declined"), [charge(1)], [payment(1)]),
            {Kind.STATUS_DIFFERENCE},
            id="the order says something else",
        ),
        pytest.param(
            case(order(1, payment_status="pending"), [charge(1, state="needs_review")], []),
            {Kind.NEEDS_REVIEW},
            id="a person must look",
        ),
    ],
)
def test_what_differs_is_wrong_whether_the_system_runs_or_is_settled(found: Case, wrong: set[Kind]) -> None:
    assert judge(found, RUNNING).wrong == wrong
    assert judge(found, SETTLED).wrong == wrong


def test_lost_money_is_not_hidden_by_a_missing_charge() -> None:
    assert judge(case(order(1), [], [payment(1)]), SETTLED).wrong == {Kind.MISSING_CHARGE, Kind.PAYMENT_WITHOUT_CHARGE}


@pytest.mark.parametrize(
    "on_its_way",
    [
        pytest.param(case(order(1), [], [], confirmed_at=NOW), id="young order"),
        pytest.param(
            case(order(1), [], [], events=(OrderEvent(published=False, published_at=None),)), id="event in the outbox"
        ),
        pytest.param(
            case(order(1), [], [], events=(OrderEvent(published=True, published_at=NOW),)), id="published just now"
        ),
        pytest.param(case(order(1), [charge(1, state="requested")], []), id="charge requested"),
        pytest.param(case(order(1), [charge(1, state="requested")], [payment(1)]), id="answer not recorded yet"),
    ],
)
def test_what_is_on_its_way_is_pending_and_missing_once_all_is_settled(on_its_way: Case) -> None:
    pending = case(None, [], []) if on_its_way.order is None else on_its_way
    pending = Case(
        1,
        pending.order.model_copy(update={"payment_status": "pending"}) if pending.order else None,
        tuple(each.model_copy(update={"provider_reference": None}) for each in pending.charges),
        pending.payments,
    )
    assert judge(pending, RUNNING) == Verdict(pending=True)
    assert judge(pending, SETTLED).wrong == {Kind.MISSING_CHARGE}


# ------------------------------------------------------------------------------------------- three services


@dataclass
class Shop:
    """Three APIs as the services have them, over HTTP, from plain dictionaries that a test may change while asked."""

    orders: dict[int, dict[str, Any]] = field(default_factory=dict)
    charges: dict[int, dict[str, Any]] = field(default_factory=dict)
    payments: list[dict[str, Any]] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    before_answer: Callable[[str], None] = lambda _path: None
    fail_with: dict[str, int] = field(default_factory=dict)
    url: str = ""

    def complete(self, *order_ids: int) -> None:
        for order_id in order_ids:
            self.orders[order_id] = order(order_id)
            self.charges[order_id] = charge(order_id)
            self.payments.append(payment(order_id))

    async def answer(self, request: aiohttp.web.Request) -> aiohttp.web.Response:
        path, query = request.path, request.query
        self.requests.append(str(request.rel_url))
        self.before_answer(str(request.rel_url))
        for prefix, status in self.fail_with.items():
            if path.startswith(prefix):
                return aiohttp.web.json_response({}, status=status)
        after, limit = int(query.get("after_order_id", 0)), int(query.get("limit", 100))
        match path.split("/")[1:]:
            case ["orders"]:
                page = [self.orders[each] for each in sorted(self.orders) if each > after][:limit]
                return _page("orders", page, limit)
            case ["orders", order_id]:
                found = self.orders.get(int(order_id))
                return aiohttp.web.json_response(found or {}, status=200 if found else 404)
            case ["charges"] if "order_id" in query:
                one = self.charges.get(int(query["order_id"]))
                return aiohttp.web.json_response({"charges": [one] if one else [], "next": None})
            case ["charges"]:
                page = [self.charges[each] for each in sorted(self.charges) if each > after][:limit]
                return _page("charges", page, limit)
            case ["payments"]:
                return self._payments(query, after, limit)
            case ["inbox"]:
                inbox = {"group": "g", "handled": 3, "duplicates_absorbed": 2, "dead": 1, "dead_letters_open": {"x": 1}}
                return aiohttp.web.json_response(inbox)
            case _:
                return aiohttp.web.json_response({"status": "ok"})

    def _payments(self, query: Any, after: int, limit: int) -> aiohttp.web.Response:
        rows = sorted(self.payments, key=lambda each: (each["order_id"], each["payment_id"]))
        if "order_id" in query:
            rows = [each for each in rows if each["order_id"] == int(query["order_id"])]
        position = (after, query.get("after_payment_id", ""))
        page = [each for each in rows if (each["order_id"], each["payment_id"]) > position]
        more = len(page) > limit
        page = page[:limit]
        following = (
            {"after_order_id": page[-1]["order_id"], "after_payment_id": page[-1]["payment_id"]} if more else None
        )
        return aiohttp.web.json_response({"payments": page, "next": following})

    async def audit(self, page_entries: int = 3, **changes: Any) -> AuditResult:
        async with Ledgers(self.url, self.url, self.url, patience_seconds=0.3, page_entries=page_entries) as ledgers:
            return await Audit(ledgers, recheck_seconds=0.01).run(**changes)


def _page(name: str, entries: list[dict[str, Any]], limit: int) -> aiohttp.web.Response:
    following = entries[-1]["order_id"] if len(entries) == limit else None
    return aiohttp.web.json_response({name: entries, "next": following})


@pytest.fixture
async def shop() -> AsyncIterator[Shop]:
    shop = Shop()
    application = aiohttp.web.Application()
    application.router.add_get("/{path:.*}", shop.answer)
    runner = aiohttp.web.AppRunner(application)
    await runner.setup()
    site = aiohttp.web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0]
    shop.url = f"http://{host}:{port}"
    yield shop
    await runner.cleanup()


async def test_three_ledgers_that_agree_are_clean_and_their_sums_equal(shop: Shop) -> None:
    shop.complete(*range(1, 11))
    result = await shop.audit()
    assert result.clean
    assert result.read_again == 0
    assert (result.orders_confirmed, result.charges_captured, result.payments_captured) == (10, 10, 10)
    sums = result.sums["EUR"]
    assert sums.orders == sums.charges_captured == sums.provider_captured == Decimal("100.00")
    assert result.duplicates_absorbed == 4
    assert result.dead_letters == {"x": 2}
    assert result.verdict() == "All 10 orders were charged exactly once."


async def test_gaps_and_orders_of_one_ledger_only_do_not_disturb_the_merge(shop: Shop) -> None:
    shop.complete(1, 2, 5, 9, 10, 11)
    shop.charges[4] = charge(4)
    shop.payments.append(payment(20))
    result = await shop.audit(page_entries=2)
    assert result.findings == {Kind.CHARGE_WITHOUT_ORDER: [4], Kind.PAYMENT_WITHOUT_CHARGE: [20]}
    assert result.orders_confirmed == 6


async def test_each_planted_fault_is_found_with_its_order(shop: Shop) -> None:
    shop.complete(*range(1, 10))
    shop.payments.append(payment(2, payment_id="again", idempotency_key="fresh-key"))
    del shop.charges[3]
    shop.payments = [each for each in shop.payments if each["order_id"] != 3]
    shop.charges[4]["amount"] = "9.99"
    shop.payments.append(payment(50))
    result = await shop.audit()
    assert not result.clean
    assert result.findings == {
        Kind.DOUBLE_CHARGE: [2],
        Kind.EVENT_DIFFERENCE: [2],
        Kind.MISSING_CHARGE: [3],
        Kind.AMOUNT_DIFFERENCE: [4],
        Kind.PAYMENT_WITHOUT_CHARGE: [50],
    }
    report = result.as_json()
    assert (report["double_charges"], report["missing_charges"], report["clean"]) == (1, 1, False)
    assert report["totals"]["EUR"] == {
        "orders": "90.00",
        "charges_captured": "79.99",
        "provider_captured": "100.00",
        "declined": "0",
        "pending": "0",
    }
    json.dumps(report)


async def test_payments_of_one_order_may_fill_several_pages(shop: Shop) -> None:
    shop.complete(1, 2, 3)
    shop.payments += [payment(2, payment_id=f"x{number}") for number in range(7)]
    result = await shop.audit(page_entries=2)
    assert result.findings[Kind.DOUBLE_CHARGE] == [2]
    assert result.payments_captured == 10


async def test_what_arrives_between_two_readings_is_no_finding(shop: Shop) -> None:
    """The charge and the payment were read before the order was charged; by the second look they are there."""
    shop.complete(1, 2)
    late_charge, late_payment = shop.charges.pop(2), shop.payments.pop()

    def arrive(request: str) -> None:
        if request.startswith("/payments?order_id=2"):
            shop.charges[2] = late_charge
            shop.payments[1:] = [late_payment]

    shop.before_answer = arrive
    result = await shop.audit()
    assert result.clean
    assert result.read_again == 1
    assert result.payments_captured == 2


async def test_a_suspect_is_judged_only_when_two_readings_agree(shop: Shop) -> None:
    """Each reading finds another state, none of them final: the audit goes on until it stands still."""
    shop.complete(1)
    states = iter(["needs_review", "declined", "captured"])
    shop.charges[1]["state"] = "declined"

    def change(request: str) -> None:
        if request == "/charges?order_id=1":
            shop.charges[1]["state"] = next(states, "captured")

    shop.before_answer = change
    result = await shop.audit()
    assert result.clean
    assert result.read_again == 3


async def test_orders_newer_than_the_cut_are_pending_not_missing(shop: Shop) -> None:
    shop.complete(1)
    shop.orders[2] = order(2, confirmed_at=datetime.now(UTC).isoformat(), payment_status="pending")
    result = await shop.audit()
    assert result.clean
    assert (result.pending, result.orders_confirmed) == (1, 2)
    assert result.sums["EUR"].pending == Decimal("10.00")
    assert result.sums["EUR"].orders == Decimal("10.00")
    assert (await shop.audit(settled=True)).findings == {Kind.MISSING_CHARGE: [2]}


async def test_a_cut_in_the_past_leaves_later_orders_pending(shop: Shop) -> None:
    shop.orders[1] = order(1, payment_status="pending")
    assert (await shop.audit(before=OLD - timedelta(seconds=1))).pending == 1
    assert (await shop.audit(before=OLD + timedelta(seconds=1))).findings == {Kind.MISSING_CHARGE: [1]}


@pytest.mark.parametrize("path", ["/orders", "/charges", "/payments"])
async def test_a_service_that_does_not_answer_is_named(shop: Shop, path: str) -> None:
    shop.fail_with[path] = 503
    with pytest.raises(LedgerAwayError, match=r"service|provider") as raised:
        await shop.audit()
    assert "503" in str(raised.value)


async def test_an_answer_that_is_not_the_contract_is_an_error_not_a_finding(shop: Shop) -> None:
    shop.complete(1)
    shop.orders[1]["total_amount"] = None
    with pytest.raises(LedgerAwayError, match=r"order service .*total_amount"):
        await shop.audit()


async def test_a_service_that_comes_back_within_the_patience_is_waited_for(shop: Shop) -> None:
    shop.complete(1)
    shop.fail_with["/charges"] = 503
    shop.before_answer = lambda request: shop.fail_with.clear() if len(shop.requests) > 5 else None
    async with Ledgers(shop.url, shop.url, shop.url, patience_seconds=20) as ledgers:
        assert (await Audit(ledgers).run()).clean


async def test_at_most_so_many_orders_are_listed_and_all_are_counted(shop: Shop) -> None:
    for order_id in range(1, 60):
        shop.orders[order_id] = order(order_id)
    async with Ledgers(shop.url, shop.url, shop.url) as ledgers:
        result = await Audit(ledgers, recheck_seconds=0, finding_limit=5, suspects_at_once=7).run()
    assert result.findings[Kind.MISSING_CHARGE] == [1, 2, 3, 4, 5]
    assert result.counts[Kind.MISSING_CHARGE] == 59
