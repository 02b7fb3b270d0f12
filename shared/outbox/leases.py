"""Who publishes which bucket: leases on the database's clock, with an epoch that rises at each change of owner.

A relay that was paused past its lease may still send what it holds; those are second copies of events that its
successor sends too, for it can record nothing: every progress write checks owner and epoch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from dataclasses import dataclass
from uuid import UUID, uuid4

from sqlalchemy import text

from shared.database import Database
from shared.outbox.tables import BUCKETS


@dataclass(frozen=True, slots=True)
class Lease:
    """One owned bucket: its fencing epoch, and the position up to which it was published when it was taken."""

    bucket: int
    epoch: int
    cursor: int


class BucketLeases:
    """The leases of one relay process: `held` is what it may publish now.

    A relay holds leases only while it has a producer that works: `join` when there is one, `leave` when it fails, so
    that a relay which is cut off from Kafka keeps no bucket from those that are not. Refresh three times a lease.
    """

    def __init__(self, database: Database, lease_seconds: float) -> None:
        self.lease_seconds = lease_seconds
        self.owner: UUID = uuid4()
        self.held: dict[int, Lease] = {}
        self.joined = False
        self._database = database
        self._fair_share = BUCKETS
        self._valid_until = 0.0
        # What is held changes in one transaction after the other: an answer never overwrites a later one's.
        self._turn = asyncio.Lock()

    @property
    def valid(self) -> bool:
        """Whether the leases have not run out yet by this process's own monotonic clock."""
        return bool(self.held) and time.monotonic() < self._valid_until

    async def join(self) -> None:
        """Begin to take part, with the durable cursors of what is taken."""
        async with self._turn:
            self.held = {}
            self.joined = True
        await self.refresh()

    async def refresh(self) -> set[int]:
        """Renew what is held, take a fair share of what is free; return the buckets lost to others since the last time.

        One transaction: tell that this relay lives, renew, count the live relays, take up to
        ceil(buckets / relays), with the cursors of what was taken. Surplus buckets are not taken from anyone: their
        owner gives them back (`surplus`). Does nothing unless joined.
        """
        async with self._turn:
            if not self.joined:
                return set()
            asked_at = time.monotonic()
            parameters = {"owner": self.owner, "seconds": self.lease_seconds}
            async with self._database.engine.begin() as connection:
                live = (await connection.execute(_ANNOUNCE, parameters)).scalar_one()
                renewed = {row.bucket: row.lease_epoch for row in await connection.execute(_RENEW, parameters)}
                kept = {b: lease for b, lease in self.held.items() if renewed.get(b) == lease.epoch}
                # Rows that name this owner although it does not hold them: it left, or an answer was lost.
                forgotten = sorted(set(renewed) - set(kept))
                rows = await connection.execute(_READ_OWNED, {**parameters, "buckets": forgotten})
                taken = [Lease(row.bucket, row.lease_epoch, row.cursor) for row in rows]
                wanted = -(-BUCKETS // live) - len(renewed)
                if wanted > 0:
                    rows = await connection.execute(_TAKE, {**parameters, "wanted": wanted})
                    taken += [Lease(row.bucket, row.lease_epoch, row.cursor) for row in rows]
            lost = set(self.held) - set(kept)
            self.held = {**kept, **{lease.bucket: lease for lease in taken}}
            self._fair_share = -(-BUCKETS // live)
            self._valid_until = asked_at + self.lease_seconds
            return lost

    def surplus(self) -> list[int]:
        """Return the buckets beyond the fair share, to be given back once nothing of theirs is in flight."""
        return sorted(self.held)[self._fair_share :]

    async def release(self, buckets: Collection[int]) -> set[int]:
        """Give buckets back at once instead of letting their leases run out; return those that were lost to others."""
        async with self._turn:
            return await self._release(buckets)

    async def leave(self) -> set[int]:
        """Give everything back and stop taking part, until the next `join`; return the buckets lost to others."""
        async with self._turn:
            self.joined = False
            lost = await self._release(list(self.held))
            async with self._database.engine.begin() as connection:
                await connection.execute(text("DELETE FROM outbox_relay WHERE owner = :owner"), {"owner": self.owner})
            return lost

    async def _release(self, buckets: Collection[int]) -> set[int]:
        epochs = {bucket: self.held.pop(bucket).epoch for bucket in buckets if bucket in self.held}
        if not epochs:
            return set()
        async with self._database.engine.begin() as connection:
            released = await connection.execute(
                _RELEASE, {"owner": self.owner, "buckets": list(epochs), "epochs": list(epochs.values())}
            )
            return set(epochs) - set(released.scalars())

    def lose(self, bucket: int, epoch: int) -> None:
        """Forget a bucket that a fenced write found to be somebody else's, unless it was taken again since."""
        lease = self.held.get(bucket)
        if lease is not None and lease.epoch == epoch:
            del self.held[bucket]


# clock_timestamp(), not now(): a statement that waited for a lock must not shorten or lengthen a lease.
_ANNOUNCE = text("""
    WITH announced AS (
        INSERT INTO outbox_relay (owner, expires_at)
        VALUES (:owner, clock_timestamp() + make_interval(secs => :seconds))
        ON CONFLICT (owner) DO UPDATE SET expires_at = excluded.expires_at
    ), buried AS (
        DELETE FROM outbox_relay
        WHERE owner <> :owner AND expires_at < clock_timestamp() - make_interval(secs => 10 * :seconds)
    )
    SELECT 1 + count(*) FROM outbox_relay WHERE owner <> :owner AND expires_at > clock_timestamp()
""")

_RENEW = text("""
    UPDATE outbox_bucket SET lease_expires_at = clock_timestamp() + make_interval(secs => :seconds)
    WHERE bucket IN (SELECT bucket FROM outbox_bucket WHERE lease_owner = :owner ORDER BY bucket FOR NO KEY UPDATE)
      AND lease_owner = :owner
    RETURNING bucket, lease_epoch
""")

_TAKE = text("""
    WITH free AS (
        SELECT bucket FROM outbox_bucket
        WHERE lease_owner IS NULL OR (lease_owner <> :owner AND lease_expires_at < clock_timestamp())
        ORDER BY bucket LIMIT :wanted
        FOR NO KEY UPDATE SKIP LOCKED
    ), taken AS (
        UPDATE outbox_bucket b
        SET lease_owner = :owner, lease_epoch = b.lease_epoch + 1,
            lease_expires_at = clock_timestamp() + make_interval(secs => :seconds)
        FROM free WHERE b.bucket = free.bucket
        RETURNING b.bucket, b.lease_epoch
    )
    SELECT t.bucket, t.lease_epoch,
           coalesce((SELECT max(position) FROM outbox_progress p WHERE p.bucket = t.bucket), 0) AS cursor
    FROM taken t
""")

_READ_OWNED = text("""
    SELECT b.bucket, b.lease_epoch,
           coalesce((SELECT max(position) FROM outbox_progress p WHERE p.bucket = b.bucket), 0) AS cursor
    FROM outbox_bucket b
    WHERE b.lease_owner = :owner AND b.bucket = ANY (CAST(:buckets AS smallint[]))
""")

_RELEASE = text("""
    UPDATE outbox_bucket b SET lease_owner = NULL, lease_expires_at = NULL
    FROM unnest(CAST(:buckets AS smallint[]), CAST(:epochs AS bigint[])) AS r (bucket, epoch)
    WHERE b.bucket = r.bucket AND b.lease_owner = :owner AND b.lease_epoch = r.epoch
    RETURNING b.bucket
""")
