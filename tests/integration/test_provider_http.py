"""The payment provider as a client meets it: a real process on a real port, with a real ledger file."""

import asyncio
import json
import random
import signal
import socket
import sqlite3
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest

DEADLINE_SECONDS = 30.0
LOST = (aiohttp.ClientError, TimeoutError)

order_ids = count(1)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


@dataclass
class RunningProvider:
    process: asyncio.subprocess.Process
    port: int
    session: aiohttp.ClientSession

    async def call(self, method: str, path: str, **options: Any) -> Answer:
        async with self.session.request(method, f"http://127.0.0.1:{self.port}{path}", **options) as response:
            return Answer(response.status, response.headers, await response.text())

    async def charge(
        self,
        order_id: int,
        key: str,
        amount: str = "19.99",
        currency: str = "EUR",
        timeout_seconds: float = DEADLINE_SECONDS,
    ) -> Answer:
        return await self.call(
            "POST",
            "/payments/charge",
            json={"order_id": order_id, "amount": amount, "currency": currency},
            headers={"Idempotency-Key": key},
            timeout=aiohttp.ClientTimeout(total=timeout_seconds),
        )

    async def payments_of(self, order_id: int) -> list[Any]:
        payments: list[Any] = (await self.call("GET", f"/payments?order_id={order_id}")).json["payments"]
        return payments

    async def all_payments(self, limit: int = 1000) -> list[Any]:
        found: list[Any] = []
        after: dict[str, Any] | None = {}
        while after is not None:
            page = (await self.call("GET", "/payments", params={**after, "limit": limit})).json
            found += page["payments"]
            after = page["next"]
        return found

    async def fail(self, kind: str, **rule: Any) -> None:
        answer = await self.call("PUT", "/faults", json={"rules": [{"kind": kind, **rule}]})
        assert answer.status == 200, answer.text

    async def fired(self) -> int:
        fired: int = (await self.call("GET", "/faults")).json["rules"][0]["fired"]
        return fired


@asynccontextmanager
async def running_provider(ledger: Path, *options: str) -> AsyncIterator[RunningProvider]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "payment_provider",
        "--port=0",
        f"--ledger={ledger}",
        *options,
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    try:
        port = await asyncio.wait_for(_announced_port(process.stdout), DEADLINE_SECONDS)
        drain = asyncio.ensure_future(process.stdout.read())
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            yield RunningProvider(process, port, session)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    await drain


async def _announced_port(log: asyncio.StreamReader) -> int:
    async for line in log:
        event = json.loads(line)
        if event["event"] == "provider.listening":
            return int(event["port"])
    raise AssertionError("the provider ended before it listened")


@pytest.fixture(scope="module")
async def shared_provider(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningProvider]:
    async with running_provider(tmp_path_factory.mktemp("provider") / "ledger.db") as running:
        yield running


@pytest.fixture
async def provider(shared_provider: RunningProvider) -> RunningProvider:
    await shared_provider.call("DELETE", "/faults")
    return shared_provider


@pytest.fixture
def order_id() -> int:
    return next(order_ids)


@pytest.fixture
def key() -> str:
    return str(uuid.uuid4())


async def eventually(condition: Callable[[], Awaitable[bool]], deadline_seconds: float = DEADLINE_SECONDS) -> None:
    async with asyncio.timeout(deadline_seconds):
        while not await condition():
            await asyncio.sleep(0.02)


# One key, one payment


async def test_a_charge_is_captured_and_can_be_looked_up(provider: RunningProvider, order_id: int, key: str) -> None:
    answer = await provider.charge(order_id, key, "19.9")

    assert answer.status == 201
    body = answer.json
    assert set(body) == {"payment_id", "order_id", "amount", "currency", "status", "idempotency_key", "created_at"}
    assert (body["order_id"], body["amount"], body["currency"], body["status"], body["idempotency_key"]) == (
        order_id,
        "19.90",
        "EUR",
        "captured",
        key,
    )
    assert "Idempotent-Replayed" not in answer.headers
    assert (await provider.call("GET", answer.headers["Location"])).json == body
    assert await provider.payments_of(order_id) == [body]


