"""Which topics may be written, and with how many partitions: what `append` and the relay check against."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import text

from shared.database import Database
from shared.errors import Refused
from shared.kafka.topics import TopicSpec
from shared.outbox.tables import PARTITION_COUNTS


async def register_topics(database: Database, topics: Sequence[TopicSpec]) -> None:
    """Register the topics that a service writes.

    Raises Refused when a partition count does not divide the buckets, or differs from the registered one: changing it
    moves keys to other partitions, so events of one key would overtake each other.
    """
    for topic in topics:
        if topic.partitions not in PARTITION_COUNTS:
            allowed = ", ".join(map(str, PARTITION_COUNTS))
            raise Refused(f"topic {topic.name} cannot have {topic.partitions} partitions; configure one of {allowed}")
    async with database.engine.begin() as connection:
        for topic in sorted(topics, key=lambda spec: spec.name):
            row = await connection.execute(_REGISTER, {"topic": topic.name, "partitions": topic.partitions})
            registered = row.scalar_one()
            if registered != topic.partitions:
                raise Refused(
                    f"topic {topic.name} is registered with {registered} partitions and {topic.partitions} are "
                    f"configured: a change moves keys between partitions. Configure {registered}."
                )


_REGISTER = text("""
    INSERT INTO outbox_topic (topic, partitions) VALUES (:topic, :partitions)
    ON CONFLICT (topic) DO UPDATE SET topic = excluded.topic
    RETURNING partitions
""")


async def registered_topics(database: Database) -> dict[str, int]:
    """Return the registered topics and their partition counts."""
    async with database.engine.connect() as connection:
        rows = await connection.execute(text("SELECT topic, partitions FROM outbox_topic"))
        return {row.topic: row.partitions for row in rows}
