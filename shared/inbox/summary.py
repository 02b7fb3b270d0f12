"""What an inbox has done so far, for people and for the audit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession


@dataclass(frozen=True, slots=True)
class InboxSummary:
    """Counts of one consumer group since its beginning. Each settled record is in exactly one of the first four.

    `dead` counts letters written, `dead_letters_open` those that still wait for a person, by reason.
    """

    group: str
    handled: int
    duplicates_absorbed: int
    dead: int
    outside_window: int
    dead_letters_open: Mapping[str, int]


async def inbox_summary(session: AsyncSession, group: str) -> InboxSummary:
    """Read the summary of a group: exact across kills, for a batch counts in its own transaction."""
    tally = (
        await session.execute(
            text("""
                SELECT coalesce(sum(handled), 0), coalesce(sum(duplicates), 0),
                       coalesce(sum(dead), 0), coalesce(sum(outside_window), 0)
                FROM inbox_tally WHERE consumer_group = :group
            """),
            {"group": group},
        )
    ).one()
    letters = await session.execute(
        text("""
            SELECT reason, count(*) FROM dead_letter
            WHERE consumer_group = :group AND status = 'open' GROUP BY reason ORDER BY reason
        """),
        {"group": group},
    )
    handled, duplicates, dead, outside_window = (int(count) for count in tally)
    return InboxSummary(
        group=group,
        handled=handled,
        duplicates_absorbed=duplicates,
        dead=dead,
        outside_window=outside_window,
        dead_letters_open={str(reason): int(count) for reason, count in letters},
    )
