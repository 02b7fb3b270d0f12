"""The billing service's settings: environment variables BILLING_SERVICE_…, each with its unit in its name."""

from __future__ import annotations

from typing import Self

from pydantic import AnyHttpUrl, Field, SecretStr, model_validator
from pydantic_settings import SettingsConfigDict

from billing_service.charge import RetryPolicy
from billing_service.events import PAYMENT_TOPIC
from billing_service.executor import LEASE_MARGIN_SECONDS, ExecutorSettings
from shared.kafka.topics import TopicSpec
from shared.settings import Seconds, ServiceSettings

ROLES = ("api", "consumer", "executor", "relay")


class BillingServiceSettings(ServiceSettings):
    """Everything that can be set; shared.settings has what both services share."""

    model_config = SettingsConfigDict(env_prefix="BILLING_SERVICE_")
    service = "billing-service"

    database_url: SecretStr = SecretStr("postgresql://billing_service:billing_service@127.0.0.1:5432/billing_service")
    consumer_group: str = Field("billing-order-confirmed", min_length=1)
    port: int = Field(8002, ge=1, le=65535)

    payment_provider_url: AnyHttpUrl = AnyHttpUrl("http://127.0.0.1:8003")
    payment_provider_api_key: SecretStr | None = None
    executor_calls_at_once: int = Field(16, ge=1, le=1000)
    executor_call_deadline_seconds: Seconds = 10.0
    executor_lease_seconds: Seconds = 30.0
    executor_poll_seconds: Seconds = 0.5
    executor_drain_seconds: Seconds = 5.0
    executor_retry_first_seconds: Seconds = 0.5
    executor_retry_most_seconds: Seconds = 60.0
    idempotency_window_hours: float = Field(24.0, gt=0, description="how long the provider remembers a key")
    idempotency_margin_hours: float = Field(
        1.0, gt=0, description="a charge that old goes to a person this much earlier"
    )
    reconcile_interval_minutes: float = Field(60.0, ge=0, description="0: never by itself")
    reconcile_hours: float = Field(48.0, gt=0, description="how far a reconciliation by itself looks back")
    breaker_failures: int = Field(10, ge=1, le=1000, description="failed calls in a row that pause charging")
    breaker_most_pause_seconds: Seconds = 30.0

    @model_validator(mode="after")
    def _lease_outlives_call(self) -> Self:
        if self.executor_lease_seconds < self.executor_call_deadline_seconds + LEASE_MARGIN_SECONDS:
            raise ValueError(
                f"executor_lease_seconds must be at least {LEASE_MARGIN_SECONDS:g} more than "
                "executor_call_deadline_seconds: a lease must not end during a call"
            )
        return self

    @model_validator(mode="after")
    def _margin_covers_an_attempt(self) -> Self:
        margin_seconds = self.idempotency_margin_hours * 3600
        if not self.executor_lease_seconds <= margin_seconds < self.idempotency_window_hours * 3600:
            raise ValueError(
                "idempotency_margin_hours must be longer than executor_lease_seconds and shorter than "
                "idempotency_window_hours: no call may reach a provider that has forgotten its key"
            )
        return self

    def executor(self) -> ExecutorSettings:
        """Return the executor's limits."""
        return ExecutorSettings(
            calls_at_once=self.executor_calls_at_once,
            call_deadline_seconds=self.executor_call_deadline_seconds,
            lease_seconds=self.executor_lease_seconds,
            idempotency_window_seconds=(self.idempotency_window_hours - self.idempotency_margin_hours) * 3600,
            poll_seconds=self.executor_poll_seconds,
            drain_seconds=self.executor_drain_seconds,
            retry=RetryPolicy(self.executor_retry_first_seconds, self.executor_retry_most_seconds),
        )


def owned_topics(settings: BillingServiceSettings) -> list[TopicSpec]:
    """Return the topics that this service writes."""
    return [settings.topic(PAYMENT_TOPIC)]
