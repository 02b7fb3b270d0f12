"""What waits in the outbox, and whether a relay may run on it at all: the questions that are asked now and then."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

COUNTED = 50_000
"""Unpublished events that are counted at most, unless a limit asks for more."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """What waits in the outbox. `events` is a lower bound when `at_least`.

    `parked` events wait beside it for a person: the `refused` ones, and those behind them.
    """

    events: int
    at_least: bool
    oldest_age_seconds: float
    parked: int = 0
    refused: int = 0


async def measure_backlog(connection: AsyncConnection, most: int = COUNTED) -> Backlog:
    """Count up to `most` unpublished events by index, and as many that are parked (field report F40).

    Use a connection of `relay_database`: a plan cached while the log was empty would read all of it (F8).
    """
    row = (await connection.execute(_BACKLOG, {"most": most})).one()
    age_seconds = max(0.0, float(row.oldest_age_seconds or 0.0))
    return Backlog(row.events, row.events >= most, age_seconds, row.parked, row.refused)


_BACKLOG = text("""
    WITH cursors AS (
        SELECT b.bucket,
               coalesce((SELECT max(p.position) FROM outbox_progress p WHERE p.bucket = b.bucket), 0) AS position
        FROM outbox_bucket b
    )
    SELECT (
        SELECT count(*) FROM (
            SELECT FROM cursors c
            CROSS JOIN LATERAL (
                SELECT FROM outbox_event e
                WHERE e.bucket = c.bucket AND e.position > c.position ORDER BY e.position LIMIT :most
            ) AS waiting
            LIMIT :most
        ) AS counted
    ) AS events, (
        SELECT extract(epoch FROM clock_timestamp() - min(first.created_at)) FROM cursors c
        CROSS JOIN LATERAL (
            SELECT e.created_at FROM outbox_event e
            WHERE e.bucket = c.bucket AND e.position > c.position ORDER BY e.position LIMIT 1
        ) AS first
    ) AS oldest_age_seconds, aside.parked, aside.refused
    FROM (
        SELECT count(*) AS parked, count(*) FILTER (WHERE waiting.refused) AS refused
        FROM (SELECT refused FROM outbox_parked WHERE settled_at IS NULL LIMIT :most) AS waiting
    ) AS aside
""")


async def refusal(connection: AsyncConnection) -> str | None:
    """Return why no relay may run on this database, with what to do about it; None when all is well.

    Field report F52: a restored or logically replicated database may have its sequence below positions that exist or
    were published. New events would then be drawn positions that relays have passed or will pass.
    """
    row = (await connection.execute(_CHECKS)).one()
    if row.next_position <= row.highest:
        return (
            f"the sequence outbox_event_position would draw {row.next_position} next, and positions up to "
            f"{row.highest} are taken: new events would never be sent. The database was restored or copied without "
            "its sequences. Stop the writers, run "
            f"SELECT setval('outbox_event_position', {row.highest}) and start again."
        )
    if row.cache_size != 1:
        return (
            f"the sequence outbox_event_position has CACHE {row.cache_size}: positions are then not in commit order "
            "and events get lost. Run ALTER SEQUENCE outbox_event_position CACHE 1."
        )
    if row.trigger_enabled not in ("O", "A"):
        return (
            "the trigger outbox_event_draw_position of outbox_event is missing or disabled: positions are then not "
            "drawn under the bucket's lock and events get lost. Stop the writers, run ALTER TABLE outbox_event ENABLE "
            "TRIGGER outbox_event_draw_position (when it is missing, make it as the migration does) and start again."
        )
    return None


_CHECKS = text("""
    SELECT CASE WHEN s.is_called THEN s.last_value + 1 ELSE s.last_value END AS next_position,
           q.seqcache AS cache_size, highest.position AS highest,
           (SELECT CAST(t.tgenabled AS text) FROM pg_trigger t
            WHERE t.tgrelid = 'outbox_event'::regclass AND t.tgname = 'outbox_event_draw_position') AS trigger_enabled
    FROM outbox_event_position s, pg_sequence q, (
        SELECT coalesce(greatest(max(published.position), max(stored.position)), 0) AS position
        FROM outbox_bucket b
        CROSS JOIN LATERAL (SELECT max(position) AS position FROM outbox_progress WHERE bucket = b.bucket) AS published
        CROSS JOIN LATERAL (SELECT max(position) AS position FROM outbox_event WHERE bucket = b.bucket) AS stored
    ) AS highest
    WHERE q.seqrelid = 'outbox_event_position'::regclass
""")
