"""Topics as code: what a service writes, made with the partition count and settings that the guarantees need."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import structlog
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError, TopicAlreadyExistsError, for_code

from shared.errors import KafkaFailure, Refused
from shared.kafka.settings import KafkaSettings

log = structlog.get_logger(__name__)

DAY_MILLISECONDS = 86_400_000
_CLOSE_DEADLINE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """A topic a service owns. Retention must stay below the inbox's dedup window (docs/guarantees.md)."""

    name: str
    partitions: int
    replication_factor: int
    min_insync_replicas: int
    retention_days: int = 7

    def config(self) -> dict[str, str]:
        """Return the topic's settings in Kafka's names."""
        return {
            "min.insync.replicas": str(self.min_insync_replicas),
            "unclean.leader.election.enable": "false",
            "retention.ms": str(self.retention_days * DAY_MILLISECONDS),
            "segment.ms": str(DAY_MILLISECONDS),
            "cleanup.policy": "delete",
            "max.message.bytes": str(1_048_588),
        }


@dataclass(frozen=True, slots=True)
class TopicRetention:
    """How long a topic keeps what is written to it: None for ever."""

    name: str
    redelivery_seconds: float | None

    @classmethod
    def of(cls, name: str, config: Mapping[str, str]) -> TopicRetention:
        """Read it from the topic's settings in Kafka's names.

        A record goes with its segment, which is closed `segment.ms` after its first record at the latest. What is only
        compacted keeps the last record of each key for ever.
        """
        retention, segment = int(config["retention.ms"]), int(config["segment.ms"])
        if retention < 0 or "delete" not in config["cleanup.policy"]:
            return cls(name, None)
        return cls(name, (retention + segment) / 1000)


async def topic_retention(
    settings: KafkaSettings, topics: Sequence[str], deadline_seconds: float = 15.0
) -> list[TopicRetention]:
    """Return how long the broker keeps these topics. Raises KafkaFailure when it does not tell, or has no such one."""
    async with _admin(settings, deadline_seconds) as admin:
        answers = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, name) for name in topics])
    found = []
    for code, message, _, name, entries in (resource for answer in answers for resource in answer.resources):
        if code:
            raise KafkaFailure(f"topic {name}: {for_code(code).__name__} {message or ''}".rstrip())
        found.append(TopicRetention.of(name, {entry[0]: entry[1] for entry in entries}))
    return found


async def ensure_topics(settings: KafkaSettings, specs: Sequence[TopicSpec], deadline_seconds: float = 30.0) -> None:
    """Make the topics that do not exist yet.

    Raises Refused when one exists with another partition count (changing it moves keys), KafkaFailure when no broker
    answers in time.
    """
    async with _admin(settings, deadline_seconds) as admin:
        await _create_missing(admin, specs)
        await _check_partitions(admin, specs)


@asynccontextmanager
async def _admin(settings: KafkaSettings, deadline_seconds: float) -> AsyncIterator[AIOKafkaAdminClient]:
    """Yield a client that is connected; what it does within must end in time. Raises KafkaFailure."""
    admin = AIOKafkaAdminClient(**settings.connection_options())
    try:
        async with asyncio.timeout(deadline_seconds):
            await admin.start()
            yield admin
    except TimeoutError:
        raise KafkaFailure(
            f"Kafka at {settings.bootstrap_servers} did not answer within {deadline_seconds:g} s"
        ) from None
    except KafkaError as error:
        raise KafkaFailure(f"{type(error).__name__}: {error}"[:300]) from error
    finally:
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_DEADLINE_SECONDS):
                await admin.close()


async def _create_missing(admin: AIOKafkaAdminClient, specs: Sequence[TopicSpec]) -> None:
    existing = set(await admin.list_topics())
    new = [
        NewTopic(spec.name, spec.partitions, spec.replication_factor, topic_configs=spec.config())
        for spec in specs
        if spec.name not in existing
    ]
    if not new:
        return
    response = await admin.create_topics(new)
    for topic, code, *rest in response.topic_errors:
        if code not in (0, TopicAlreadyExistsError.errno):
            detail = rest[0] if rest else for_code(code).__name__
            raise KafkaFailure(f"Kafka refused to make topic {topic}: {detail}")
        log.info("kafka.topic_ready", topic=topic, created=code == 0)


async def _check_partitions(admin: AIOKafkaAdminClient, specs: Sequence[TopicSpec]) -> None:
    wanted = {spec.name: spec.partitions for spec in specs}
    while True:  # a new topic's metadata takes a moment to reach the broker that is asked
        described = await admin.describe_topics(list(wanted))
        found = {topic["topic"]: len(topic["partitions"]) for topic in described if topic["error_code"] == 0}
        for name, partitions in found.items():
            if partitions and partitions != wanted[name]:
                raise Refused(
                    f"topic {name} has {partitions} partitions and {wanted[name]} are configured: a change moves keys "
                    f"between partitions and breaks their order. Configure {partitions}, or drain and make a new topic."
                )
        if all(found.get(name) for name in wanted):
            return
        await asyncio.sleep(0.1)
