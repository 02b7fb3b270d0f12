"""The order API over a real uvicorn and a real PostgreSQL. Kafka is away throughout: the API must not notice."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import AsyncIterator
from dataclasses import replace
from decimal import Decimal
from typing import Any
from uuid import UUID

import aiohttp
import iso4217
import pytest
from sqlalchemy import event, text
from yarl import URL

from chargeonce.stack import PostgresServer, free_ports
from order_service import repository
from order_service.bootstrap import build
from order_service.checkout import Checkout
from order_service.order import NewOrder, OrderItem
from order_service.settings import OrderServiceSettings, owned_topics
from order_service.tables import metadata
from order_service.upkeep import KeyUpkeep
from shared import money
from shared.cli import migrate_database
from shared.database import Database
from shared.errors import Unavailable
from shared.idempotency import IdempotencyKey, fingerprint
from shared.outbox.admission import Admission, BacklogLimits
from shared.outbox.append import EventWriter
from shared.outbox.backlog import Backlog
from shared.telemetry import configure_tracing
from shared.unit_of_work import UnitsOfWork
from tests.support.outbox import database_settings, scalar
from tests.support.serving import serving

ITEM = {"sku": "BOOK-1", "quantity": 2, "unit_price": "19.99"}
ORDER = {"customer_id": 7, "currency": "EUR", "items": [ITEM, {"sku": "PEN", "quantity": 1, "unit_price": "0.5"}]}


def settings_for(url: str) -> OrderServiceSettings:
    [nobody] = free_ports(1)
    return OrderServiceSettings(database_url=url, kafka_bootstrap_servers=f"127.0.0.1:{nobody}")


@pytest.fixture(scope="module")
async def database(postgres: PostgresServer) -> AsyncIterator[Database]:
    name = f"orders_{secrets.token_hex(4)}"
    await postgres.create_database(name)
    settings = settings_for(postgres.url(name))
    await migrate_database("order_service", settings.database("test"), metadata, owned_topics(settings), 30, 10)
    made = Database(database_settings(postgres.url(name)))
    yield made
    await made.close()
    await postgres.drop_database(name)


@pytest.fixture(scope="module")
async def api(database: Database) -> AsyncIterator[aiohttp.ClientSession]:
    configure_tracing("order-service")
    async with serving(build(settings_for(database.settings.url), ["api"])) as client:
        yield client


async def test_an_order_in_a_currency_that_left_the_list_breaks_no_page(
    api: aiohttp.ClientSession, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with api.post("/orders", json=ORDER) as response:
        order_id = (await response.json())["order_id"]
    without_euro = {code: entry for code, entry in iso4217.raw_table.items() if code != "EUR"}
    monkeypatch.setattr(money, "raw_table", without_euro)
    money.exponent.cache_clear()
    try:
        async with api.get("/orders", params={"after_order_id": str(order_id - 1)}) as response:
            assert response.status == 200
            [listed] = (await response.json())["orders"]
        async with api.get(f"/orders/{order_id}") as response:
            read = await response.json()
    finally:
        monkeypatch.undo()
        money.exponent.cache_clear()
    assert listed["total_amount"] == read["total_amount"] == "40.48"
    assert [item["unit_price"] for item in read["items"]] == ["19.99", "0.5"]


@pytest.fixture
async def nothing_stored(database: Database) -> AsyncIterator[None]:
    before = await rows(database)
    yield
    assert await rows(database) == before


async def rows(database: Database) -> tuple[int, int]:
    """How many orders and events there are."""
    orders = await scalar(database, "SELECT count(*) FROM orders")
    events = await scalar(database, "SELECT count(*) FROM outbox_event")
    return int(str(orders)), int(str(events))


async def test_an_order_and_its_event_are_stored_together(api: aiohttp.ClientSession, database: Database) -> None:
    async with api.post("/orders", json=ORDER) as response:
        created = await response.json()
        assert response.status == 201
        assert response.headers["Location"] == f"/orders/{created['order_id']}"
    assert created["total_amount"] == "40.48"
    assert (created["status"], created["payment_status"]) == ("confirmed", "pending")
    async with database.engine.connect() as connection:
        query = text("SELECT * FROM outbox_event WHERE event_id = :event_id")
        row = (await connection.execute(query, {"event_id": UUID(created["event_id"])})).one()
    assert row.topic == "order-service.order.confirmed"
    assert row.key == str(created["order_id"]).encode()
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-0[13]", row.headers["traceparent"])
    assert json.loads(row.payload) == {
        "event_id": created["event_id"],
        "event_type": "order.confirmed.v1",
        "occurred_at": json.loads(row.payload)["occurred_at"],
        "order_id": created["order_id"],
        "customer_id": 7,
        "total_amount": "40.48",
        "currency": "EUR",
        "aggregate_version": 1,
    }
    assert UUID(created["event_id"]).version == 7


async def test_an_order_can_be_read_with_its_items_and_unpublished_event(api: aiohttp.ClientSession) -> None:
    async with api.post("/orders", json=ORDER) as response:
        created = await response.json()
    async with api.get(f"/orders/{created['order_id']}") as response:
        found = await response.json()
    assert [item["unit_price"] for item in found["items"]] == ["19.99", "0.50"]
    [published] = found["events"]
    assert (published["event_id"], published["published"], published["published_at"]) == (
        created["event_id"],
        False,
        None,
    )


async def test_pages_ascend_by_order_id_and_end_with_null(api: aiohttp.ClientSession) -> None:
    made = []
    for _ in range(5):
        async with api.post("/orders", json=ORDER) as response:
            made.append((await response.json())["order_id"])
    seen: list[int] = []
    after: int | None = made[0] - 1
    while after is not None:
        async with api.get("/orders", params={"after_order_id": after, "limit": 2}) as response:
            page = await response.json()
        seen += [order["order_id"] for order in page["orders"]]
        after = page["next"]
    assert seen == sorted(made)


def changed(**changes: Any) -> dict[str, Any]:
    return {**ORDER, **changes}


def with_item(**changes: Any) -> dict[str, Any]:
    return {**ORDER, "items": [{**ITEM, **changes}]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    (changed(extra=1), "extra"),
    (with_item(extra=1), "items.0.extra"),
    (changed(items=[]), "items"),
    (changed(items=[ITEM] * 101), "items"),
    (changed(items=None), "items"),
    ({"currency": "EUR", "items": [ITEM]}, "customer_id"),
    (changed(customer_id=0), "customer_id"),
    (changed(customer_id=2**63), "customer_id"),
    (changed(customer_id="7"), "customer_id"),
    (changed(currency="eur"), "currency"),
    (changed(currency="ZZZ"), "currency"),
    (changed(currency="XAU"), "currency"),
    (with_item(quantity=0), "items.0.quantity"),
    (with_item(quantity=-1), "items.0.quantity"),
    (with_item(quantity=100_001), "items.0.quantity"),
    (with_item(quantity=1.5), "items.0.quantity"),
    (with_item(quantity="2"), "items.0.quantity"),
    (with_item(unit_price="0"), "items.0.unit_price"),
    (with_item(unit_price="0.00"), "items.0.unit_price"),
    (with_item(unit_price="-1"), "items.0.unit_price"),
    (with_item(unit_price="1.999"), "items.0.unit_price"),
    (with_item(unit_price=19.99), "items.0.unit_price"),
    (with_item(unit_price=19), "items.0.unit_price"),
    (with_item(unit_price="NaN"), "items.0.unit_price"),
    (with_item(unit_price="9999999999999"), "items.0.unit_price"),
    (with_item(unit_price="999999999999", quantity=2), "items"),
    (with_item(sku=""), "items.0.sku"),
    (with_item(sku="x" * 65), "items.0.sku"),
    (with_item(sku="a\0b"), "items.0.sku"),
    (with_item(sku="line\nbreak"), "items.0.sku"),
    ({"customer_id": 7, "currency": "JPY", "items": [{**ITEM, "unit_price": "1.5"}]}, "items.0.unit_price"),
]


@pytest.mark.parametrize(("body", "field"), REFUSED, ids=[f"{n}-{field}" for n, (_, field) in enumerate(REFUSED)])
async def test_f31_a_bad_order_is_refused_naming_the_field_and_stores_nothing(
    api: aiohttp.ClientSession, nothing_stored: None, body: dict[str, Any], field: str
) -> None:
    async with api.post("/orders", json=body) as response:
        problem = await response.json()
        assert (response.status, response.content_type) == (422, "application/problem+json")
    assert field in [error["field"] for error in problem["errors"]], problem


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"{", {"Content-Type": "application/json"}, 422),
        (b"", {"Content-Type": "application/json"}, 422),
        (b"[]", {"Content-Type": "application/json"}, 422),
        (b'\xff\xfe{"a":1}', {"Content-Type": "application/json"}, 400),
        (json.dumps(ORDER).encode(), {"Content-Type": "text/plain"}, 415),
        (json.dumps(ORDER).encode(), {"Content-Type": "application/x-www-form-urlencoded"}, 415),
        (b" " * 300_000, {"Content-Type": "application/json"}, 413),
        (b'{"items": NaN}', {"Content-Type": "application/json"}, 422),
    ],
)
async def test_what_is_no_json_order_is_a_problem_and_stores_nothing(
    api: aiohttp.ClientSession, nothing_stored: None, body: bytes, headers: dict[str, str], status: int
) -> None:
    async with api.post("/orders", data=body, headers=headers) as response:
        problem = await response.json()
        assert (response.status, response.content_type) == (status, "application/problem+json"), problem
    assert problem["detail"]


async def test_a_streamed_body_over_the_limit_is_refused(api: aiohttp.ClientSession, nothing_stored: None) -> None:
    async def stream() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * 10_000

    async with api.post("/orders", data=stream(), headers={"Content-Type": "application/json"}) as response:
        assert response.status == 413


async def test_many_and_long_unknown_fields_make_a_short_answer(
    api: aiohttp.ClientSession, nothing_stored: None
) -> None:
    body = changed(**{f"field-{number}": 1 for number in range(5000)}, **{"x" * 100_000: 1})
    async with api.post("/orders", json=body) as response:
        assert response.status == 422
        assert len(await response.read()) < 10_000


async def test_a_refused_value_is_not_echoed(api: aiohttp.ClientSession) -> None:
    async with api.post("/orders", json=with_item(sku="private\0name")) as response:
        assert "private" not in await response.text()


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/orders/999999", 404),
        ("/orders/0", 422),
        ("/orders/x", 422),
        ("/orders/9223372036854775808", 422),
        ("/nowhere", 404),
    ],
)
async def test_what_does_not_exist_is_a_problem(api: aiohttp.ClientSession, path: str, status: int) -> None:
    async with api.get(path) as response:
        assert (response.status, response.content_type) == (status, "application/problem+json")


async def test_the_kafka_outage_shows_only_as_a_backlog(api: aiohttp.ClientSession) -> None:
    async with api.post("/orders", json=ORDER) as response:
        assert response.status == 201

    async def backlog() -> str:
        async with api.get("/metrics") as response:
            return await response.text()

    async with asyncio.timeout(15):
        while not re.search(r"^outbox_unpublished_events [1-9]", await backlog(), re.MULTILINE):
            await asyncio.sleep(0.1)
    async with api.get("/readyz") as response:
        assert response.status == 200


async def test_f44_a_database_that_is_away_is_503_with_retry_after_and_not_ready_but_alive() -> None:
    [nobody] = free_ports(1)
    app = build(settings_for(f"postgresql://nobody@127.0.0.1:{nobody}/nothing"), ["api"])
    async with serving(app) as client:
        async with client.post("/orders", json=ORDER) as response:
            problem = await response.json()
            assert (response.status, response.content_type) == (503, "application/problem+json"), problem
            assert int(response.headers["Retry-After"]) >= 1
            assert str(nobody) not in json.dumps(problem), "addresses stay inside"
        async with client.get("/readyz") as response:
            assert response.status == 503
            assert (await response.json())["checks"]["database"]["status"] == "down"
        async with client.get("/livez") as response:
            assert response.status == 200


async def test_an_order_costs_five_round_trips_and_one_commit(database: Database) -> None:
    statements: list[str] = []
    commits: list[str] = []
    engine = database.engine.sync_engine
    event.listen(engine, "before_cursor_execute", lambda *args: statements.append(args[2].split()[2]))
    event.listen(engine, "commit", lambda _: commits.append("commit"))
    order = NewOrder.of(7, "EUR", [OrderItem("A", 1, Decimal("1.00")), OrderItem("B", 1, Decimal("2.00"))])
    await Checkout(UnitsOfWork(database, EventWriter()), Admission(BacklogLimits(), lambda: None)).confirm(order)
    assert statements == ["orders", "order_item", "outbox_event"]
    assert len(commits) == 1


async def test_past_the_limit_of_unpublished_events_orders_are_refused_until_they_leave(database: Database) -> None:
    limited = settings_for(database.settings.url).model_copy(update={"max_unpublished_events": 20})
    async with database.engine.begin() as connection:
        await connection.execute(_ALL_PUBLISHED)
    async with serving(build(limited, ["api"])) as client:
        accepted, body = 0, {}
        async with asyncio.timeout(20):
            while True:
                async with client.post("/orders", json=ORDER) as response:
                    if response.status == 503:
                        body = await response.json()
                        break
                    accepted += 1
                await asyncio.sleep(0.02)
        assert response.headers["Retry-After"] == "5"
        assert response.content_type == "application/problem+json"
        assert "more than 20 events wait" in body["detail"]
        assert "no money moved" in body["detail"]
        stored = await scalar(database, "SELECT count(*) FROM orders")
        assert accepted > 20
        async with client.get("/orders?limit=1") as response:
            assert response.status == 200, "reading goes on"
        assert await scalar(database, "SELECT count(*) FROM orders") == stored
        async with database.engine.begin() as connection:
            await connection.execute(_ALL_PUBLISHED)
        async with asyncio.timeout(20):
            while True:
                async with client.post("/orders", json=ORDER) as response:
                    if response.status == 201:
                        break
                await asyncio.sleep(0.05)


_ALL_PUBLISHED = text("""
    INSERT INTO outbox_progress (bucket, position) SELECT bucket, max(position) FROM outbox_event GROUP BY bucket
    ON CONFLICT DO NOTHING
