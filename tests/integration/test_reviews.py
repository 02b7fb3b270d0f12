"""A person decides about charges, and the two ledgers are reconciled: commands as processes, a real provider."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from billing_service.gateway import HttpPaymentGateway
from billing_service.reconciliation import Kind, Reconciliation, ReconciliationService
from shared.lifecycle import State, running
from tests.support.billing import (
    REPOSITORY,
    BillingUnderTest,
    Provider,
    billing_under_test,
    new_charge,
    running_provider,
)
from tests.support.outbox import until


@pytest.fixture
async def billing(database_url: str) -> AsyncIterator[BillingUnderTest]:
    async with billing_under_test(database_url) as made:
        yield made


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[Provider]:
    async with running_provider(tmp_path / "ledger.db") as made:
        yield made


async def command(billing: BillingUnderTest, provider: Provider | None, *arguments: str) -> tuple[int, str, str]:
    """Run `billing-service …`: its exit status, and what it said and complained."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from billing_service.cli import main; main()", *arguments),
        env={
            **os.environ,
            "BILLING_SERVICE_DATABASE_URL": billing.database.settings.url,
            "BILLING_SERVICE_PAYMENT_PROVIDER_URL": provider.url if provider else "http://127.0.0.1:1",
        },
        cwd=REPOSITORY,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    said, complained = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said.decode(), complained.decode()


async def to_review(billing: BillingUnderTest, *order_ids: int) -> None:
    await billing.execute(
        "UPDATE charge SET state = 'needs_review', review_reason = 'idempotency_window_passed', attempt = 3 "
        "WHERE order_id = ANY (:ids)",
        ids=list(order_ids),
    )


async def test_f42_a_person_settles_what_the_providers_ledger_has(
    billing: BillingUnderTest, provider: Provider
) -> None:
    paid, other = new_charge(1), new_charge(2)
    await billing.request(paid, other)
    await to_review(billing, 1, 2)
    assert await provider.charge(str(paid.event_id), 1, "19.99") == 201
    assert await provider.charge("by-hand", 2, "19.99") == 201
    [by_hand] = await provider.payments(2)
    dry, settled, refused, named = [
        await command(billing, provider, "reviews", "settle", *arguments)
        for arguments in (
            ("1", "--because", "looked at it", "--dry-run"),
            ("1", "--because", "looked at it", "--by", "ada"),
            ("2", "--because", "looked at it"),
            ("2", "--because", "paid by hand", "--by", "ada", "--payment", by_hand["payment_id"]),
        )
    ]
    assert dry[0] == 0
    assert "would be captured" in dry[1]
    assert settled[0] == 0, settled
    assert refused[0] == 2
    assert "--payment" in refused[2]
    assert named[0] == 0, named
    for order_id in (1, 2):
        charge = await billing.charge_of(order_id)
        [payment] = await provider.payments(order_id)
        assert (charge.state, charge.provider_reference) == ("captured", payment["payment_id"])
    assert [(event["event_type"], event["order_id"]) for event in await billing.events()] == [
        ("payment.captured.v1", 1),
        ("payment.captured.v1", 2),
    ]
    again = await command(billing, provider, "reviews", "settle", "1", "--because", "once more")
    assert again[0] == 2
    assert "captured" in again[2]
    assert len(await billing.events()) == 2


