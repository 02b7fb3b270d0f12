"""Settings that would let a key be used after the provider has forgotten it are refused."""

from typing import Any

import pytest
from pydantic import ValidationError

from billing_service.executor import ExecutorSettings
from billing_service.settings import BillingServiceSettings
from shared.errors import Refused


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"executor_lease_seconds": 14.0, "executor_call_deadline_seconds": 10.0}, "executor_lease_seconds"),
        ({"idempotency_window_hours": 1.0, "idempotency_margin_hours": 1.0}, "idempotency_margin_hours"),
        ({"idempotency_margin_hours": 0.001}, "idempotency_margin_hours"),
        ({"executor_calls_at_once": 0}, "executor_calls_at_once"),
        ({"payment_provider_url": "not an address"}, "payment_provider_url"),
        ({"no_such_setting": 1}, "no_such_setting"),
    ],
)
def test_a_setting_that_breaks_the_guarantee_is_named(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(ValidationError, match=name):
        BillingServiceSettings(**changes)


def test_the_window_that_the_executor_keeps_is_shorter_than_the_providers() -> None:
    settings = BillingServiceSettings(idempotency_window_hours=24.0, idempotency_margin_hours=1.0)
    assert settings.executor().idempotency_window_seconds == 23 * 3600


def test_a_lease_that_may_end_during_a_call_is_refused() -> None:
    with pytest.raises(Refused, match="lease"):
        ExecutorSettings(call_deadline_seconds=10.0, lease_seconds=12.0)


def test_secrets_are_not_shown() -> None:
    settings = BillingServiceSettings(
        database_url="postgresql://u:hidden-1@h/d",
        payment_provider_api_key="hidden-2",
    )
    assert "hidden" not in repr(settings)
    assert "hidden" not in repr(settings.database("test"))
