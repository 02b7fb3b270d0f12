"""The billing service's settings: environment variables BILLING_SERVICE_…, each with its unit in its name."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import AnyHttpUrl, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from billing_service.charge import RetryPolicy
from billing_service.executor import LEASE_MARGIN_SECONDS, ExecutorSettings
from shared.database import DatabaseSettings
from shared.kafka.settings import KafkaSettings

Seconds = Annotated[float, Field(gt=0, le=3600)]


class BillingServiceSettings(BaseSettings):
    """Everything that can be set. The defaults suit development on one machine; production's: docs/operations.md."""

    model_config = SettingsConfigDict(env_prefix="BILLING_SERVICE_", extra="forbid")

    database_url: SecretStr = SecretStr("postgresql://billing_service:billing_service@127.0.0.1:5432/billing_service")
    database_pool_size: int = Field(10, ge=1, le=200)
    listen_database_url: SecretStr | None = Field(
        None, description="for LISTEN when database_url leads through a transaction-pooling proxy"
    )

    kafka_bootstrap_servers: str = "127.0.0.1:9092"
    kafka_security_protocol: str = Field("PLAINTEXT", pattern="^(PLAINTEXT|SSL|SASL_PLAINTEXT|SASL_SSL)$")
    kafka_sasl_mechanism: str = Field("PLAIN", pattern="^(PLAIN|SCRAM-SHA-256|SCRAM-SHA-512)$")
    kafka_sasl_username: str | None = None
    kafka_sasl_password: SecretStr | None = None

    topic_partitions: int = Field(12, description="of billing-service.payment; a divisor of 96")
    topic_replication_factor: int = Field(1, ge=1, le=15)
    topic_min_insync_replicas: int = Field(1, ge=1, le=15)
    topic_retention_days: int = Field(7, ge=1, le=365)

    consumer_group: str = Field("billing-order-confirmed", min_length=1)
    consumer_instance_id: str | None = Field(None, description="unique for each process, or unset")
    consumer_session_timeout_seconds: Seconds = 10.0
    dedup_window_days: int = Field(30, ge=2, le=400)

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
    breaker_failures: int = Field(10, ge=1, le=1000, description="failed calls in a row that pause charging")
    breaker_most_pause_seconds: Seconds = 30.0

    relay_lease_seconds: Seconds = 10.0
    relay_poll_seconds: Seconds = 0.5
    relay_delivery_deadline_seconds: Seconds = 45.0
    outbox_retention_hours: float = Field(72.0, gt=0)
    backlog_degraded_after_seconds: Seconds = 30.0

    host: str = "127.0.0.1"
    port: int = Field(8002, ge=1, le=65535)
    max_body_bytes: int = Field(262_144, ge=1024, le=10_000_000)
    log_level: str = Field("INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$")
    log_json: bool | None = Field(None, description="unset: JSON lines unless standard error is a terminal")

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

    def database(self, purpose: str, pool_size: int | None = None) -> DatabaseSettings:
        """Return how to reach the database for a purpose, which shows in pg_stat_activity."""
        return DatabaseSettings(
            url=self.database_url.get_secret_value(),
            application_name=f"billing-service {purpose}",
            pool_size=pool_size or self.database_pool_size,
        )

    @property
    def listen_dsn(self) -> str:
        """Return the address for LISTEN and NOTIFY in libpq's form."""
        url = self.listen_database_url or self.database_url
        return url.get_secret_value().replace("postgresql+asyncpg://", "postgresql://", 1)

    def kafka(self, purpose: str) -> KafkaSettings:
        """Return how to reach Kafka; the purpose shows as client id in the broker's logs and quotas."""
        return KafkaSettings(
            bootstrap_servers=self.kafka_bootstrap_servers,
            client_id=f"billing-service-{purpose}",
            security_protocol=self.kafka_security_protocol,
            sasl_mechanism=self.kafka_sasl_mechanism,
            sasl_username=self.kafka_sasl_username,
            sasl_password=self.kafka_sasl_password.get_secret_value() if self.kafka_sasl_password else None,
        )

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