async def test_f41_the_same_key_again_gets_the_same_answer_and_moves_nothing(
    provider: RunningProvider, order_id: int, key: str
) -> None:
    first = await provider.charge(order_id, key, "20.50")
    repeats = [
        await provider.charge(order_id, key, "20.50"),
        await provider.charge(order_id, f'"{key}"', "20.5"),
        await provider.call(
            "POST",
            "/payments/charge",
            data=f'{{ "currency":"EUR",\n "amount":"20.50", "order_id":{order_id} }}',
            headers={"Idempotency-Key": key, "Content-Type": "application/json; charset=utf-8"},
        ),
    ]
    for repeat in repeats:
        assert (repeat.status, repeat.text) == (first.status, first.text)
        assert repeat.headers["Idempotent-Replayed"] == "true"
    assert len(await provider.payments_of(order_id)) == 1


@pytest.mark.parametrize("change", [{"amount": "20.00"}, {"currency": "USD"}, {"order_id": 10**9}])
async def test_f43_the_same_key_with_another_body_is_refused(
    provider: RunningProvider, order_id: int, key: str, change: dict[str, Any]
) -> None:
    await provider.charge(order_id, key)
    other: dict[str, Any] = {"order_id": order_id, "amount": "19.99", "currency": "EUR"} | change
    answer = await provider.charge(key=key, **other)

    assert answer.status == 422
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert answer.json["type"].endswith(":idempotency-key-reused")
    assert len(await provider.payments_of(order_id)) == 1
    assert await provider.payments_of(10**9) == []


async def test_many_requests_at_once_with_one_key_make_one_payment(
    provider: RunningProvider, order_id: int, key: str
) -> None:
    answers = await asyncio.gather(*(provider.charge(order_id, key) for _ in range(60)))

    assert {answer.status for answer in answers} <= {201, 409}
    assert len({answer.text for answer in answers if answer.status == 201}) == 1
    assert len(await provider.payments_of(order_id)) == 1


async def test_f43_while_the_first_request_runs_the_key_is_in_use(
    provider: RunningProvider, order_id: int, key: str
) -> None:
    await provider.fail("slow", delay_seconds=1.5, remaining=1)
    first = asyncio.ensure_future(provider.charge(order_id, key))
    await eventually(lambda: _is(provider.fired(), 1))

    same, other = await provider.charge(order_id, key), await provider.charge(order_id, key, "5.00")
    assert (same.status, same.json["type"]) == (409, "urn:payment-provider:problem:request-running")
    assert (other.status, other.json["type"]) == (422, "urn:payment-provider:problem:idempotency-key-reused")
    assert not first.done()
    assert (await first).status == 201
    assert (await provider.charge(order_id, key)).text == (await first).text


async def _is(value: Awaitable[Any], expected: Any) -> bool:
    return bool(await value == expected)


async def test_f42_past_its_window_a_key_is_unknown_and_the_money_moves_again(tmp_path: Path) -> None:
    async with running_provider(tmp_path / "ledger.db", "--idempotency-window-seconds=0.5") as provider:
        first = (await provider.charge(1, "key")).json["payment_id"]

        async def a_second_payment() -> bool:
            return bool((await provider.charge(1, "key")).json["payment_id"] != first)

        await eventually(a_second_payment)
        assert len(await provider.payments_of(1)) == 2


# Faults


async def test_a_decline_is_kept_and_repeated_after_the_rule_is_gone(
    provider: RunningProvider, order_id: int, key: str
) -> None:
    await provider.fail("declined", order_ids=[order_id], decline_reason="insufficient_funds")
    declined = await provider.charge(order_id, key)
    assert (await provider.charge(next(order_ids), str(uuid.uuid4()))).status == 201
    await provider.call("DELETE", "/faults")
    again = await provider.charge(order_id, key)

    assert declined.status == again.status == 402
    assert declined.text == again.text
    assert again.headers["Idempotent-Replayed"] == "true"
    assert (declined.json["status"], declined.json["decline_reason"]) == ("declined", "insufficient_funds")
    assert await provider.payments_of(order_id) == [declined.json]


async def test_amounts_from_a_limit_on_can_be_declined(provider: RunningProvider) -> None:
    await provider.fail("declined", amount_at_least="1000.00")
    assert (await provider.charge(next(order_ids), str(uuid.uuid4()), "999.99")).status == 201
    assert (await provider.charge(next(order_ids), str(uuid.uuid4()), "1000")).status == 402