async def test_f42_a_charge_is_closed_only_when_the_provider_has_no_payment(
    billing: BillingUnderTest, provider: Provider
) -> None:
    await billing.request(new_charge(1), paid := new_charge(2), new_charge(3))
    await to_review(billing, 1, 2)
    assert await provider.charge(str(paid.event_id), 2, "19.99") == 201
    await billing.execute("UPDATE charge SET request = '', first_attempt_at = now() WHERE order_id = 1")
    too_early = await command(billing, provider, "reviews", "cancel", "1", "--because", "nobody was charged")
    assert too_early[0] == 2
    assert "may still be at the provider" in too_early[2]
    await billing.execute("UPDATE charge SET next_attempt_at = now() - interval '6 minutes' WHERE order_id = 1")
    closed, refused, not_waiting, unknown, away, mute = await asyncio.gather(
        command(billing, provider, "reviews", "cancel", "1", "--because", "nobody was charged", "--by", "ada"),
        command(billing, provider, "reviews", "cancel", "2", "--because", "nobody was charged"),
        command(billing, provider, "reviews", "cancel", "3", "--because", "x"),
        command(billing, provider, "reviews", "cancel", "99", "--because", "x"),
        command(billing, None, "reviews", "cancel", "2", "--because", "x"),
        command(billing, provider, "reviews", "cancel", "2", "--because", " "),
    )
    assert closed[0] == 0, closed
    assert [answer[0] for answer in (refused, not_waiting, unknown, away, mute)] == [2] * 5
    assert "1 payments" in refused[2]
    assert "requested" in not_waiting[2]
    assert "no charge" in unknown[2]
    assert "provider" in away[2]
    assert "--because" in mute[2]
    charge = await billing.charge_of(1)
    assert (charge.state, charge.decline_reason) == ("declined", "closed by a person: nobody was charged")
    [event] = await billing.events()
    assert event["event_type"] == "payment.declined.v1"
    assert (await billing.charge_of(2)).state == "needs_review"


async def test_a_payment_of_another_amount_is_not_taken_for_ours(billing: BillingUnderTest, provider: Provider) -> None:
    await billing.request(charge := new_charge(1))
    await to_review(billing, 1)
    assert await provider.charge(str(charge.event_id), 1, "18.99") == 201
    answer = await command(billing, provider, "reviews", "settle", "1", "--because", "looked at it")
    assert answer[0] == 2
    assert "another amount" in answer[2]
    assert await billing.events() == []


# --------------------------------------------------------------------------------------------- reconciliation


async def plant(billing: BillingUnderTest, provider: Provider) -> dict[int, Kind]:
    """Make one order of each contradiction, and some that agree; return what is to be found."""
    charges = {order_id: new_charge(order_id) for order_id in range(1, 11) if order_id != 4}
    await billing.request(*charges.values())
    for order_id in (1, 2, 3, 5, 6, 7, 8):
        amount = "18.99" if order_id == 5 else "19.99"
        key = str(charges[order_id].event_id) if order_id != 8 else "somebody-else"
        assert await provider.charge(key, order_id, amount) == 201
    assert await provider.charge("double", 2, "19.99") == 201
    assert await provider.charge("no-charge", 4, "19.99") == 201
    await billing.execute(
        "UPDATE charge SET state = 'captured', provider_reference = 'x', settled_at = now() WHERE order_id < 10"
    )
    for order_id in (1, 2, 5):
        payment = (await provider.payments(order_id))[0]
        await billing.execute(
            "UPDATE charge SET provider_reference = :id WHERE order_id = :order",
            id=payment["payment_id"],
            order=order_id,
        )
    await billing.execute(
        "UPDATE charge SET state = 'requested', provider_reference = NULL, settled_at = NULL, "
        "request = '', first_attempt_at = now() - interval '1 hour' WHERE order_id = 6"
    )
    await billing.execute("UPDATE charge SET state = 'declined', decline_reason = 'no funds' WHERE order_id = 7")
    return {
        2: Kind.DOUBLE_PAYMENT,
        3: Kind.ANOTHER_PAYMENT,  # our reference is not the payment's
        4: Kind.PAYMENT_WITHOUT_CHARGE,
        5: Kind.AMOUNT_DIFFERS,
        6: Kind.PAID_NOT_RECORDED,
        7: Kind.PAID_THOUGH_CLOSED,
        8: Kind.ANOTHER_PAYMENT,
        9: Kind.CHARGE_WITHOUT_PAYMENT,
    }


async def reconciled(
    billing: BillingUnderTest, provider: Provider, since: datetime | None = None, **options: Any
) -> dict[int, Kind]:
    gateway = HttpPaymentGateway(provider.url)
    await gateway.open()
    try:
        report = await Reconciliation(billing.database, gateway, pause_seconds=0.01, **options).run(since)
    finally:
        await gateway.close()
    return {finding.order_id: finding.kind for finding in report.findings}


