"""The executor against a real PostgreSQL and a real provider: whatever fails, one charge moves money once."""

import asyncio
import json
from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import event as sqlalchemy_event
from sqlalchemy import text

from billing_service import repository
from billing_service.api.charges import ChargeView
from billing_service.breaker import BreakerState, CircuitBreaker
from billing_service.charge import Captured, Charge, ClaimedCharge, Outcome, Unknown
from billing_service.gateway import HttpPaymentGateway
from shared.lifecycle import State, running
from tests.support.billing import BillingUnderTest, Provider, billing_under_test, new_charge, running_provider

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
async def provider_process(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Provider]:
    async with running_provider(tmp_path_factory.mktemp("provider") / "ledger.sqlite3") as provider:
        yield provider


@pytest.fixture
async def provider(provider_process: Provider) -> AsyncIterator[Provider]:
    await provider_process.fail()
    yield provider_process
    await provider_process.fail()


@pytest.fixture
async def billing(database_url: str) -> AsyncIterator[BillingUnderTest]:
    async with billing_under_test(database_url) as billing:
        yield billing


_next_order_id = iter(range(1, 10**9))


def order() -> int:
    """An order id that no other test of this module uses at the shared provider."""
    return next(_next_order_id)


class Watched(HttpPaymentGateway):
    """The real client, remembering what was sent."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.sent: list[tuple[str, bytes]] = []
        self.at_once = self.most_at_once = 0

    async def charge(self, claimed: ClaimedCharge, deadline_seconds: float) -> Outcome:
        self.sent.append((str(claimed.event_id), claimed.request))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return await super().charge(claimed, deadline_seconds)
        finally:
            self.at_once -= 1


# ----------------------------------------------------------------------------------------------- results


async def test_a_charge_is_captured_once_and_published(billing: BillingUnderTest, provider: Provider) -> None:
    charge = new_charge(order(), traceparent=TRACEPARENT)
    await billing.request(charge)
    async with running([billing.executor(provider.url)]):
        [settled] = await billing.settled(charge.order_id)
    [payment] = await provider.payments(charge.order_id)
    assert settled.state == "captured"
    assert settled.provider_reference == payment["payment_id"]
    assert settled.settled_at is not None
    assert payment["idempotency_key"] == str(charge.event_id)
    assert (payment["amount"], payment["currency"]) == ("19.99", "EUR")

    [event] = await billing.events()
    assert (event["_topic"], event["_key"]) == ("billing-service.payment", str(charge.order_id))
    assert event["_headers"]["traceparent"] == TRACEPARENT
    assert event["event_type"] == "payment.captured.v1"
    assert event["order_id"] == charge.order_id
    assert event["order_event_id"] == str(charge.event_id)
    assert event["charge_id"] == str(settled.charge_id)
    assert (event["amount"], event["currency"]) == ("19.99", "EUR")
    assert event["provider_reference"] == payment["payment_id"]
    assert event["event_id"] != str(charge.event_id)


async def test_a_decline_is_a_result_and_is_not_tried_again(billing: BillingUnderTest, provider: Provider) -> None:
    charge = new_charge(order())
    await provider.fail({"kind": "declined", "decline_reason": "insufficient_funds"})
    await billing.request(charge)
    async with running([billing.executor(provider.url)]):
        [settled] = await billing.settled(charge.order_id)
    assert (settled.state, settled.decline_reason, settled.attempt) == ("declined", "insufficient_funds", 1)
    [event] = await billing.events()
    assert (event["event_type"], event["decline_reason"]) == ("payment.declined.v1", "insufficient_funds")
    assert [payment["status"] for payment in await provider.payments(charge.order_id)] == ["declined"]


# -------------------------------------------------------------------------------------- unknown outcomes


@pytest.mark.parametrize(
    ("fault", "changes"),
    [
        ({"kind": "timeout_after_capture", "delay_seconds": 20}, {"call_deadline_seconds": 0.3}),
        ({"kind": "reset_after_capture"}, {}),
        ({"kind": "reset_before_capture"}, {}),
        ({"kind": "error_500"}, {}),
        ({"kind": "conflict_409"}, {}),
        ({"kind": "unavailable_503", "retry_after_seconds": 0}, {}),
        ({"kind": "wrong_body"}, {}),
        ({"kind": "slow", "delay_seconds": 1.0}, {"call_deadline_seconds": 0.3}),
    ],
    ids=lambda value: value.get("kind", ""),
)
async def test_f41_an_unknown_outcome_is_asked_again_with_the_same_key_and_bytes(
    billing: BillingUnderTest, provider: Provider, fault: dict[str, object], changes: dict[str, Any]
) -> None:
    charge = new_charge(order())
    await provider.fail({"remaining": 2, **fault})
    await billing.request(charge)
    gateway = Watched(provider.url)
    async with running([billing.executor(gateway, **changes)]):
        [settled] = await billing.settled(charge.order_id)
    assert settled.state == "captured"
    assert settled.attempt >= 2
    assert len(gateway.sent) == settled.attempt
    assert len(set(gateway.sent)) == 1, "one key and one body at every attempt"
    [payment] = await provider.payments(charge.order_id)
    assert payment["payment_id"] == settled.provider_reference
    assert len(await billing.events()) == 1


def _due_in(charge: Charge) -> float:
    assert charge.next_attempt_at is not None
    return (charge.next_attempt_at - charge.requested_at).total_seconds()


async def test_retry_after_is_kept(billing: BillingUnderTest, provider: Provider) -> None:
    charge = new_charge(order())
    await provider.fail({"kind": "unavailable_503", "retry_after_seconds": 3600})
    await billing.request(charge)
    async with running([billing.executor(provider.url)]):
        waiting = await billing.until(charge.order_id, lambda found: found.attempt == 1 and _due_in(found) > 60)
    assert 3590 < _due_in(waiting) < 3610
    assert waiting.state == "requested"
    assert await provider.fired() == 1


async def test_too_many_requests_slow_the_executor_down(billing: BillingUnderTest, provider: Provider) -> None:
    charges = [new_charge(order()) for _ in range(20)]
    await provider.fail({"kind": "rate_limited_429", "remaining": 5, "retry_after_seconds": 0})
    await billing.request(*charges)
    gateway = Watched(provider.url)
    breaker = CircuitBreaker(calls_at_once=8)
    async with running([billing.executor(gateway, breaker, calls_at_once=8)]):
        settled = await billing.settled(*(charge.order_id for charge in charges))
    assert {charge.state for charge in settled} == {"captured"}
    assert gateway.most_at_once <= 8
    assert len(await billing.events()) == 20
    assert await provider.fired() == 5


# ------------------------------------------------------------------------------------------ for a person


async def test_a_key_that_the_provider_knows_with_another_body_goes_to_a_person(
    billing: BillingUnderTest, provider: Provider
) -> None:
    charge = new_charge(order())
    assert await provider.charge(str(charge.event_id), charge.order_id, "5.00") == 201
    await billing.request(charge)
    async with running([billing.executor(provider.url)]):
        [settled] = await billing.settled(charge.order_id)
    assert (settled.state, settled.review_reason, settled.attempt) == ("needs_review", "key_reused", 1)
    assert [payment["amount"] for payment in await provider.payments(charge.order_id)] == ["5.00"]
    assert await billing.events() == []


async def test_f42_past_the_idempotency_window_a_person_decides(billing: BillingUnderTest, provider: Provider) -> None:
    old, fresh = new_charge(order()), new_charge(order())
    await billing.request(old, fresh)
    await billing.execute(
        "UPDATE charge SET request = '{}', attempt = 4, first_attempt_at = now() - interval '23 hours 1 second'"
        " WHERE order_id = :order_id",
        order_id=old.order_id,
    )
    gateway = Watched(provider.url)
    async with running([billing.executor(gateway)]):
        [reviewed, settled] = await billing.settled(old.order_id, fresh.order_id)
    assert (reviewed.state, reviewed.review_reason, reviewed.attempt) == (
        "needs_review",
        "idempotency_window_passed",
        4,
    )
    assert settled.state == "captured"
    assert await provider.payments(old.order_id) == []
    assert [key for key, _ in gateway.sent] == [str(fresh.event_id)]


async def test_a_charge_that_no_request_can_be_made_of_goes_to_a_person_alone(
    billing: BillingUnderTest, provider: Provider
) -> None:
    impossible, good = new_charge(order(), amount=Decimal("NaN")), new_charge(order())
    await billing.request(impossible, good)
    async with running([billing.executor(provider.url)]):
        [reviewed, settled] = await billing.settled(impossible.order_id, good.order_id)
    assert (reviewed.state, reviewed.review_reason, reviewed.attempt) == ("needs_review", "unchargeable", 0)
    assert settled.state == "captured"


async def test_a_charge_in_a_currency_that_left_the_list_is_called_settled_and_published(
    billing: BillingUnderTest,
) -> None:
    charge = new_charge(order(), currency="ZZZ", amount=Decimal("19.90"))
    await billing.request(charge)
    confirming = Lying(Captured("p-1"))
    confirming.release.set()
    async with running([billing.executor(confirming)]):
        [settled] = await billing.settled(charge.order_id)
    assert settled.state == "captured"
    [event] = await billing.events()
    assert (event["amount"], event["currency"]) == ("19.9", "ZZZ")
    assert ChargeView.of(settled).amount == "19.9"


class Lying:
    """A provider that confirms whatever it is told to."""

    def __init__(self, *outcomes: Outcome) -> None:
        self._outcomes = list(outcomes)
        self.called = asyncio.Event()
        self.release = asyncio.Event()
        self.calls = 0

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def charge(self, claimed: ClaimedCharge, deadline_seconds: float) -> Outcome:
        self.calls += 1
        self.called.set()
        await self.release.wait()
        return self._outcomes.pop(0)


# ---------------------------------------------------------------------------------------- lease and fence


async def test_f36_an_answer_whose_fence_is_lost_is_dropped(billing: BillingUnderTest) -> None:
    charge = new_charge(order())
    await billing.request(charge)
    slow = Lying(Captured("stale"))
    executor = billing.executor(slow)
    async with running([executor]):
        await asyncio.wait_for(slow.called.wait(), 10)
        # Another executor took over meanwhile, and has the charge in hand.
        await billing.execute("UPDATE charge SET attempt = attempt + 1, lease_owner = :owner", owner=uuid4())
        slow.release.set()
        async with asyncio.timeout(10):
            while executor._attempts:
                await asyncio.sleep(0.01)
    left = await billing.charge_of(charge.order_id)
    assert (left.state, left.provider_reference, left.attempt) == ("requested", None, 2)
    assert await billing.events() == []


async def test_f36_a_stale_answer_changes_no_settled_charge(billing: BillingUnderTest, provider: Provider) -> None:
    """An executor is frozen during its call; its lease ends, another one finishes the charge, the first wakes up."""
    charge = new_charge(order())
    await billing.request(charge)
    frozen = Lying(Captured("stale"))
    first = billing.executor(frozen)
    async with running([first]):
        await asyncio.wait_for(frozen.called.wait(), 10)
        await billing.execute("UPDATE charge SET lease_expires_at = now() - interval '1 second'")
        async with running([billing.executor(provider.url)]):
            await billing.settled(charge.order_id)
        frozen.release.set()
        async with asyncio.timeout(10):
            while first._attempts:
                await asyncio.sleep(0.01)
    [payment] = await provider.payments(charge.order_id)
    settled = await billing.charge_of(charge.order_id)
    assert settled.provider_reference == payment["payment_id"]
    assert len(await billing.events()) == 1


async def test_a_lease_that_is_nearly_over_is_given_back_unsent(billing: BillingUnderTest) -> None:
    charge = new_charge(order())
    await billing.request(charge)
    readings = iter([0.0])
    provider = Lying(Captured("p-1"))
    provider.release.set()
    executor = billing.executor(provider)
    executor._clock = lambda: next(readings, 1000.0)  # the process was frozen between its first claim and the call
    async with running([executor]):
        [settled] = await billing.settled(charge.order_id)
    assert (settled.attempt, provider.calls) == (2, 1)


async def test_two_executors_share_a_table_without_a_second_call_or_settlement(
    billing: BillingUnderTest, provider: Provider
) -> None:
    charges = [new_charge(order()) for _ in range(300)]
    await billing.request(*charges)
    gateways = [Watched(provider.url), Watched(provider.url)]
    async with running([billing.executor(gateway) for gateway in gateways]):
        settled = await billing.settled(*(charge.order_id for charge in charges))
    assert {charge.state for charge in settled} == {"captured"}
    assert {charge.attempt for charge in settled} == {1}, "no charge was claimed twice"
    sent = [key for gateway in gateways for key, _ in gateway.sent]
    assert sorted(sent) == sorted(str(charge.event_id) for charge in charges)
    assert all(gateway.sent for gateway in gateways), "both took part"
    assert sorted(event["order_id"] for event in await billing.events()) == sorted(c.order_id for c in charges)


async def test_executors_under_faults_capture_every_order_once(billing: BillingUnderTest, provider: Provider) -> None:
    charges = [new_charge(order(), amount=Decimal(1 + number)) for number in range(150)]
    await provider.fail(
        {"kind": "reset_after_capture", "probability": 0.2},
        {"kind": "error_500", "probability": 0.2},
        {"kind": "conflict_409", "probability": 0.1},
        {"kind": "rate_limited_429", "probability": 0.05, "retry_after_seconds": 0},
        {"kind": "wrong_body", "probability": 0.1},
    )
    await billing.request(*charges)
    breakers = [CircuitBreaker(16, first_pause_seconds=0.05, most_pause_seconds=0.1) for _ in range(2)]
    async with running([billing.executor(provider.url, breaker) for breaker in breakers]):
        settled = await billing.settled(*(charge.order_id for charge in charges), deadline_seconds=60)
    assert {charge.state for charge in settled} == {"captured"}
    for charge in charges:
        [payment] = await provider.payments(charge.order_id)
        assert Decimal(payment["amount"]) == charge.amount
    assert sorted(event["order_id"] for event in await billing.events()) == sorted(c.order_id for c in charges)


async def test_a_client_that_fails_unexpectedly_costs_an_attempt_and_no_slot(billing: BillingUnderTest) -> None:
    charge = new_charge(order())
    await billing.request(charge)

    class Faulty(Lying):
        async def charge(self, claimed: ClaimedCharge, deadline_seconds: float) -> Outcome:
            self.calls += 1
            if self.calls < 5:
                raise KeyError("a fault of ours")
            return Captured("p-1")

    breaker = CircuitBreaker(1, failures_to_open=1, first_pause_seconds=0.05, most_pause_seconds=0.1)
    async with running([billing.executor(Faulty(), breaker, calls_at_once=1)]):
        [settled] = await billing.settled(charge.order_id)
    assert (settled.state, settled.attempt) == ("captured", 5)


async def test_charges_claimed_while_the_breaker_opens_go_back_uncalled_and_one_probe_follows(
    billing: BillingUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    charges = [new_charge(order()) for _ in range(20)]
    await billing.request(*charges)
    breaker = CircuitBreaker(16, failures_to_open=3, first_pause_seconds=1.0, most_pause_seconds=30.0)
    in_flight = [breaker.begin() for _ in range(3)]
    real = repository.claim_due

    async def claim_while_calls_fail(*arguments: Any) -> repository.Claims:
        claims = await real(*arguments)
        while in_flight and (call := in_flight.pop()) is not None:
            breaker.record(Unknown("connection"), call)
        return claims

    class Away(Lying):
        async def charge(self, claimed: ClaimedCharge, deadline_seconds: float) -> Outcome:
            self.calls += 1
            return Unknown("connection")

    monkeypatch.setattr(repository, "claim_due", claim_while_calls_fail)
    away = Away()
    async with running([billing.executor(away, breaker)]):
        waiting = [await billing.until(c.order_id, lambda found: found.attempt == 1) for c in charges[:16]]
        assert breaker.state is BreakerState.OPEN
        assert away.calls == 0
        pause = breaker.seconds_until_allowed()
        assert pause <= 1.0, "one opening, one pause"
        async with asyncio.timeout(15):
            while away.calls == 0:
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.3)
        assert away.calls == 1, "exactly one probe, and the pause after it"
        assert breaker.state is BreakerState.OPEN
    assert {charge.state for charge in waiting} == {"requested"}
    async with billing.database.engine.connect() as connection:
        leased = await connection.execute(text("SELECT count(*) FROM charge WHERE lease_owner IS NOT NULL"))
        assert leased.scalar_one() == 0


# -------------------------------------------------------------------------------- a provider that is away


async def test_a_provider_that_is_away_opens_the_breaker_and_charges_go_on_afterwards(
    billing: BillingUnderTest, tmp_path: Path
) -> None:
    charges = [new_charge(order_id) for order_id in range(1, 41)]
    ledger = tmp_path / "ledger.sqlite3"
    async with running_provider(ledger) as away:
        pass
    port = away.url.rpartition(":")[2]
    breaker = CircuitBreaker(4, failures_to_open=3, first_pause_seconds=0.2, most_pause_seconds=0.4)
    executor = billing.executor(away.url, breaker, calls_at_once=4)
    await billing.request(*charges)
    async with running([executor]):
        async with asyncio.timeout(15):
            while executor.breaker.state is BreakerState.CLOSED:
                await asyncio.sleep(0.01)
        assert executor.ready().state is State.DEGRADED
        assert "connection" in executor.ready().reason
        attempted = sum([(await billing.charge_of(charge.order_id)).attempt > 0 for charge in charges])
        assert attempted < len(charges), "claiming is paused, so charges wait untouched"
        async with running_provider(ledger, port=int(port)):
            settled = await billing.settled(*(charge.order_id for charge in charges))
        assert executor.ready().state is State.READY
    assert {charge.state for charge in settled} == {"captured"}


async def test_a_failing_tls_handshake_moves_no_money_and_the_charge_waits(
    billing: BillingUnderTest, provider: Provider
) -> None:
    """The address says https and nobody there speaks TLS: no request has left, and none is taken for one."""
    charge = new_charge(order())
    await billing.request(charge)
    breaker = CircuitBreaker(4, failures_to_open=2, first_pause_seconds=0.1, most_pause_seconds=0.2)
    executor = billing.executor(provider.url.replace("http://", "https://"), breaker)
    async with running([executor]):
        async with asyncio.timeout(15):
            while executor.breaker.state is BreakerState.CLOSED:
                await asyncio.sleep(0.01)
        assert executor.ready().state is State.DEGRADED
    assert (await billing.charge_of(charge.order_id)).state == "requested"
    assert await provider.payments(charge.order_id) == []
    async with running([billing.executor(provider.url)]):
        [settled] = await billing.settled(charge.order_id)
    assert settled.state == "captured"
    assert len(await provider.payments(charge.order_id)) == 1


# ----------------------------------------------------------------------------------- database and stopping


async def test_an_answer_that_cannot_be_recorded_now_is_kept_and_tried_again(billing: BillingUnderTest) -> None:
    charge = new_charge(order())
    await billing.request(charge)
    answered = Lying(Captured("p-1"))
    executor = billing.executor(answered)
    async with running([executor]):
        await asyncio.wait_for(answered.called.wait(), 10)
        blocker = await billing.database.engine.connect()
        try:
            # A lock that nobody gives up until `lock_timeout`: transient, so the answer is kept and tried again.
            await blocker.execute(text("LOCK TABLE charge IN ACCESS EXCLUSIVE MODE"))
            answered.release.set()
            async with asyncio.timeout(20):
                while executor.ready().state is State.READY:
                    await asyncio.sleep(0.05)
            await blocker.rollback()
        finally:
            await blocker.close()
        [settled] = await billing.settled(charge.order_id)
    assert (settled.state, settled.provider_reference, answered.calls) == ("captured", "p-1", 1)


async def test_a_topic_that_is_not_registered_settles_nothing_and_says_so(
    billing: BillingUnderTest, provider: Provider
) -> None:
    charge = new_charge(order())
    await billing.execute("DELETE FROM outbox_topic")
    await billing.request(charge)
    executor = billing.executor(provider.url)
    async with running([executor]):
        async with asyncio.timeout(15):
            while executor.ready().state is not State.DEGRADED:
                await asyncio.sleep(0.02)
        assert "migrate" in executor.ready().reason
        left = await billing.charge_of(charge.order_id)
        assert left.state == "requested", "settlement and event are one transaction"
        await billing.execute("INSERT INTO outbox_topic (topic, partitions) VALUES ('billing-service.payment', 12)")
        [settled] = await billing.settled(charge.order_id)
        async with asyncio.timeout(5):
            while executor.ready().state is not State.READY:
                await asyncio.sleep(0.02)
    assert settled.state == "captured"
    assert len(await provider.payments(charge.order_id)) == 1


async def test_stopping_finishes_calls_in_flight_and_settles_them(
    billing: BillingUnderTest, provider: Provider
) -> None:
    charges = [new_charge(order()) for _ in range(8)]
    await provider.fail({"kind": "slow", "delay_seconds": 0.5})
    await billing.request(*charges)
    gateway = Watched(provider.url)
    async with running([billing.executor(gateway, calls_at_once=4)]):
        async with asyncio.timeout(10):
            while gateway.at_once < 4:
                await asyncio.sleep(0.01)
    found = [await billing.charge_of(charge.order_id) for charge in charges]
    assert sum(charge.state == "captured" for charge in found) == 4
    assert {charge.attempt for charge in found if charge.state == "requested"} == {0}
    assert len(await billing.events()) == 4


async def test_stopping_hangs_up_on_a_call_that_takes_too_long_and_gives_the_lease_back(
    billing: BillingUnderTest, provider: Provider
) -> None:
    charge = new_charge(order())
    await provider.fail({"kind": "timeout_after_capture", "delay_seconds": 30, "remaining": 1})
    await billing.request(charge)
    gateway = Watched(provider.url)
    loop = asyncio.get_running_loop()
    async with running([billing.executor(gateway, drain_seconds=0.2)]):
        async with asyncio.timeout(10):
            while not await provider.fired():
                await asyncio.sleep(0.01)
        began = loop.time()
    assert loop.time() - began < 4
    left = await billing.charge_of(charge.order_id)
    assert (left.state, left.attempt) == ("requested", 1)
    async with running([billing.executor(provider.url)]):
        [settled] = await billing.settled(charge.order_id, deadline_seconds=5)  # sooner than the lease would end
    assert settled.state == "captured"
    assert len(await provider.payments(charge.order_id)) == 1


async def test_a_wake_up_is_quicker_than_the_poll(billing: BillingUnderTest, provider: Provider) -> None:
    executor = billing.executor(provider.url, poll_seconds=60.0)
    async with running([executor]):
        async with asyncio.timeout(10):
            while executor.ready().state is not State.READY:
                await asyncio.sleep(0.01)
        charge = new_charge(order())
        await billing.request(charge)
        executor.wake()
        [settled] = await billing.settled(charge.order_id, deadline_seconds=10)
    assert settled.state == "captured"


async def test_the_longest_due_charge_goes_first(billing: BillingUnderTest) -> None:
    charges = [new_charge(order()) for _ in range(5)]
    await billing.request(*charges)
    for age, charge in enumerate(charges):
        await billing.execute(
            "UPDATE charge SET next_attempt_at = now() - make_interval(mins => :age) WHERE order_id = :order_id",
            age=age,
            order_id=charge.order_id,
        )
    seen: list[int] = []

    class Noting(Lying):
        async def charge(self, claimed: ClaimedCharge, deadline_seconds: float) -> Outcome:
            seen.append(claimed.order_id)
            return Captured(f"p-{claimed.order_id}")

    async with running([billing.executor(Noting(), calls_at_once=1)]):
        await billing.settled(*(charge.order_id for charge in charges))
    assert seen == [charge.order_id for charge in reversed(charges)]


async def test_statements_for_a_batch_of_charges_do_not_grow_with_it(billing: BillingUnderTest) -> None:
    """Claim: lock and lease. Settle: update and append. Whatever answers together shares them."""
    charges = [new_charge(order()) for _ in range(16)]
    await billing.request(*charges)
    statements: list[str] = []
    sqlalchemy_event.listen(
        billing.database.engine.sync_engine,
        "before_cursor_execute",
        lambda _c, _cursor, statement, *_: statements.append(" ".join(statement.split())[:24]),
    )
    together = Lying(*(Captured(f"p-{number}") for number in range(16)))
    async with running([billing.executor(together, poll_seconds=30.0)]):
        async with asyncio.timeout(10):
            while together.calls < 16:
                await asyncio.sleep(0.01)
        assert len(statements) == 2, statements
        statements.clear()
        together.release.set()
        async with asyncio.timeout(10):
            while not any("outbox" in statement for statement in statements):
                await asyncio.sleep(0.01)
        writes = [statement for statement in statements if not statement.startswith("SELECT")]
    assert len(writes) == 2, writes
    assert len(await billing.events()) == 16


async def test_no_transaction_is_open_while_the_provider_is_asked(billing: BillingUnderTest) -> None:
    charge = new_charge(order())
    await billing.request(charge)
    slow = Lying(Captured("p-1"))
    async with running([billing.executor(slow, poll_seconds=30.0)]):
        await asyncio.wait_for(slow.called.wait(), 10)
        async with billing.database.engine.connect() as connection:
            open_transactions = await connection.execute(
                text(
                    "SELECT count(*) FROM pg_stat_activity"
                    " WHERE datname = current_database() AND pid <> pg_backend_pid() AND xact_start IS NOT NULL"
                )
            )
            assert open_transactions.scalar_one() == 0
        slow.release.set()
        await billing.settled(charge.order_id)


async def test_the_request_is_fixed_at_the_first_claim(billing: BillingUnderTest, provider: Provider) -> None:
    charge = new_charge(order(), amount=Decimal(1000), currency="JPY")
    await billing.request(charge)
    gateway = Watched(provider.url)
    async with running([billing.executor(gateway)]):
        await billing.settled(charge.order_id)
    [(key, request)] = gateway.sent
    assert key == str(charge.event_id)
    assert json.loads(request) == {"order_id": charge.order_id, "amount": "1000", "currency": "JPY"}
