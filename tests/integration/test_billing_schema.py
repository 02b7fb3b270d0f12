"""The migration: up, down, what the models say, and the rules that the database itself keeps."""

from collections.abc import AsyncIterator

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from billing_service.tables import metadata
from shared.migrations import alembic_config, downgrade, upgrade
from tests.support.billing import BillingUnderTest, billing_under_test, new_charge


@pytest.fixture
async def billing(database_url: str) -> AsyncIterator[BillingUnderTest]:
    async with billing_under_test(database_url) as billing:
        yield billing


async def test_the_models_say_what_the_migration_makes(billing: BillingUnderTest) -> None:
    def differences(connection: Connection) -> list[object]:
        return list(compare_metadata(MigrationContext.configure(connection), metadata))

    async with billing.database.engine.connect() as connection:
        assert await connection.run_sync(differences) == []


async def test_the_models_name_the_same_checks(billing: BillingUnderTest) -> None:
    async with billing.database.engine.connect() as connection:
        rows = await connection.execute(
            text("SELECT conname FROM pg_constraint WHERE conrelid = 'charge'::regclass AND contype = 'c'")
        )
        stored = set(rows.scalars())
    declared = {str(check.name) for check in metadata.tables["charge"].constraints if "ck_" in str(check.name)}
    assert stored == declared


async def test_down_and_up_again(database_url: str, billing: BillingUnderTest) -> None:
    await billing.database.close()
    config = alembic_config("billing_service", database_url, metadata)
    await downgrade(config, "base")
    async with billing.database.engine.connect() as connection:
        left = await connection.execute(
            text(
                "SELECT relname FROM pg_class"
                " WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p', 'S')"
            )
        )
        assert set(left.scalars()) == {"alembic_version"}
        functions = await connection.execute(
            text("SELECT count(*) FROM pg_proc WHERE pronamespace = 'public'::regnamespace")
        )
        assert functions.scalar_one() == 0
    await upgrade(config)
    await billing.request(new_charge(1))


@pytest.mark.parametrize(
    "change",
    [
        "amount = -1",
        "amount = NULL",
        "currency = 'eur'",
        "event_id = NULL",
        "state = 'paid'",
        "state = 'captured'",
        "state = 'cancelled'",
        "state = 'declined', provider_reference = 'p', settled_at = now()",
        "state = 'needs_review'",
        "next_attempt_at = NULL",
        "lease_owner = gen_random_uuid()",
        "request = 'x'",
        "attempt = -1",
    ],
)
async def test_the_database_refuses_a_charge_that_makes_no_sense(billing: BillingUnderTest, change: str) -> None:
    await billing.request(new_charge(1))
    with pytest.raises(DBAPIError, match=r"ck_charge_|violates"):
        await billing.execute(f"UPDATE charge SET {change}")  # noqa: S608


@pytest.mark.parametrize("change", ["request = 'other'", "event_id = gen_random_uuid()", "first_attempt_at = now()"])
async def test_request_and_key_stay_as_first_sent(billing: BillingUnderTest, change: str) -> None:
    await billing.request(new_charge(1))
    await billing.execute("UPDATE charge SET request = 'first', first_attempt_at = now() - interval '1 hour'")
    with pytest.raises(DBAPIError, match="stay as they were first sent"):
        await billing.execute(f"UPDATE charge SET {change}")  # noqa: S608
    await billing.execute("UPDATE charge SET request = request, event_id = event_id, attempt = 3")


async def test_due_charges_are_found_by_their_index(billing: BillingUnderTest) -> None:
    await billing.execute(
        "INSERT INTO charge (charge_id, order_id, event_id, customer_id, amount, currency, state, next_attempt_at,"
        "                    provider_reference, settled_at)"
        " SELECT gen_random_uuid(), n, gen_random_uuid(), 1, 1, 'EUR',"
        "        CASE WHEN n % 1000 = 0 THEN 'requested' ELSE 'captured' END, now(),"
        "        CASE WHEN n % 1000 = 0 THEN NULL ELSE 'p' END, CASE WHEN n % 1000 = 0 THEN NULL ELSE now() END"
        " FROM generate_series(1, 20000) AS n"
    )
    await billing.execute("ANALYZE charge")
    async with billing.database.engine.connect() as connection:
        plan = await connection.execute(
            text(
                "EXPLAIN SELECT charge_id FROM charge"
                " WHERE state = 'requested' AND next_attempt_at <= clock_timestamp()"
                " AND (lease_expires_at IS NULL OR lease_expires_at <= clock_timestamp())"
                " ORDER BY next_attempt_at LIMIT 16 FOR NO KEY UPDATE SKIP LOCKED"
            )
        )
        assert "ix_charge_due" in "\n".join(plan.scalars())
