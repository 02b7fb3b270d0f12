"""A member of a consumer group that never waits without a deadline and never moves past what was not settled.

Written against aiokafka 0.14; what it does that matters here:
- `getmany` waits without limit while the group rebalances, and cancelling it corrupts its idle clock, so a poll is a
  task that may outlive the wait for it. An error out of it may have moved positions past records that it did not
  return: after any error this client is closed and a new one begins at the committed offsets.
- One record with a header name that is not UTF-8 breaks every poll that reaches it, so the next client goes over it
  `one_by_one`: it and what follows in its producer's batch, which is decoded from its start only, become damaged
  records with nothing but a place. Kafka's own clients write no such header.
- A rebalance is eager: every partition is revoked, pauses are forgotten, positions go back to the committed offsets.
  So the assignments are numbered (`epoch`, raised by each revoke), and what belongs to an older one is void.
- `commit` tries again for ever, JoinGroup waits for the slowest member, and `stop` waits for both (F20, F22).

Committing an offset below which all is settled is always safe: late or repeated, it costs repetitions at most.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.abc import ConsumerRebalanceListener
from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from aiokafka.errors import CommitFailedError, IllegalStateError, KafkaError
from aiokafka.structs import ConsumerRecord

from shared.errors import KafkaFailure
from shared.kafka.connections import Connections
from shared.kafka.records import ConsumedRecord, Fetched, Partition
from shared.kafka.settings import KafkaSettings

log = structlog.get_logger(__name__)

_SILENT_SECONDS = 10.0  # a fetch is answered within half a second, records or not
_MEMBERSHIP_LOSSES = 3  # within a minute: more than a broker restart causes
_JOIN_MARGIN_SECONDS = 5.0
_ONE_BY_ONE_SECONDS = 60.0  # after the last damaged record: they seldom come alone


@dataclass(frozen=True, slots=True)
class ConsumerSettings:
    """Membership of a consumer group. `instance_id` must be unique in the group (static membership)."""

    group: str
    topics: tuple[str, ...]
    instance_id: str | None
    session_timeout_seconds: float
    rebalance_timeout_seconds: float
    max_poll_interval_seconds: float
    commit_deadline_seconds: float
    leave_deadline_seconds: float

    @property
    def join_deadline_seconds(self) -> float:
        """How long joining may take: the other members have the rebalance timeout to finish their batches."""
        return self.rebalance_timeout_seconds + 2 * _JOIN_MARGIN_SECONDS


class UndecodableRecord(KafkaFailure):
    """A poll met a record that the client cannot decode. Begin anew with `one_by_one`."""


class GroupConsumer:
    """One membership: start, poll and commit, close. Not reusable after an error or `close`."""

    def __init__(
        self,
        kafka: KafkaSettings,
        settings: ConsumerSettings,
        *,
        before_rebalance: Callable[[], Awaitable[None]],
        after_rebalance: Callable[[], None],
        one_by_one: bool = False,
    ) -> None:
        self._settings = settings
        self._before_rebalance = before_rebalance
        self._after_rebalance = after_rebalance
        self._connections = Connections()
        self._consumer = _new_client(kafka, settings)
        self._consumer.subscribe(topics=list(settings.topics), listener=_Listener(self))
        self._poll_task: asyncio.Task[Fetched] | None = None
        self._paused = False
        self._settled: dict[Partition, int] = {}
        self._expected: dict[Partition, int] = {}
        self._active_at = time.monotonic()
        self._membership_losses: list[float] = []
        self._one_by_one_until = time.monotonic() + _ONE_BY_ONE_SECONDS if one_by_one else 0.0
        self.epoch = 0
        self.skipped_offsets = 0

    async def start(self) -> None:
        """Join the group and return with the first assignment. Raises KafkaFailure; close this client then."""
        deadline = self._settings.join_deadline_seconds
        try:
            with self._connections.noted():
                async with asyncio.timeout(deadline):
                    await self._consumer.start()
        except TimeoutError:
            raise KafkaFailure(f"no assignment from group {self._settings.group} within {deadline:g} s") from None
        except KafkaError as error:
            raise _failure(error) from error

    async def poll(self, *, max_records: int, wait_seconds: float) -> Fetched:
        """Return the next records of all partitions, or none after about `wait_seconds` or during a rebalance.

        Raises KafkaFailure; close this client then, for records may have been passed over.
        """
        if self._poll_task is None:
            self._poll_task = asyncio.create_task(self._fetch(max_records, wait_seconds))
        done, _ = await asyncio.wait({self._poll_task}, timeout=wait_seconds + 0.5)
        if not done:
            return Fetched((), self.epoch)
        task, self._poll_task = self._poll_task, None
        fetched = task.result()
        if fetched.epoch != self.epoch:  # revoked between the poll and now; the new owner reads them again
            return Fetched((), self.epoch)
        self._note_skipped(fetched)
        return fetched

    async def poll_paused(self, wait_seconds: float) -> None:
        """Keep the membership alive while no records are wanted. What a poll returns nevertheless is sought back."""
        fetched = await self.poll(max_records=1, wait_seconds=wait_seconds)
        self.seek_back(fetched.first_offsets(), fetched.epoch)
        if not fetched.records:
            self._active_at = time.monotonic()

    def pause(self) -> None:
        """Stop fetching from every partition, also from those assigned later, until `resume`."""
        self._paused = True
        self._consumer.pause(*self._consumer.assignment())

    def resume(self) -> None:
        """Fetch again from every assigned partition."""
        if not self._paused:
            return
        self._paused = False
        self._active_at = time.monotonic()
        self._consumer.resume(*self._consumer.assignment())

    def seek_back(self, offsets: Mapping[Partition, int], epoch: int) -> None:
        """Read on from these offsets. Void when the assignment is not that of `epoch` any more."""
        if epoch != self.epoch:
            return
        for partition, offset in offsets.items():
            with suppress(IllegalStateError):
                self._consumer.seek(TopicPartition(*partition), offset)
                self._expected[partition] = offset

    def settled(self, offsets: Mapping[Partition, int], epoch: int) -> None:
        """Note the next offset of each partition after what was settled. Void for an older assignment."""
        if epoch == self.epoch:
            self._settled.update(offsets)

    @property
    def has_uncommitted(self) -> bool:
        """Whether settled offsets wait for a commit."""
        return bool(self._settled)

    async def commit(self) -> bool:
        """Commit what is settled and not committed yet, and nothing else (field report F21).

        Returns False when that failed: after a rebalance the progress is dropped and the inbox absorbs the repetition;
        otherwise it is kept for the next commit.
        """
        epoch, offsets = self.epoch, dict(self._settled)
        if not offsets:
            return True
        try:
            async with asyncio.timeout(self._settings.commit_deadline_seconds):
                await self._consumer.commit({TopicPartition(*partition): o for partition, o in offsets.items()})
        except (CommitFailedError, IllegalStateError) as error:
            self._settled.clear()
            log.info("kafka.commit_dropped", group=self._settings.group, error=type(error).__name__)
            return False
        except (TimeoutError, KafkaError) as error:
            log.warning("kafka.commit_failed", group=self._settings.group, error=type(error).__name__)
            return False
        if epoch == self.epoch:
            self._settled = {p: o for p, o in self._settled.items() if offsets.get(p) != o}
        return True

    def lag(self) -> int:
        """Return how many records of the assigned partitions were not read yet, as far as the broker told."""
        subscription = self._consumer._subscription.subscription
        assignment = subscription.assignment if subscription is not None else None
        states = [assignment.state_value(tp) for tp in assignment.tps] if assignment is not None else []
        return sum(
            max(0, state.highwater - state.position)
            for state in states
            if state.highwater is not None and state.has_valid_position
        )

    def trouble(self) -> str:
        """Return why Kafka seems to be away or the membership disturbed, or an empty string."""
        if self._stolen():
            return (
                f"group membership was lost {_MEMBERSHIP_LOSSES} times in a minute: another process probably uses "
                f"instance id {self._settings.instance_id}; give each its own"
            )
        if self._consumer._coordinator.coordinator_id is None:
            return "Kafka's group coordinator does not answer; records wait"
        if self.silent_seconds() > _SILENT_SECONDS:
            return "Kafka does not answer fetches; records wait"
        return ""

    def silent_seconds(self) -> float:
        """Return for how long Kafka has answered no fetch, although one was due."""
        now = time.monotonic()
        assigned = self._consumer.assignment()
        coordinator_known = self._consumer._coordinator.coordinator_id is not None
        if self._paused or (not assigned and coordinator_known):
            self._active_at = now
        answered = [self._consumer.last_poll_timestamp(partition) or 0 for partition in assigned]
        return max(0.0, min(now - self._active_at, time.time() - max(answered, default=0) / 1000))

    async def close(self) -> None:
        """Leave the group within the deadline; after it, drop the connections: the session timeout does the rest.

        Calls no `before_rebalance`: settle and commit first.
        """
        if self._poll_task is not None:
            self._poll_task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await self._poll_task
            self._poll_task = None
        # A task of its own: aiokafka lets the cancellation of its waiting fetches out of `stop`, and that is not ours.
        leaving = asyncio.create_task(self._consumer.stop())
        try:
            await asyncio.wait({leaving}, timeout=self._settings.leave_deadline_seconds)
            problem = _why_unfinished(leaving)
            if problem:
                log.warning("kafka.leave_failed", group=self._settings.group, error=problem)
                await self._abandon()
        finally:
            leaving.cancel()
            self._connections.close()

    async def _abandon(self) -> None:
        """End the client's tasks and connections without the broker, leaving nothing behind (field report F53)."""
        coordinator, fetcher = self._consumer._coordinator, self._consumer._fetcher
        owned: list[asyncio.Task[object] | None] = []
        if coordinator is not None:
            owned += [coordinator._heartbeat_task, coordinator._commit_refresh_task, coordinator._coordination_task]
        if fetcher is not None:
            owned += [fetcher._fetch_task, *fetcher._pending_tasks]
        tasks = [task for task in owned if task is not None]
        for task in tasks:
            task.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.leave_deadline_seconds):
                await asyncio.gather(*tasks, return_exceptions=True)
                await self._consumer._client.close()

    async def _fetch(self, max_records: int, wait_seconds: float) -> Fetched:
        try:
            if time.monotonic() < self._one_by_one_until:
                records = await self._one_by_one(max_records, wait_seconds)
            else:
                fetched = await self._consumer.getmany(timeout_ms=int(wait_seconds * 1000), max_records=max_records)
                records = [_record(record) for records in fetched.values() for record in records]
        except KafkaError as error:
            raise _failure(error) from error
        except UnicodeDecodeError as error:
            raise UndecodableRecord("a record cannot be decoded; looking for it one by one") from error
        if records:
            self._active_at = time.monotonic()
        return Fetched(records, self.epoch)

    async def _one_by_one(self, max_records: int, wait_seconds: float) -> list[ConsumedRecord]:
        """Poll as `getmany` does, but so that an undecodable record shows its place and is passed over."""
        records: list[ConsumedRecord] = []
        for partition in sorted(self._consumer.assignment()):
            while len(records) < max_records:
                try:
                    fetched = await self._consumer.getmany(partition, timeout_ms=0, max_records=1)
                except UnicodeDecodeError as error:
                    offset = await self._consumer.position(partition)
                    self._consumer.seek(partition, offset + 1)
                    self._one_by_one_until = time.monotonic() + _ONE_BY_ONE_SECONDS
                    records.append(_damaged(partition, offset, error))
                    continue
                if not fetched:
                    break
                records += [_record(record) for record in fetched[partition]]
        if not records:
            await asyncio.sleep(min(0.1, wait_seconds))
        return records

    def _note_skipped(self, fetched: Fetched) -> None:
        """Be loud about records that were gone before they were read: expired, or offsets reset (field report F28)."""
        for partition, first in fetched.first_offsets().items():
            expected = self._expected.get(partition)
            if expected is not None and first > expected:
                self.skipped_offsets += first - expected
                log.error(
                    "kafka.offsets_skipped",
                    group=self._settings.group,
                    topic=partition.topic,
                    partition=partition.partition,
                    expected=expected,
                    found=first,
                )
        for record in fetched.records:
            self._expected[record.source] = record.offset + 1

    async def _revoked(self) -> None:
        if self.epoch and self._consumer._coordinator.member_id == "":
            self._membership_losses.append(time.monotonic())
        await self._before_rebalance()
        self.epoch += 1
        self._settled.clear()
        self._expected.clear()

    async def _assigned(self, assigned: Iterable[TopicPartition]) -> None:
        if self._paused:
            self._consumer.pause(*assigned)
        self._active_at = time.monotonic()
        log.info(
            "kafka.partitions_assigned",
            group=self._settings.group,
            partitions=sorted(f"{partition.topic}/{partition.partition}" for partition in assigned),
        )
        self._after_rebalance()
        epoch = self.epoch
        with suppress(TimeoutError, KafkaError):
            async with asyncio.timeout(_JOIN_MARGIN_SECONDS):
                for partition in assigned:
                    committed = await self._consumer.committed(partition)
                    if committed is not None and epoch == self.epoch:
                        self._expected.setdefault(Partition(*partition), committed)

    def _stolen(self) -> bool:
        since = time.monotonic() - 60.0
        self._membership_losses = [moment for moment in self._membership_losses if moment > since]
        return self._settings.instance_id is not None and len(self._membership_losses) >= _MEMBERSHIP_LOSSES


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka ships no types
    def __init__(self, owner: GroupConsumer) -> None:
        self._owner = owner

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        await self._owner._revoked()

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        await self._owner._assigned(assigned)