@pytest.mark.parametrize(("kind", "moved"), [("reset_before_capture", 0), ("reset_after_capture", 1)])
async def test_f41_a_reset_loses_the_answer_and_the_next_try_moves_the_money_once(
    provider: RunningProvider, order_id: int, key: str, kind: str, moved: int
) -> None:
    await provider.fail(kind, remaining=1)
    with pytest.raises(aiohttp.ClientError):
        await provider.charge(order_id, key)
    before = await provider.payments_of(order_id)
    retried = await provider.charge(order_id, key)

    assert len(before) == moved
    assert retried.status == 201
    assert ("Idempotent-Replayed" in retried.headers) == bool(moved)
    assert await provider.payments_of(order_id) == [retried.json]


async def test_a_reset_is_a_tcp_reset_and_not_a_clean_end(provider: RunningProvider, order_id: int) -> None:
    await provider.fail("reset_before_capture", remaining=1)
    body = json.dumps({"order_id": order_id, "amount": "1.00", "currency": "EUR"}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", provider.port)
    head = f"POST /payments/charge HTTP/1.1\r\nHost: p\r\nContent-Type: application/json\r\nIdempotency-Key: {order_id}"
    writer.write(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    with pytest.raises(ConnectionResetError):
        await asyncio.wait_for(reader.read(), DEADLINE_SECONDS)
    writer.close()


async def test_f41_a_timeout_after_the_money_moved_is_answered_by_the_next_try(
    provider: RunningProvider, order_id: int, key: str
) -> None:
    await provider.fail("timeout_after_capture", remaining=1)
    with pytest.raises(TimeoutError):
        await provider.charge(order_id, key, timeout_seconds=1.0)
    (moved,) = await provider.payments_of(order_id)
    retried = await provider.charge(order_id, key)

    assert (retried.status, retried.json) == (201, moved)
    assert retried.headers["Idempotent-Replayed"] == "true"
    assert len(await provider.payments_of(order_id)) == 1


async def test_an_answer_held_back_comes_at_last_to_a_client_that_waits(
    provider: RunningProvider, order_id: int, key: str
) -> None:
    await provider.fail("timeout_after_capture", delay_seconds=0.5)
    began = time.monotonic()
    assert (await provider.charge(order_id, key)).status == 201
    assert time.monotonic() - began >= 0.5


@pytest.mark.parametrize(
    ("kind", "status", "retry_after"),
    [
        ("error_500", 500, None),
        ("unavailable_503", 503, "7"),
        ("rate_limited_429", 429, "7"),
        ("conflict_409", 409, None),
    ],
)
async def test_a_failure_before_the_capture_moves_no_money(
    provider: RunningProvider, order_id: int, key: str, kind: str, status: int, retry_after: str | None
) -> None:
    await provider.fail(kind, remaining=1, retry_after_seconds=7)
    failed = await provider.charge(order_id, key)
    assert (failed.status, failed.headers.get("Retry-After")) == (status, retry_after)
    assert failed.headers["Content-Type"] == "application/problem+json"
    assert await provider.payments_of(order_id) == []
    assert (await provider.charge(order_id, key)).status == 201


async def test_a_wrong_body_hides_a_payment_that_was_made(provider: RunningProvider, order_id: int, key: str) -> None:
    await provider.fail("wrong_body", remaining=1)
    wrong = await provider.charge(order_id, key)
    assert wrong.status == 201
    assert "payment_id" not in wrong.json
    assert [(await provider.charge(order_id, key)).json] == await provider.payments_of(order_id)


async def test_under_many_seeded_faults_retries_with_one_key_move_each_money_once(tmp_path: Path) -> None:
    kinds = [
        "reset_before_capture",
        "reset_after_capture",
        "error_500",
        "unavailable_503",
        "conflict_409",
        "wrong_body",
    ]
    rules = [{"kind": kind, "probability": 0.15} for kind in kinds]

    async with running_provider(tmp_path / "ledger.db") as provider:
        await provider.call("PUT", "/faults", json={"rules": rules, "seed": 3})

        async def until_paid(order: int) -> str:
            async with asyncio.timeout(DEADLINE_SECONDS):
                while True:
                    try:
                        answer = await provider.charge(order, f"key-{order}")
                    except aiohttp.ClientError:
                        continue
                    if answer.status == 201 and "payment_id" in answer.json:
                        return str(answer.json["payment_id"])

        paid = await asyncio.gather(*(until_paid(order) for order in range(1, 101)))
        found = await provider.all_payments()
        fired = (await provider.call("GET", "/faults")).json["rules"]

    assert [(payment["order_id"], payment["payment_id"]) for payment in found] == list(enumerate(paid, start=1))
    assert all(rule["fired"] for rule in fired)


# Durability


async def test_f41_sigkill_under_load_loses_no_acknowledged_payment_and_repeats_none(tmp_path: Path) -> None:
    acknowledged: dict[str, str] = {}
    tried: dict[str, int] = {}
    orders = count(1)

    async def charge_until_killed(provider: RunningProvider) -> None:
        while True:
            order = next(orders)
            key = f"key-{order}"
            tried[key] = order
            try:
                answer = await provider.charge(order, key)
            except LOST:
                return
            assert answer.status == 201
            acknowledged[key] = answer.text

    for _ in range(3):
        async with running_provider(tmp_path / "ledger.db") as provider:
            known = len(acknowledged)
            clients = [asyncio.ensure_future(charge_until_killed(provider)) for _ in range(50)]

            async def busy(known: int = known) -> bool:
                return len(acknowledged) >= known + 300

            await eventually(busy)
            provider.process.kill()
            await asyncio.gather(*clients)

    async with running_provider(tmp_path / "ledger.db") as provider:
        kept = {payment["idempotency_key"]: payment for payment in await provider.all_payments()}
        assert {key: json.loads(text) for key, text in acknowledged.items()} == {key: kept[key] for key in acknowledged}
        in_doubt = set(tried) - set(acknowledged)
        assert in_doubt

        for key, order in tried.items():
            repeat = await provider.charge(order, key)
            assert repeat.status == 201
            assert repeat.text == acknowledged.get(key, repeat.text)
            assert ("Idempotent-Replayed" in repeat.headers) == (key in kept)

        found = await provider.all_payments()
    assert sorted(payment["idempotency_key"] for payment in found) == sorted(tried)


async def test_sigterm_answers_what_runs_frees_what_is_held_back_and_exits_0(tmp_path: Path) -> None:
    async with running_provider(tmp_path / "ledger.db") as provider:
        rules = [
            {"kind": "timeout_after_capture", "order_ids": [1], "delay_seconds": 600},
            {"kind": "slow", "order_ids": [2], "delay_seconds": 600},
        ]
        await provider.call("PUT", "/faults", json={"rules": rules})
        held, slow = (asyncio.ensure_future(provider.charge(order, f"key-{order}")) for order in (1, 2))

        async def both_under_way() -> bool:
            installed = (await provider.call("GET", "/faults")).json["rules"]
            return [rule["fired"] for rule in installed] == [1, 1] and len(await provider.payments_of(1)) == 1

        await eventually(both_under_way)
        provider.process.send_signal(signal.SIGTERM)
        with pytest.raises(aiohttp.ClientError):
            await held
        assert (await slow).status == 201
        assert await asyncio.wait_for(provider.process.wait(), 15) == 0

    async with running_provider(tmp_path / "ledger.db") as provider:
        assert [payment["order_id"] for payment in await provider.all_payments()] == [1, 2]


async def test_f44_a_ledger_that_cannot_write_is_a_503_and_recovers_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    async with running_provider(path) as provider:
        with closing(sqlite3.connect(path, isolation_level=None)) as intruder:
            intruder.execute("BEGIN IMMEDIATE")
            refused, ready = await asyncio.gather(provider.charge(1, "key"), provider.call("GET", "/readyz"))
            alive = await provider.call("GET", "/livez")
            intruder.execute("ROLLBACK")

        assert (alive.status, ready.status, refused.status) == (200, 503, 503)
        assert refused.headers["Retry-After"] == "1"
        assert refused.json["type"].endswith(":ledger-unavailable")
        assert await provider.payments_of(1) == []
        assert (await provider.charge(1, "key")).status == 201
        assert (await provider.call("GET", "/readyz")).status == 200


@pytest.mark.parametrize("content", [b"certainly not a database, but long enough" * 100, None])
async def test_a_ledger_of_another_kind_is_refused_with_cause_and_remedy(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "ledger.db"
    if content is None:
        with closing(sqlite3.connect(path)) as foreign:
            foreign.execute("CREATE TABLE diary (page TEXT)")
    else:
        path.write_bytes(content)
    code, errors = await _start_in_vain(f"--ledger={path}")
    assert code == 1
    assert str(path) in errors
    assert "--ledger" in errors


async def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, errors = await _start_in_vain(f"--port={port}", f"--ledger={tmp_path / 'ledger.db'}")
    assert code == 1
    assert f"port {port}" in errors
    assert "--port" in errors


async def _start_in_vain(*options: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "payment_provider",
        *options,
        stderr=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    _, errors = await asyncio.wait_for(process.communicate(), DEADLINE_SECONDS)
    return process.returncode, errors.decode()


# Reading


async def test_pages_ascend_without_gap_or_repeat_while_payments_are_made(tmp_path: Path) -> None:
    orders = [order for order in range(1, 301) for _ in range(2)]
    random.Random(5).shuffle(orders)
    before, during = orders[:200], orders[200:]

    async with running_provider(tmp_path / "ledger.db") as provider:
        settled = await asyncio.gather(*(provider.charge(order, str(uuid.uuid4())) for order in before))
        writing = asyncio.gather(*(provider.charge(order, str(uuid.uuid4())) for order in during))
        seen = await provider.all_payments(limit=7)
        written = await writing
        complete = await provider.all_payments(limit=1000)

        positions = [(payment["order_id"], payment["payment_id"]) for payment in seen]
        assert positions == sorted(set(positions))
        assert {answer.json["payment_id"] for answer in settled} <= {payment["payment_id"] for payment in seen}
        everything = sorted((body.json["order_id"], body.json["payment_id"]) for body in (*settled, *written))
        assert [(payment["order_id"], payment["payment_id"]) for payment in complete] == everything
        beyond = await provider.call("GET", "/payments?after_order_id=299&limit=500")
        assert {payment["order_id"] for payment in beyond.json["payments"]} == {300}
        assert beyond.json["next"] is None


async def test_the_summary_is_exact_beyond_floats_and_64_bits(tmp_path: Path) -> None:
    amounts = {"EUR": ["0.01", "0.10", "0.20", *["9999999999999999.99"] * 12], "JPY": ["7", "500"], "KWD": ["1.005"]}

    async with running_provider(tmp_path / "ledger.db") as provider:
        charges = [(currency, amount) for currency, listed in amounts.items() for amount in listed]
        for order, (currency, amount) in enumerate(charges, start=1):
            assert (await provider.charge(order, f"key-{order}", amount, currency)).status == 201
        await provider.charge(1, "key-1", "0.01", "EUR")
        await provider.charge(1, "key-1", "0.02", "EUR")
        await provider.fail("declined")
        await provider.charge(99, "key-99", "50.00", "EUR")
        summary = (await provider.call("GET", "/payments/summary")).json

    assert summary == {
        "currencies": [
            {
                "currency": currency,
                "captured_count": len(listed),
                "captured_total": str(sum(map(Decimal, listed))),
                "declined_count": 1 if currency == "EUR" else 0,
            }
            for currency, listed in amounts.items()
        ],
        "attempts": len(charges) + 3,
        "replays": 1,
    }
    assert Decimal(summary["currencies"][0]["captured_total"]) * 100 > 2**63


async def test_health_and_metrics(provider: RunningProvider, order_id: int, key: str) -> None:
    await provider.charge(order_id, key)
    await provider.charge(order_id, key)
    assert (await provider.call("GET", "/livez")).status == 200
    assert (await provider.call("GET", "/readyz")).json == {"status": "ready"}
    exposed = (await provider.call("GET", "/metrics")).text
    samples = dict(line.rsplit(" ", 1) for line in exposed.splitlines() if not line.startswith("#"))
    assert float(samples['payment_provider_charge_requests_total{outcome="captured"}']) >= 1
    assert float(samples['payment_provider_charge_requests_total{outcome="replayed"}']) >= 1
    assert float(samples["payment_provider_ledger_commit_seconds_count"]) >= 1


# Bad input

GOOD = {"order_id": 123456, "amount": "19.99", "currency": "EUR"}


def without(name: str) -> dict[str, Any]:
    return {field: value for field, value in GOOD.items() if field != name}


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        (GOOD | {"amount": 19.99}, 422, "amount"),
        (GOOD | {"amount": 20}, 422, "amount"),
        (GOOD | {"amount": None}, 422, "amount"),
        (GOOD | {"amount": "0.00"}, 422, "amount"),
        (GOOD | {"amount": "-5.00"}, 422, "amount"),
        (GOOD | {"amount": "1e3"}, 422, "amount"),
        (GOOD | {"amount": "NaN"}, 422, "amount"),
        (GOOD | {"amount": "19.999"}, 422, "amount"),
        (GOOD | {"amount": "19.5", "currency": "JPY"}, 422, "amount"),
        (GOOD | {"amount": "9" * 30}, 422, "amount"),
        (GOOD | {"amount": "1\x00"}, 422, "amount"),
        (GOOD | {"currency": "XXX"}, 422, "currency"),
        (GOOD | {"currency": "eur"}, 422, "currency"),
        (GOOD | {"currency": "EU\x00"}, 422, "currency"),
        (GOOD | {"order_id": 0}, 422, "order_id"),
        (GOOD | {"order_id": -1}, 422, "order_id"),
        (GOOD | {"order_id": 2**63}, 422, "order_id"),
        (GOOD | {"order_id": "1"}, 422, "order_id"),
        (GOOD | {"order_id": 1.0}, 422, "order_id"),
        (GOOD | {"order_id": True}, 422, "order_id"),
        (GOOD | {"customer": "x"}, 422, "customer"),
        (without("amount"), 422, "amount"),
        (without("currency"), 422, "currency"),
        (without("order_id"), 422, "order_id"),
        ([GOOD], 422, "body"),
        (b"", 400, None),
        (b"{", 400, None),
        (b"\xff\xfe", 400, None),
        (b"[" * 10_000, 400, None),
        (b" " * 20_000, 413, None),
    ],
    ids=lambda value: repr(value)[:60] if isinstance(value, dict | list | bytes) else None,
)
async def test_f31_a_bad_body_is_refused_naming_the_field_and_moves_nothing(
    provider: RunningProvider, key: str, body: Any, status: int, field: str | None
) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Idempotency-Key": key, "Content-Type": "application/json"}
    answer = await provider.call("POST", "/payments/charge", data=data, headers=headers)

    assert answer.status == status
    assert answer.headers["Content-Type"] == "application/problem+json"
    problem = answer.json
    assert problem["status"] == status
    assert problem["detail"]
    if field is not None:
        assert field in [entry["field"] for entry in problem["errors"]]
        assert field in problem["detail"]
    assert await provider.payments_of(123456) == []


@pytest.mark.parametrize("sent", [[], [""], ["a b"], ['"open'], ["k" * 256], ["one", "two"], ["é"]])
async def test_f43_a_missing_or_malformed_key_is_a_400(provider: RunningProvider, sent: list[str]) -> None:
    headers = [("Idempotency-Key", value) for value in sent]
    answer = await provider.call("POST", "/payments/charge", json=GOOD, headers=headers)
    assert answer.status == 400
    assert answer.json["errors"][0]["field"] == "Idempotency-Key"
    assert await provider.payments_of(123456) == []


async def test_a_body_that_is_not_declared_as_json_is_a_415(provider: RunningProvider, key: str) -> None:
    headers = {"Idempotency-Key": key, "Content-Type": "text/plain"}
    answer = await provider.call("POST", "/payments/charge", data=json.dumps(GOOD), headers=headers)
    assert answer.status == 415


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "field"),
    [
        ("GET", "/payments?limit=0", None, 422, "limit"),
        ("GET", "/payments?limit=1001", None, 422, "limit"),
        ("GET", "/payments?after_order_id=x", None, 422, "after_order_id"),
        ("GET", "/payments?after_order_id=9223372036854775808", None, 422, "after_order_id"),
        ("GET", "/payments?after_payment_id=1", None, 422, "after_payment_id"),
        ("GET", "/payments?order=1", None, 422, "order"),
        ("GET", "/payments/not-a-uuid", None, 422, "payment_id"),
        ("GET", f"/payments/{uuid.uuid4()}", None, 404, None),
        ("GET", "/nothing", None, 404, None),
        ("DELETE", "/payments/charge", None, 405, None),
        ("PUT", "/faults", [], 422, "body"),
        ("PUT", "/faults", {"rules": [{"kind": "meteor"}]}, 422, "rules.0.kind"),
        ("PUT", "/faults", {"rules": [{"kind": "slow", "probability": 2}]}, 422, "rules.0.probability"),
        ("PUT", "/faults", {"rules": [], "seeds": 1}, 422, "seeds"),
    ],
)
async def test_other_bad_requests_are_problems_that_name_the_field(
    provider: RunningProvider, method: str, path: str, body: Any, status: int, field: str | None
) -> None:
    answer = await provider.call(method, path, json=body) if body is not None else await provider.call(method, path)
    assert answer.status == status
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert answer.json["detail"]
    if field is not None:
        assert [entry["field"] for entry in answer.json["errors"]] == [field]
