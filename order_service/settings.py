"""The order service's settings: environment variables ORDER_SERVICE_…, each with its unit in its name."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from shared.database import DatabaseSettings
from shared.kafka.settings import KafkaSettings

Seconds = Annotated[float, Field(gt=0, le=3600)]


class OrderServiceSettings(BaseSettings):
    """Everything that can be set. The defaults suit development on one machine; docs/operations.md has production's."""

    model_config = SettingsConfigDict(env_prefix="ORDER_SERVICE_", extra="forbid")

    database_url: SecretStr = SecretStr("postgresql://order_service:order_service@127.0.0.1:5432/order_service")
    database_pool_size: int = Field(10, ge=1, le=200)
    listen_database_url: SecretStr | None = Field(
        None, description="for LISTEN when database_url leads through a transaction-pooling proxy"
    )

    kafka_bootstrap_servers: str = "127.0.0.1:9092"
    kafka_security_protocol: str = Field("PLAINTEXT", pattern="^(PLAINTEXT|SSL|SASL_PLAINTEXT|SASL_SSL)$")
    kafka_sasl_mechanism: str = Field("PLAIN", pattern="^(PLAIN|SCRAM-SHA-256|SCRAM-SHA-512)$")
    kafka_sasl_username: str | None = None
    kafka_sasl_password: SecretStr | None = None

    topic_partitions: int = Field(12, description="of order-service.order.confirmed; a divisor of 96")
    topic_replication_factor: int = Field(1, ge=1, le=15)
    topic_min_insync_replicas: int = Field(1, ge=1, le=15)
    topic_retention_days: int = Field(7, ge=1, le=365)

    consumer_group: str = Field("order-payment-result", min_length=1)
    consumer_instance_id: str | None = Field(None, description="unique for each process, or unset")
    consumer_session_timeout_seconds: Seconds = 10.0
    dedup_window_days: int = Field(30, ge=2, le=400)

    relay_lease_seconds: Seconds = 10.0
    relay_poll_seconds: Seconds = 0.5
    relay_delivery_deadline_seconds: Seconds = 45.0
    outbox_retention_hours: float = Field(72.0, gt=0)
    backlog_degraded_after_seconds: Seconds = 30.0

    host: str = "127.0.0.1"
    port: int = Field(8001, ge=1, le=65535)
    max_body_bytes: int = Field(262_144, ge=1024, le=10_000_000)
    log_level: str = Field("INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$")
    log_json: bool | None = Field(None, description="unset: JSON lines unless standard error is a terminal")

    def database(self, purpose: str, pool_size: int | None = None) -> DatabaseSettings:
        """Return how to reach the database for a purpose, which shows in pg_stat_activity."""
        return DatabaseSettings(
            url=self.database_url.get_secret_value(),
            application_name=f"order-service {purpose}",
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
            client_id=f"order-service-{purpose}",
            security_protocol=self.kafka_security_protocol,
            sasl_mechanism=self.kafka_sasl_mechanism,
            sasl_username=self.kafka_sasl_username,
            sasl_password=self.kafka_sasl_password.get_secret_value() if self.kafka_sasl_password else None,
        )
