"""What the audit calls wrong, late and overdue, and that it looks twice before it does."""

from __future__ import annotations

import asyncio
import io
import json
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import aiohttp.web
import pytest
from rich.console import Console

from chargeonce.audit import Audit, AuditResult
from chargeonce.audit_view import audit_view
from chargeonce.judgement import Age, Case, Kind, Place, Rules, Verdict, Waiting, judge
from chargeonce.ledgers import ChargeEntry, LedgerAwayError, Ledgers, OrderEntry, OrderEvent, PaymentEntry

NOW = datetime(2026, 7, 1, 12, tzinfo=UTC)
OLD = NOW - timedelta(hours=1)
LATE_SINCE = NOW - timedelta(minutes=5)
RUNNING = Rules(NOW - timedelta(seconds=60), NOW - timedelta(minutes=15))
SETTLED = Rules(NOW, NOW, settled=True)


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


def waits(place: Place) -> Case:
    """An order of the given place; a test chooses its age."""
    charges = [charge(1, state="requested", provider_reference=None)] if place in (Place.CHARGE, Place.RECORD) else []
    payments = [payment(1)] if place is Place.RECORD else []
    event = OrderEvent(published=place is not Place.OUTBOX, published_at=None if place is Place.OUTBOX else NOW)
    return case(order(1, payment_status="pending"), charges, payments, events=(event,))


def confirmed(found: Case, at: datetime) -> Case:
    assert found.order is not None
    return Case(1, found.order.model_copy(update={"confirmed_at": at}), found.charges, found.payments)


@pytest.mark.parametrize("place", Place)
def test_an_order_without_settled_charge_is_pending_then_late_then_overdue_wherever_it_waits(place: Place) -> None:
    found = waits(place)
    assert judge(confirmed(found, NOW), RUNNING) == Verdict(waiting=Waiting(place, Age.PENDING))
    assert judge(confirmed(found, LATE_SINCE), RUNNING) == Verdict(waiting=Waiting(place, Age.LATE))
    overdue = judge(confirmed(found, OLD), RUNNING)
    assert overdue == Verdict(frozenset({Kind.OVERDUE}), Waiting(place, Age.OVERDUE))


@pytest.mark.parametrize("place", Place)
def test_what_waits_is_missing_only_once_all_is_settled(place: Place) -> None:
    for at in (NOW, LATE_SINCE, OLD):
        assert judge(confirmed(waits(place), at), SETTLED) == Verdict(frozenset({Kind.MISSING_CHARGE}))


def test_an_event_cleaned_from_the_outbox_has_left_it() -> None:
    found = case(order(1), [], [], events=(OrderEvent(published=True, published_at=None),))
    assert judge(found, RUNNING).waiting == Waiting(Place.INBOX, Age.OVERDUE)