def _new_client(kafka: KafkaSettings, settings: ConsumerSettings) -> AIOKafkaConsumer:
    """Return a client with every setting on which the guarantees depend made explicit (field report F17)."""
    options = kafka.connection_options()
    # A JoinGroup is answered when the slowest member has joined: a shorter request timeout would break every rebalance.
    shortest = settings.rebalance_timeout_seconds + _JOIN_MARGIN_SECONDS
    options["request_timeout_ms"] = int(1000 * max(kafka.request_timeout_seconds, shortest))
    return AIOKafkaConsumer(
        **options,
        group_id=settings.group,
        group_instance_id=settings.instance_id,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        isolation_level="read_committed",
        check_crcs=True,
        key_deserializer=None,  # an exception in one would break the iteration for good
        value_deserializer=None,
        partition_assignment_strategy=(RoundRobinPartitionAssignor,),
        session_timeout_ms=int(1000 * settings.session_timeout_seconds),
        heartbeat_interval_ms=int(1000 * min(3.0, settings.session_timeout_seconds / 5)),
        rebalance_timeout_ms=int(1000 * settings.rebalance_timeout_seconds),
        max_poll_interval_ms=int(1000 * settings.max_poll_interval_seconds),
        metadata_max_age_ms=60_000,
        retry_backoff_ms=100,
        fetch_min_bytes=1,
        fetch_max_wait_ms=500,
        fetch_max_bytes=50 * 1024 * 1024,
        max_partition_fetch_bytes=1024 * 1024,  # a larger record is still returned, alone (KIP-74)
    )


def _record(record: ConsumerRecord) -> ConsumedRecord:
    return ConsumedRecord(
        record.topic, record.partition, record.offset, record.key, record.value, record.headers, record.timestamp
    )


def _damaged(partition: TopicPartition, offset: int, error: UnicodeDecodeError) -> ConsumedRecord:
    damage = f"a header name in its batch, here or before, is not UTF-8: {error.reason}"
    return ConsumedRecord(partition.topic, partition.partition, offset, None, None, (), 0, damage)


def _why_unfinished(task: asyncio.Task[None]) -> str:
    if not task.done():
        return "TimeoutError"
    if task.cancelled():
        return "CancelledError"
    error = task.exception()
    return type(error).__name__ if error is not None else ""


def _failure(error: KafkaError) -> KafkaFailure:
    return KafkaFailure(f"{type(error).__name__}: {error}"[:300])