""")


# ------------------------------------------------------------------------------------- repeated requests (F43)


def keyed(key: str) -> dict[str, str]:
    return {"Idempotency-Key": key}


async def test_f43_the_same_request_with_the_same_key_makes_one_order(
    api: aiohttp.ClientSession, database: Database
) -> None:
    before = await rows(database)
    key = secrets.token_hex(8)
    answers = []
    for value in (key, f'"{key}"', key):
        async with api.post("/orders", json=ORDER, headers=keyed(value)) as response:
            answers.append((response.status, response.headers["Location"], await response.json()))
            assert response.headers.get("Idempotency-Replayed") == (None if len(answers) == 1 else "true")
    assert answers[0] == answers[1] == answers[2]
    assert await rows(database) == (before[0] + 1, before[1] + 1)


async def test_f43_the_first_answer_comes_again_however_the_order_went_on(
    api: aiohttp.ClientSession, database: Database
) -> None:
    headers = keyed(secrets.token_hex(8))
    async with api.post("/orders", json=ORDER, headers=headers) as response:
        first = await response.json()
    await scalar(
        database,
        "UPDATE orders SET payment_status = 'charged' WHERE order_id = :id RETURNING 1",
        commit=True,
        id=first["order_id"],
    )
    async with api.post("/orders", json=ORDER, headers=headers) as response:
        assert await response.json() == first


async def test_f43_fifty_at_once_make_one_order_and_the_others_are_told_to_wait_or_get_its_answer(
    api: aiohttp.ClientSession, database: Database
) -> None:
    before = await rows(database)
    headers = keyed(secrets.token_hex(8))

    async def post() -> tuple[int, str | None, Any]:
        async with api.post("/orders", json=ORDER, headers=headers) as response:
            return response.status, response.headers.get("Retry-After"), await response.json()

    answers = await asyncio.gather(*(post() for _ in range(50)))
    created = [body["order_id"] for status, _, body in answers if status == 201]
    waiting = [(retry, body["type"]) for status, retry, body in answers if status == 409]
    assert len(created) + len(waiting) == 50
    assert len(set(created)) == 1
    assert all(answer == ("1", "request-in-progress") for answer in waiting)
    assert await rows(database) == (before[0] + 1, before[1] + 1)


async def test_f43_409_while_the_first_request_runs(api: aiohttp.ClientSession, database: Database) -> None:
    key = secrets.token_hex(8)
    async with database.session() as session, session.begin():
        assert await repository.lock_key(session, 7, key)
        async with api.post("/orders", json=ORDER, headers=keyed(key)) as response:
            assert response.status == 409
    async with api.post("/orders", json=ORDER, headers=keyed(key)) as response:
        assert response.status == 201, "a first request that failed leaves nothing behind"


async def test_f43_the_same_key_with_another_order_is_refused(api: aiohttp.ClientSession, database: Database) -> None:
    headers = keyed(secrets.token_hex(8))
    async with api.post("/orders", json=ORDER, headers=headers) as response:
        assert response.status == 201
    before = await rows(database)
    async with api.post("/orders", json={**ORDER, "currency": "USD"}, headers=headers) as response:
        problem = await response.json()
    assert (response.status, problem["type"]) == (422, "idempotency-key-reused")
    assert problem["errors"][0]["field"] == "Idempotency-Key"
    assert await rows(database) == before
    reordered = json.dumps(dict(reversed(ORDER.items())), indent=2)
    async with api.post("/orders", data=reordered, headers={**headers, "Content-Type": "application/json"}) as response:
        assert response.status == 201, "blanks and the order of fields make no other request"


async def test_f43_keys_are_each_customers_own(api: aiohttp.ClientSession) -> None:
    headers = keyed(secrets.token_hex(8))
    ids = set()
    for customer in (7, 8):
        async with api.post("/orders", json={**ORDER, "customer_id": customer}, headers=headers) as response:
            assert response.status == 201
            ids.add((await response.json())["order_id"])
    assert len(ids) == 2


async def test_f43_a_malformed_key_stores_nothing(api: aiohttp.ClientSession, nothing_stored: None) -> None:
    for value in ("a b", '"open', "k" * 256, '""'):
        async with api.post("/orders", json=ORDER, headers=keyed(value)) as response:
            problem = await response.json()
        assert (response.status, problem["type"]) == (400, "bad-request")
        assert problem["errors"][0]["field"] == "Idempotency-Key"


async def test_f43_a_key_can_be_required(database: Database, nothing_stored: None) -> None:
    settings = settings_for(database.settings.url).model_copy(update={"require_idempotency_key": True})
    async with serving(build(settings, ["api"])) as api, api.post("/orders", json=ORDER) as response:
        assert response.status == 400
        assert "is missing" in (await response.json())["detail"]


async def test_f43_a_replay_is_answered_while_new_orders_are_not_taken(database: Database) -> None:
    backlog: list[Backlog | None] = [None]
    checkout = Checkout(UnitsOfWork(database, EventWriter()), Admission(BacklogLimits(events=1), lambda: backlog[0]))
    order = NewOrder.of(7, "EUR", [OrderItem("BOOK-1", 1, Decimal("19.99"))])
    key = IdempotencyKey(secrets.token_hex(8), fingerprint("the order"))
    first = await checkout.confirm(order, key)
    backlog[0] = Backlog(events=2, at_least=False, oldest_age_seconds=1.0)
    assert (await checkout.confirm(order, key)).order == first.order
    with pytest.raises(Unavailable):
        await checkout.confirm(order, replace(key, key="another"))


async def test_f43_keys_past_their_retention_are_deleted(database: Database) -> None:
    await scalar(
        database,
        "WITH made AS (INSERT INTO idempotency_key (customer_id, key, fingerprint, order_id, created_at) "
        "SELECT 7, 'old ' || n, '', (SELECT max(order_id) FROM orders), now() - interval '8 days' "
        "FROM generate_series(1, 2500) n RETURNING 1) SELECT count(*) FROM made",
        commit=True,
    )
    upkeep = KeyUpkeep(UnitsOfWork(database), retention_hours=168)
    await upkeep.do()
    assert await scalar(database, "SELECT count(*) FROM idempotency_key WHERE key LIKE 'old %'") == 0


# ------------------------------------------------------------------------------------------- careless bodies


async def test_a_field_that_is_there_twice_is_refused_by_name(api: aiohttp.ClientSession, nothing_stored: None) -> None:
    body = json.dumps(ORDER)[:-1] + ', "customer_id": 8}'
    async with api.post("/orders", data=body, headers={"Content-Type": "application/json"}) as response:
        problem = await response.json()
    assert response.status == 422
    assert "customer_id: the field is there more than once" in json.dumps(problem)


async def test_a_body_that_does_not_end_is_refused_in_time(database: Database, nothing_stored: None) -> None:
    app = build(settings_for(database.settings.url), ["api"])
    [limits] = [each.kwargs for each in app.user_middleware if "max_body_bytes" in each.kwargs]
    limits["deadline_seconds"] = 0.3

    async def dripping() -> AsyncIterator[bytes]:
        while True:
            yield b" "
            await asyncio.sleep(0.05)

    json_type = {"Content-Type": "application/json"}
    async with (
        asyncio.timeout(10),
        serving(app) as api,
        api.post("/orders", data=dripping(), headers=json_type) as response,
    ):
        assert response.status == 408
        assert "did not arrive" in await response.text()


@pytest.mark.parametrize("spelling", ["+1", "01", "%201", "1_0", "1.0", "-1", "0", "१"])
async def test_an_id_has_one_spelling(api: aiohttp.ClientSession, spelling: str) -> None:
    async with api.get(URL(f"/orders/{spelling}", encoded="%" in spelling)) as response:
        assert response.status == 422
        assert (await response.json())["errors"][0]["field"] == "order_id"
