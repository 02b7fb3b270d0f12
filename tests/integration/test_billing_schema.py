"""The migration: up, down, what the models say, and the rules that the database itself keeps."""

from collections.abc import AsyncIterator

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from pydantic import SecretStr
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from billing_service import repository
from billing_service.bootstrap import executor_database
from billing_service.charge import ChargeState
from billing_service.settings import BillingServiceSettings
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


async def fill(billing: BillingUnderTest, one_in: int = 1000) -> None:
    """20,000 charges, all captured but one in so many, which is requested."""
    await billing.execute(
        "INSERT INTO charge (charge_id, order_id, event_id, customer_id, amount, currency, state, next_attempt_at,"
        "                    provider_reference, settled_at)"
        " SELECT gen_random_uuid(), n, gen_random_uuid(), 1, 1, 'EUR',"
        "        CASE WHEN n % :one_in = 0 THEN 'requested' ELSE 'captured' END,"
        "        now() - make_interval(secs => (n * 7919) % 20011),"
        "        CASE WHEN n % :one_in = 0 THEN NULL ELSE 'p' END, CASE WHEN n % :one_in = 0 THEN NULL ELSE now() END"
        " FROM generate_series(1, 20000) AS n",
        one_in=one_in,
    )


@pytest.mark.parametrize("planned_on", ["a few charges", "twenty thousand charges"])
async def test_f8_a_claim_walks_its_index_whenever_it_was_planned(database_url: str, planned_on: str) -> None:
    async with billing_under_test(database_url) as billing:
        executor = executor_database(BillingServiceSettings(database_url=SecretStr(database_url)))
        claim = str(repository._LOCK_DUE).replace(":limit", "$1").replace(":window_seconds", "$2")
        try:
            async with executor.engine.connect() as connection:
                await connection.execute(text("SET plan_cache_mode = force_generic_plan"))
                await connection.exec_driver_sql(f"PREPARE claim (bigint, float8) AS {claim}")
                if planned_on == "a few charges":
                    await billing.request(*(new_charge(10**6 + number) for number in range(5)))
                    await billing.execute("ANALYZE charge")
                    await connection.exec_driver_sql("EXECUTE claim (16, 3600)")
                await fill(billing)
                if planned_on != "a few charges":
                    await billing.execute("ANALYZE charge")  # would have the plan made anew
                plan = "\n".join((await connection.exec_driver_sql("EXPLAIN EXECUTE claim (16, 3600)")).scalars())
        finally:
            await executor.close()
    assert "Index Scan using ix_charge_due" in plan
    assert "Sort" not in plan


@pytest.mark.parametrize("state", [state for state in ChargeState if state is not ChargeState.CAPTURED])
async def test_a_page_of_one_state_is_found_by_its_index(billing: BillingUnderTest, state: ChargeState) -> None:
    await fill(billing, one_in=100)
    await billing.execute("ANALYZE charge")
    query = repository.page_query(5000, 20, state).compile(
        billing.database.engine.sync_engine, compile_kwargs={"render_postcompile": True, "literal_binds": True}
    )
    async with billing.database.engine.connect() as connection:
        plan = "\n".join((await connection.exec_driver_sql(f"EXPLAIN {query}")).scalars())
    assert "Index Scan using ix_charge_state_order_id" in plan
    assert "Sort" not in plan


async def test_a_page_of_one_state_has_that_state_only(billing: BillingUnderTest) -> None:
    await fill(billing)
    async with billing.database.session() as session:
        page = await repository.page_of_charges(session, 5000, 10, ChargeState.REQUESTED)
        captured = await repository.page_of_charges(session, 5000, 2, ChargeState.CAPTURED)
    assert [charge.order_id for charge in page] == [6000 + 1000 * number for number in range(10)]
    assert [charge.order_id for charge in captured] == [5001, 5002]
