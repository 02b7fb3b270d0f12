"""Who publishes which bucket: leases on the database's clock, with an epoch that rises at each change of owner.

A relay that was paused past its lease may still send what it holds; those are second copies of events that its
successor sends too, for it can record nothing: every progress write checks owner and epoch.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class BucketLeases:
    """The leases of one relay process: `held` is what it may publish now. Refresh three times a lease."""

    database: Database
    lease_seconds: float
    owner: UUID = field(default_factory=uuid4)
    held: dict[int, Lease] = field(default_factory=dict)
    fair_share: int = BUCKETS
    _valid_until: float = 0.0

    @property
    def valid(self) -> bool:
        """Whether the leases have not run out yet by this process's own monotonic clock."""
        return bool(self.held) and time.monotonic() < self._valid_until

    async def refresh(self) -> set[int]:
        """Renew what is held, take a fair share of what is free; return the buckets lost to others since the last time.

        One transaction: tell that this relay lives, renew, count the live relays, take up to
        ceil(buckets / relays), with the cursors of what was taken. Surplus buckets are not taken from anyone: their
        owner gives them back (`surplus`).
        """
        asked_at = time.monotonic()
        parameters = {"owner": self.owner, "seconds": self.lease_seconds}
        async with self.database.engine.begin() as connection:
            live = (await connection.execute(_ANNOUNCE, parameters)).scalar_one()
            renewed = {row.bucket: row.lease_epoch for row in await connection.execute(_RENEW, parameters)}
            kept = {b: lease for b, lease in self.held.items() if renewed.get(b) == lease.epoch}
            wanted = -(-BUCKETS // live) - len(renewed)
            taken = {}
            if wanted > 0:
                rows = await connection.execute(_TAKE, {**parameters, "wanted": wanted})
                taken = {row.bucket: Lease(row.bucket, row.lease_epoch, row.cursor) for row in rows}
            # Rows that name this owner although it does not know them: an answer was lost after its commit.
            forgotten = sorted(set(renewed) - set(kept))
            if forgotten:
                rows = await connection.execute(_READ_OWNED, {**parameters, "buckets": forgotten})
                taken.update({row.bucket: Lease(row.bucket, row.lease_epoch, row.cursor) for row in rows})
        lost = set(self.held) - set(kept)
        self.held = {**kept, **taken}
        self.fair_share = -(-BUCKETS // live)
        self._valid_until = asked_at + self.lease_seconds
        return lost

    async def reload(self) -> None:
        """Read the durable cursors of what is held again: a producer was abandoned and its batches are in doubt."""
        async with self.database.engine.begin() as connection:
            rows = await connection.execute(_READ_OWNED, {"owner": self.owner, "buckets": list(self.held)})
            durable = {row.bucket: Lease(row.bucket, row.lease_epoch, row.cursor) for row in rows}
        self.held = {
            b: durable[b] for b, lease in self.held.items() if b in durable and durable[b].epoch == lease.epoch
        }

    def surplus(self) -> list[int]:
        """Return the buckets beyond the fair share, to be given back once nothing of theirs is in flight."""
        return sorted(self.held)[self.fair_share :]

    async def release(self, buckets: Collection[int]) -> None:
        """Give buckets back at once instead of letting their leases run out."""
        if not buckets:
            return
        epochs = {bucket: self.held[bucket].epoch for bucket in buckets if bucket in self.held}
        for bucket in epochs:
            del self.held[bucket]
        async with self.database.engine.begin() as connection:
            await connection.execute(
                _RELEASE, {"owner": self.owner, "buckets": list(epochs), "epochs": list(epochs.values())}
            )

    async def leave(self) -> None:
        """Give everything back: this relay ends."""
        await self.release(list(self.held))
        async with self.database.engine.begin() as connection:
            await connection.execute(text("DELETE FROM outbox_relay WHERE owner = :owner"), {"owner": self.owner})

    def lose(self, buckets: Collection[int]) -> None:
        """Forget buckets that a fenced write found to be somebody else's."""
        for bucket in buckets:
            self.held.pop(bucket, None)


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
""")