def test_a_payment_that_billing_knows_nothing_of_is_wrong_however_young_the_order_is() -> None:
    for at in (NOW, LATE_SINCE, OLD):
        found = confirmed(case(order(1), [], [payment(1)]), at)
        assert judge(found, RUNNING) == Verdict(frozenset({Kind.PAYMENT_WITHOUT_CHARGE}))


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
        Kind.OVERDUE: [3],
        Kind.AMOUNT_DIFFERENCE: [4],
        Kind.PAYMENT_WITHOUT_CHARGE: [50],
    }
    report = result.as_json()
    assert (report["double_charges"], report["overdue"], report["clean"]) == (1, 1, False)
    assert report["verdict"].startswith("The ledgers disagree: ")
    assert "1 overdue" not in report["verdict"].split(".")[0]
    assert report["totals"]["EUR"] == {
        "orders": "80.00",
        "charges_captured": "79.99",
        "provider_captured": "100.00",
        "declined": "0",
        "pending": "0",
        "late": "0",
        "overdue": "10.00",
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
    assert (result.pending, result.late, result.orders_confirmed) == (1, 0, 2)
    assert result.verdict() == "1 of 2 orders was charged exactly once. 1 order is on the way, too young to be judged."
    assert result.sums["EUR"].pending == Decimal("10.00")
    assert result.sums["EUR"].orders == Decimal("10.00")
    assert (await shop.audit(settled=True)).findings == {Kind.MISSING_CHARGE: [2]}


async def test_a_cut_in_the_past_leaves_later_orders_pending(shop: Shop) -> None:
    shop.orders[1] = order(1, payment_status="pending")
    assert (await shop.audit(before=OLD - timedelta(seconds=1))).pending == 1
    assert (await shop.audit(before=OLD + timedelta(seconds=1))).findings == {Kind.OVERDUE: [1]}


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
    assert result.findings[Kind.OVERDUE] == [1, 2, 3, 4, 5]
    assert result.counts[Kind.OVERDUE] == 59
    (waiting,) = result.waiting
    assert (result.waiting[waiting], result.waiting_orders[waiting]) == (59, [1, 2, 3, 4, 5])


# -------------------------------------------------------------------------------- what is not charged yet


def ago(seconds: float) -> str:
    return (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat()


def wait_at(shop: Shop, place: Place, order_id: int, seconds: float) -> None:
    """An order that was confirmed so long ago and has come no further than this place."""
    event = {"published": place is not Place.OUTBOX, "published_at": None if place is Place.OUTBOX else ago(seconds)}
    shop.orders[order_id] = order(
        order_id, confirmed_at=ago(seconds), payment_status="pending", events=[{"order_id": order_id, **event}]
    )
    if place in (Place.CHARGE, Place.RECORD):
        shop.charges[order_id] = charge(order_id, state="requested", provider_reference=None)
    if place is Place.RECORD:
        shop.payments.append(payment(order_id))


def printed(result: AuditResult) -> str:
    console = Console(file=io.StringIO(), width=100)
    with console.capture() as capture:
        console.print(audit_view(result))
    return " ".join(capture.get().split())


WORDS = {
    Place.OUTBOX: ("not charged yet", "order-relay"),
    Place.INBOX: ("not charged yet", "billing-consumer"),
    Place.CHARGE: ("not charged yet", "billing-executor"),
    Place.RECORD: ("charged at the provider, which billing has not recorded", "billing-executor"),
}


@pytest.mark.parametrize("place", Place)
async def test_an_order_that_waits_for_a_year_makes_the_audit_fail_and_say_where(shop: Shop, place: Place) -> None:
    shop.complete(1, 2)
    wait_at(shop, place, 3, 365 * 86400)
    result = await shop.audit()
    assert not result.clean
    assert result.findings == {Kind.OVERDUE: [3]}
    assert (result.pending, result.late) == (0, 0)
    assert "All" not in result.verdict()
    assert result.verdict().startswith("2 of 3 orders were charged exactly once. 1 order is overdue (10.00 EUR)")
    for words in WORDS[place]:
        assert words in result.verdict()
        assert words in printed(result)
    assert "orders 3" in printed(result)
    report = result.as_json()
    assert (report["overdue"], report["missing_charges"], report["orders_late"]) == (1, 0, 0)
    assert report["waiting"] == {"late": {}, "overdue": {str(place): {"orders": 1, "order_ids": [3]}}}
    assert report["totals"]["EUR"]["overdue"] == "10.00"
    json.dumps(report)


@pytest.mark.parametrize("place", Place)
async def test_orders_that_are_only_late_are_no_loss_and_are_not_called_charged(shop: Shop, place: Place) -> None:
    """A consumer that was down for longer than the grace: every reading says the same, and no money is wrong."""
    shop.complete(1, 2)
    wait_at(shop, place, 3, 300)
    wait_at(shop, place, 4, 301)
    result = await shop.audit()
    assert result.clean
    assert (result.pending, result.late, dict(result.counts)) == (2, 2, {})
    assert "All" not in result.verdict()
    assert result.verdict().startswith("2 of 4 orders were charged exactly once. 2 orders are late (20.00 EUR): ")
    assert WORDS[place][1] in result.verdict()
    assert "orders 3, 4" in printed(result)
    report = result.as_json()
    assert (report["orders_pending"], report["orders_late"], report["overdue"]) == (2, 2, 0)
    assert report["waiting"] == {"late": {str(place): {"orders": 2, "order_ids": [3, 4]}}, "overdue": {}}
    assert (report["totals"]["EUR"]["late"], report["totals"]["EUR"]["orders"]) == ("20.00", "20.00")


async def test_the_limit_between_late_and_overdue_can_be_chosen(shop: Shop) -> None:
    wait_at(shop, Place.INBOX, 1, 300)
    assert (await shop.audit(overdue_after_seconds=400)).clean
    assert (await shop.audit(overdue_after_seconds=200)).findings == {Kind.OVERDUE: [1]}
    young = await shop.audit(grace_seconds=600, overdue_after_seconds=200)
    assert (young.clean, young.late, young.pending) == (True, 0, 1)


async def test_an_order_that_gets_charged_between_two_readings_is_neither_late_nor_overdue(shop: Shop) -> None:
    shop.complete(1)
    for order_id, seconds in ((2, 300), (3, 5000)):
        wait_at(shop, Place.INBOX, order_id, seconds)

    def arrive(request: str) -> None:
        if request == "/payments?order_id=2&limit=1000":
            shop.complete(2, 3)

    shop.before_answer = arrive
    result = await shop.audit()
    assert (result.clean, result.pending, result.charges_captured) == (True, 0, 3)
    assert result.verdict() == "All 3 orders were charged exactly once."


async def test_declined_orders_are_not_called_charged(shop: Shop) -> None:
    shop.complete(1, 2, 3)
    shop.orders[3]["payment_status"] = shop.charges[3]["state"] = "declined"
    shop.payments.pop()
    result = await shop.audit()
    assert result.clean
    assert result.verdict() == "2 of 3 orders were charged exactly once; 1 was declined, so no money moved."


async def test_a_charge_that_needs_a_person_is_not_clean_and_not_called_charged(shop: Shop) -> None:
    shop.complete(1, 2)
    shop.charges[2] |= {"state": "needs_review", "provider_reference": None}
    shop.orders[2]["payment_status"] = "pending"
    shop.payments.pop()
    result = await shop.audit()
    assert not result.clean
    assert result.findings == {Kind.NEEDS_REVIEW: [2]}
    assert result.verdict().startswith("1 of 2 orders was charged exactly once. 1 order is waiting for a person")


@pytest.mark.parametrize(("seconds", "status"), [(300, 0), (5000, 1)])
async def test_the_command_fails_for_overdue_orders_and_not_for_late_ones(
    shop: Shop, seconds: float, status: int
) -> None:
    shop.complete(1)
    wait_at(shop, Place.INBOX, 2, seconds)
    addresses = [word for name in ("orders", "billing", "provider") for word in (f"--{name}-url", shop.url)]
    command = [sys.executable, "-m", "chargeonce", "audit", *addresses, "--json"]

    async def run(*options: str) -> tuple[int | None, dict[str, Any]]:
        process = await asyncio.create_subprocess_exec(*command, *options, stdout=asyncio.subprocess.PIPE)
        output, _ = await asyncio.wait_for(process.communicate(), 60)
        return process.returncode, json.loads(output)

    found, report = await run()
    assert (found, report["clean"], report["overdue"]) == (status, status == 0, status)
    assert (await run("--overdue-after-seconds", "10000"))[0] == 0
