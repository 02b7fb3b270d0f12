"""The order service's settings: environment variables ORDER_SERVICE_…, each with its unit in its name."""

from __future__ import annotations

from pydantic import Field, SecretStr
from pydantic_settings import SettingsConfigDict

from order_service.events import ORDER_CONFIRMED_TOPIC
from shared.kafka.topics import TopicSpec
from shared.settings import ServiceSettings

ROLES = ("api", "relay", "consumer")


class OrderServiceSettings(ServiceSettings):
    """Everything that can be set; shared.settings has what both services share."""

    model_config = SettingsConfigDict(env_prefix="ORDER_SERVICE_")
    service = "order-service"

    database_url: SecretStr = SecretStr("postgresql://order_service:order_service@127.0.0.1:5432/order_service")
    consumer_group: str = Field("order-payment-result", min_length=1)
    max_unpublished_events: int | None = Field(
        None, ge=1, le=1_000_000, description="past it POST /orders answers 503; unset: no limit"
    )
    max_unpublished_age_seconds: float | None = Field(None, gt=0, description="likewise, of the oldest event")
    require_idempotency_key: bool = Field(False, description="POST /orders without an Idempotency-Key answers 400")
    idempotency_key_retention_hours: float = Field(168.0, gt=0, le=17_520, description="a repetition is known so long")
    port: int = Field(8001, ge=1, le=65535)


def owned_topics(settings: OrderServiceSettings) -> list[TopicSpec]:
    """Return the topics that this service writes."""
    return [settings.topic(ORDER_CONFIRMED_TOPIC)]