async def test_a_reconciliation_names_what_either_side_lacks(billing: BillingUnderTest, provider: Provider) -> None:
    planted = await plant(billing, provider)
    assert await reconciled(billing, provider) == planted
    status, said, _ = await command(billing, provider, "reconcile", "--json")
    assert status == 1
    found = json.loads(said)
    assert {finding["order_id"]: finding["kind"] for finding in found["findings"]} == planted
    assert (found["charges"], found["payments"]) == (9, 9)
    status, said, _ = await command(billing, provider, "reconcile", "--since", "1h")
    assert status == 1
    assert "order 2 double_payment" in said
    assert "refund all but" in said


async def test_a_reconciliation_of_ledgers_that_agree_and_one_that_cannot_be_told(
    billing: BillingUnderTest, provider: Provider
) -> None:
    await billing.request(*(new_charge(order_id) for order_id in range(1, 31)))
    async with running([billing.executor(provider.url)]):
        await billing.settled(*range(1, 31))
    agree, away = await asyncio.gather(command(billing, provider, "reconcile"), command(billing, None, "reconcile"))
    assert agree[0] == 0, agree
    assert "30 charges and 30 payments compared: they agree" in agree[1]
    assert away[0] == 2
    assert "provider" in away[2]


async def test_payments_that_a_restored_database_has_forgotten_are_found_by_a_recent_look(
    billing: BillingUnderTest, provider: Provider
) -> None:
    """Orders 1 and 5 are known, 2 to 4 were lost with the last backup; then also without any charge since."""
    await billing.request(old := new_charge(1), new := new_charge(5))
    await billing.execute(
        "UPDATE charge SET charge_id = '01900000-0000-7000-8000-000000000000', state = 'captured', settled_at = now(), "
        "provider_reference = 'x' WHERE order_id = 1"
    )
    for order_id, key in ((1, old.event_id), (2, "a"), (3, "b"), (4, "c"), (5, new.event_id)):
        assert await provider.charge(str(key), order_id, "19.99") == 201
    lost = dict.fromkeys((2, 3, 4), Kind.PAYMENT_WITHOUT_CHARGE)
    hour_ago = datetime.now(UTC) - timedelta(hours=1)
    assert await reconciled(billing, provider, since=hour_ago) == {**lost, 5: Kind.PAID_NOT_RECORDED}
    await billing.execute("DELETE FROM charge WHERE order_id = 5")
    assert await reconciled(billing, provider, since=hour_ago) == {
        **lost,
        5: Kind.PAYMENT_WITHOUT_CHARGE,
    }, "order 1 is older, and its other reference is not looked at"


async def test_what_is_under_way_is_no_finding(billing: BillingUnderTest, provider: Provider) -> None:
    await billing.request(charge := new_charge(1))
    assert await provider.charge(str(charge.event_id), 1, "19.99") == 201
    await billing.execute("UPDATE charge SET request = '', first_attempt_at = now() - interval '1 minute'")
    assert await reconciled(billing, provider) == {}
    assert await reconciled(billing, provider, settling_seconds=30) == {1: Kind.PAID_NOT_RECORDED}


async def test_a_reconciliation_on_schedule_shows_in_metrics_and_readiness(
    billing: BillingUnderTest, provider: Provider
) -> None:
    planted = await plant(billing, provider)
    service = ReconciliationService(billing.database, HttpPaymentGateway(provider.url), interval_seconds=3600)
    async with running([service]):
        await until(lambda: service.ready().state is State.DEGRADED)
        assert str(len(planted)) in service.ready().reason
        assert "billing-service reconcile" in service.ready().reason
    found = REGISTRY.get_sample_value("billing_reconciliation_findings", {"kind": "another_payment"})
    assert found == 2
    assert (REGISTRY.get_sample_value("billing_reconciled_timestamp_seconds") or 0) > 1e9
