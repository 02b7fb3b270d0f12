"""What every service that stands on the kit can set; a service adds its own settings in one class of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from shared.database import DatabaseSettings, libpq_dsn
from shared.inbox.consumer import InboxSettings
from shared.kafka.settings import KafkaSettings
from shared.kafka.topics import TopicSpec
from shared.outbox.bootstrap import OutboxSettings
from shared.outbox.tables import PARTITION_COUNTS

Seconds = Annotated[float, Field(gt=0, le=3600)]

OUTBOX_CHANNEL = "outbox_event"
"""The NOTIFY channel that wakes the relay."""


class ServiceSettings(BaseSettings):
    """Settings of a service, from environment variables with its prefix.

    The defaults suit development on one machine; docs/operations.md has production's.
    """

    model_config = SettingsConfigDict(extra="forbid")
    service: ClassVar[str]

    database_url: SecretStr
    database_pool_size: int = Field(10, ge=1, le=200)
    listen_database_url: SecretStr | None = Field(
        None,
        description="the direct address, for LISTEN, NOTIFY, inbox upkeep and migrations, when database_url leads "
        "through a transaction-pooling proxy",
    )

    kafka_bootstrap_servers: str = "127.0.0.1:9092"
    kafka_security_protocol: str = Field("PLAINTEXT", pattern="^(PLAINTEXT|SSL|SASL_PLAINTEXT|SASL_SSL)$")
    kafka_sasl_mechanism: str = Field("PLAIN", pattern="^(PLAIN|SCRAM-SHA-256|SCRAM-SHA-512)$")
    kafka_sasl_username: str | None = None
    kafka_sasl_password: SecretStr | None = None

    topic_partitions: int = Field(12, description="of the topic that the service writes; a divisor of 96")
    topic_replication_factor: int = Field(1, ge=1, le=15)
    topic_min_insync_replicas: int = Field(1, ge=1, le=15)
    topic_retention_days: int = Field(7, ge=1, le=365)

    consumer_group: str = Field(min_length=1)
    consumer_instance_id: str | None = Field(None, description="unique for each process, or unset")
    consumer_session_timeout_seconds: Seconds = 10.0
    dedup_window_days: int = Field(30, ge=2, le=400)
    dead_letter_retention_days: int = Field(90, ge=1, le=3650, description="settled dead letters are kept so long")

    relay_lease_seconds: Seconds = 10.0
    relay_poll_seconds: Seconds = 0.5
    relay_delivery_deadline_seconds: Seconds = 45.0
    relay_compression: str = Field("none", pattern="^(none|gzip|snappy|lz4|zstd)$")
    relay_park_limit: int = Field(
        1000,
        ge=0,
        description="refused events that are parked before the relay takes the topic to be at fault",
    )
    outbox_retention_hours: float = Field(72.0, gt=0, le=17_520, description="published events are kept so long")
    backlog_degraded_after_seconds: Seconds = 30.0

    consumers_dedup_window_days: int = Field(
        30, ge=2, le=400, description="the least dedup window of the groups that read this service's topics"
    )

    host: str = "127.0.0.1"
    port: int = Field(ge=1, le=65535)
    max_body_bytes: int = Field(262_144, ge=1024, le=10_000_000)
    log_level: str = Field("INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$")
    log_json: bool | None = Field(None, description="unset: JSON lines unless standard error is a terminal")

    @field_validator("topic_partitions")
    @classmethod
    def _divides_the_buckets(cls, value: int) -> int:
        if value not in PARTITION_COUNTS:
            raise ValueError(f"a topic may have one of {', '.join(map(str, PARTITION_COUNTS))} partitions")
        return value

    def database(self, purpose: str, pool_size: int | None = None) -> DatabaseSettings:
        """Return how to reach the database for a purpose, which shows in pg_stat_activity."""
        return DatabaseSettings(
            url=self.database_url.get_secret_value(),
            application_name=f"{self.service} {purpose}",
            pool_size=pool_size or self.database_pool_size,
        )

    def direct_database(self, purpose: str, pool_size: int | None = None) -> DatabaseSettings:
        """Return likewise for work that needs a session of its own, with locks that outlast a transaction."""
        through = self.listen_database_url or self.database_url
        return replace(self.database(purpose, pool_size), url=through.get_secret_value())

    @property
    def listen_dsn(self) -> str:
        """Return the address for LISTEN and NOTIFY in libpq's form."""
        return libpq_dsn((self.listen_database_url or self.database_url).get_secret_value())

    def kafka(self, purpose: str) -> KafkaSettings:
        """Return how to reach Kafka; the purpose shows as client id in the broker's logs and quotas."""
        return KafkaSettings(
            bootstrap_servers=self.kafka_bootstrap_servers,
            client_id=f"{self.service}-{purpose}",
            security_protocol=self.kafka_security_protocol,
            sasl_mechanism=self.kafka_sasl_mechanism,
            sasl_username=self.kafka_sasl_username,
            sasl_password=self.kafka_sasl_password.get_secret_value() if self.kafka_sasl_password else None,
        )

    def topic(self, name: str) -> TopicSpec:
        """Return a topic that the service writes."""
        return TopicSpec(
            name,
            self.topic_partitions,
            self.topic_replication_factor,
            self.topic_min_insync_replicas,
            self.topic_retention_days,
        )

    def outbox(self) -> OutboxSettings:
        """Return what a relay process needs."""
        return OutboxSettings(
            listen_dsn=self.listen_dsn,
            channel=OUTBOX_CHANNEL,
            kafka=self.kafka("relay"),
            lease_seconds=self.relay_lease_seconds,
            poll_seconds=self.relay_poll_seconds,
            delivery_deadline_seconds=self.relay_delivery_deadline_seconds,
            retention_hours=self.outbox_retention_hours,
            compression=self.relay_compression,
            park_limit=self.relay_park_limit,
        )

    def inbox(self) -> InboxSettings:
        """Return how the service's consumer group works."""
        return InboxSettings(
            group=self.consumer_group,
            instance_id=self.consumer_instance_id,
            session_timeout_seconds=self.consumer_session_timeout_seconds,
            dedup_window_days=self.dedup_window_days,
        )
