"""The inbox's loop: fetch a batch, settle it in one transaction, then commit its offsets (R-KFK-IDEM-3).

What can fail, and what is done:
- one event: the batch is split in halves until the guilty event is alone, and that one is dead-lettered (F45), unless
  the handler fails on every event, which is our code's fault (blame.py);
- the database or anything else that passes: nothing is counted; partitions are paused and polled, positions go back to
  the first unsettled record, and the batch is fetched again after a backoff;
- an offset commit: progress is dropped or kept for the next one; the inbox absorbs the repetition (F20);
- Kafka: the client is closed and a new one begins at the committed offsets.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic

import structlog
from opentelemetry import trace

from shared import failpoints
from shared.database import Database
from shared.errors import KafkaFailure, MessageRejected, Refused, constraint_name, is_transient, sqlstate
from shared.inbox import metrics
from shared.inbox.batch import BatchSettler, Received, Settled, is_events_fault, receive
from shared.inbox.blame import Blame, HandlerFails
from shared.inbox.caution import DEATHS, Caution
from shared.inbox.dead_letters import KILLS
from shared.inbox.messages import Handler, M
from shared.inbox.window import WindowCheck
from shared.kafka.consumer import ConsumerSettings, GroupConsumer, UndecodableRecord
from shared.kafka.records import ConsumedRecord, Fetched, Partition
from shared.kafka.settings import KafkaSettings
from shared.lifecycle import READY, BackgroundService, Readiness, State, describe
from shared.telemetry import continued_from, tracer
from shared.unit_of_work import UnitsOfWork

log = structlog.get_logger(__name__)

_NO_PARTITION = (
    "no partition of processed_event for an event id's day: run the service's migrate command, "
    "and see that its inbox upkeep runs"
)
_COMPARED_AT_LEAST = 128  # events read at once to find one that the handler takes, however small batches are
_LINKS = 128  # the SDK's limit of links on a span
_WINDOW_PAUSE_SECONDS = 0.05
_DECODED_AT_ONCE = 256  # then others may run: an API in the same process


@dataclass(frozen=True, slots=True)
class InboxSettings:
    """How a consumer group works. A group id has no default: it names its service and purpose, for ever.

    `instance_id` makes the membership static: unique in the group, the same after a restart. A batch ends within
    `batch_deadline_seconds`, which must exceed the database's transaction timeout; a rebalance waits for it.
    `lone_patience_seconds` is for how long an event is tried that fails when there is no other to compare it with.
    `dedup_window_days` is what the group's upkeep keeps marks for: longer than anything may be redelivered (F24).
    """

    group: str
    instance_id: str | None = None
    max_batch_records: int = 2000
    batch_deadline_seconds: float = 25.0
    commit_deadline_seconds: float = 10.0
    session_timeout_seconds: float = 30.0
    max_poll_interval_seconds: float = 300.0
    leave_deadline_seconds: float = 5.0
    poll_wait_seconds: float = 0.5
    lone_patience_seconds: float = 60.0
    dedup_window_days: int = 30

    def __post_init__(self) -> None:
        if not self.group:
            raise ValueError("a consumer group needs a name: its service and purpose, such as billing-order-confirmed")
        if self.max_batch_records < 1:
            raise ValueError("max_batch_records must be 1 or more")
        if self.rebalance_timeout_seconds * 2 > self.max_poll_interval_seconds:
            raise ValueError(
                f"max_poll_interval_seconds is {self.max_poll_interval_seconds:g} and must be twice the batch and "
                f"commit deadlines ({self.rebalance_timeout_seconds:g} s) or more, or slow batches lose the membership"
            )

    @property
    def rebalance_timeout_seconds(self) -> float:
        """How long a rebalance waits for this member: a batch, its commit, and a margin."""
        return self.batch_deadline_seconds + self.commit_deadline_seconds + 5.0


@dataclass(frozen=True, slots=True)
class _Batch(Generic[M]):
    """What was fetched at once, and what is in it."""

    fetched: Fetched
    received: Sequence[Received[M]]


class InboxConsumer(BackgroundService, Generic[M]):
    """Consumes the handler's topics as one member of the group."""

    def __init__(
        self,
        *,
        settings: InboxSettings,
        kafka: KafkaSettings,
        database: Database,
        units: UnitsOfWork,
        handler: Handler[M],
        window: WindowCheck | None = None,
        caution: Caution | None = None,
    ) -> None:
        super().__init__()
        self._window = window
        self._caution = caution
        self.name = f"inbox-{settings.group}"
        self.stop_deadline_seconds = settings.rebalance_timeout_seconds + settings.leave_deadline_seconds * 2
        self._settings = settings
        self._kafka = kafka
        self._database = database
        self._handler = handler
        self._settler = BatchSettler(
            group=settings.group, units=units, handler=handler, deadline_seconds=settings.batch_deadline_seconds
        )
        self._blame = Blame(settings.lone_patience_seconds)
        self._client: GroupConsumer | None = None
        self._fetching: asyncio.Task[_Batch[M]] | None = None
        self._ahead: _Batch[M] | None = None
        self._one_by_one = False
        self._no_batch_in_hand = asyncio.Event()
        self._no_batch_in_hand.set()
        self._rebalancing = False
        self._postponed = False
        self._batch_limit = settings.max_batch_records
        self._skipped_offsets = 0

    async def run(self) -> None:
        while self._window is not None and not (self._window.looked.is_set() or self.stopping.is_set()):
            await self.pause(_WINDOW_PAUSE_SECONDS)
        self._obey_window()
        try:
            await self._consume()
        except UndecodableRecord as failure:
            self._degraded(failure.detail)
            self._one_by_one = True
        except KafkaFailure as failure:
            self._degraded(failure.detail)
            await self.pause(self.backoff.next_seconds())

    async def stop(self) -> None:
        """Settle the batch in hand and leave the group; only then is this a good end."""
        await super().stop()
        if self._caution is not None and (self._task is None or self._task.done()):
            await self._caution.leave()

    def _obey_window(self) -> None:
        if self._window is not None and self._window.verdict.forbids:
            raise Refused(self._window.verdict.problem)

    async def _consume(self) -> None:
        """Be a member of the group until the service is to stop. Raises KafkaFailure: begin anew then."""
        group = self._settings.group
        if self.readiness.state == State.DOWN:
            self.readiness = Readiness(State.DEGRADED, f"joining group {group} of {', '.join(self._handler.topics)}")
        consumer = GroupConsumer(
            self._kafka,
            self._membership(),
            before_rebalance=self._finish_batch,
            after_rebalance=self._rebalanced,
            one_by_one=self._one_by_one,
        )
        self._one_by_one = False
        self._client = consumer
        self._rebalancing = False
        self._skipped_offsets = 0
        try:
            if not await self._join(consumer):
                return
            log.info("inbox.started", group=group, instance_id=self._settings.instance_id, topics=self._handler.topics)
            while not self.stopping.is_set():
                await self._step(consumer)
        finally:
            self._ahead = None
            if self._fetching is not None:
                fetching, self._fetching = self._fetching, None
                await asyncio.wait({fetching})
                fetching.exception()
            await consumer.close()

    def _membership(self) -> ConsumerSettings:
        settings = self._settings
        return ConsumerSettings(
            group=settings.group,
            topics=self._handler.topics,
            instance_id=settings.instance_id,
            session_timeout_seconds=settings.session_timeout_seconds,
            rebalance_timeout_seconds=settings.rebalance_timeout_seconds,
            max_poll_interval_seconds=settings.max_poll_interval_seconds,
            commit_deadline_seconds=settings.commit_deadline_seconds,
            leave_deadline_seconds=settings.leave_deadline_seconds,
        )

    async def _join(self, consumer: GroupConsumer) -> bool:
        """Join the group; return False, having given up, when the service is to stop."""
        joining = asyncio.create_task(consumer.start())
        stopping = asyncio.create_task(self.stopping.wait())
        try:
            await asyncio.wait({joining, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not joining.done():
                return False
            await joining
            return True
        finally:
            for task in (joining, stopping):
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task

    async def _step(self, consumer: GroupConsumer) -> None:
        self._obey_window()
        batch = self._take_ahead(consumer) or await self._fetch(consumer, self._settings.poll_wait_seconds)
        if batch.fetched.records:
            failpoints.hit("B1")
            await self._work_off(consumer, batch)
        else:
            await self._idle(consumer)
        lag = consumer.lag()
        metrics.LAG_EVENTS.labels(self._settings.group).set(lag)
        if not (lag or batch.fetched.records):
            metrics.LAG_SECONDS.labels(self._settings.group).set(0)
        newly_skipped = consumer.skipped_offsets - self._skipped_offsets
        if newly_skipped:
            self._skipped_offsets = consumer.skipped_offsets
            metrics.SKIPPED_OFFSETS.labels(self._settings.group).inc(newly_skipped)

    async def _fetch(self, consumer: GroupConsumer, wait_seconds: float) -> _Batch[M]:
        """Fetch a batch, decode it, and tell in which parts it is to be settled."""
        fetched = await consumer.poll(max_records=self._batch_limit, wait_seconds=wait_seconds)
        return _Batch(fetched, await self._receive(fetched.records))

    def _take_ahead(self, consumer: GroupConsumer) -> _Batch[M] | None:
        """Return the batch that was fetched while the last one was settled, unless it is being revoked or was.

        A rebalance that has waited for the last batch goes on now: another one would be settled after it.
        """
        batch, self._ahead = self._ahead, None
        if batch is None or self._rebalancing or batch.fetched.epoch != consumer.epoch:
            return None
        return batch

    async def _idle(self, consumer: GroupConsumer) -> None:
        """Nothing to do: catch up on a failed commit, and tell how things stand."""
        # Before the commit: each of those waits for its deadline while Kafka is silent, and may never succeed.
        if consumer.silent_seconds() > 2 * self._settings.session_timeout_seconds:
            raise KafkaFailure("Kafka has been silent for longer than two session timeouts; joining anew")
        if consumer.has_uncommitted and not await self._commit(consumer):
            self._degraded("offset commits fail; what is settled would be read again after a restart")
            return
        trouble = consumer.trouble()
        if trouble:
            self._degraded(trouble)
        elif self._postponed:
            await self._look_at_database()
        else:
            self.readiness = READY

    async def _look_at_database(self) -> None:
        """After a failure, with no records to try again: ask the database itself."""
        try:
            await self._database.ping()
        except Exception as error:
            if not is_transient(error):
                raise
            return
        self._postponed = False

    async def _work_off(self, consumer: GroupConsumer, batch: _Batch[M]) -> None:
        """Settle a batch as far as possible and commit its offsets; then, if something failed, wait and seek back.

        Meanwhile the next one is fetched and decoded. If this one is not settled to its end, that is read again too.
        """
        self._no_batch_in_hand.clear()
        began = time.monotonic()
        fetched = batch.fetched
        if self._caution is None or self._caution.is_calm:
            self._fetching = asyncio.create_task(self._fetch(consumer, 0.0))
        progress = _Progress()
        failure: Exception | None = None
        try:
            with _span(self._settings.group, fetched.records):
                try:
                    await self._settle(consumer, batch, progress)
                except Exception as error:
                    failure = error
                consumer.settled(progress.next_offsets, fetched.epoch)
                if progress.next_offsets:
                    failpoints.hit("B4")
                    if await self._commit(consumer):
                        failpoints.hit("B5")
        finally:
            self._no_batch_in_hand.set()
        ahead = await self._fetched_ahead()
        if isinstance(failure, KafkaFailure):
            raise failure  # of a poll between two parts: positions may be anywhere, so this client has to go
        unsettled = {**(ahead.fetched.first_offsets() if ahead else {}), **progress.unsettled(fetched)}
        if failure is not None:
            await self._postpone(consumer, fetched, unsettled, failure)
            return
        if progress.complete(fetched):
            self._ahead = ahead
            self._report(progress.settled, fetched.records, time.monotonic() - began)
            if not consumer.has_uncommitted:
                self.readiness = READY
        else:
            consumer.seek_back(unsettled, fetched.epoch)

    async def _fetched_ahead(self) -> _Batch[M] | None:
        """Return what was fetched meanwhile, if anything. Raises KafkaFailure: this client has to go then."""
        fetching, self._fetching = self._fetching, None
        if fetching is None:
            return None
        batch = await fetching
        return batch if batch.fetched.records else None

    async def _settle(self, consumer: GroupConsumer, batch: _Batch[M], progress: _Progress) -> None:
        """Settle the batch in one transaction; if one of its events fails it, in halves until that event is alone.

        Parts are settled in the order of the log, so progress is always a prefix of each partition. An event that
        failed alone, and what is settled behind it, is held until the handler took another event of the batch; later
        events of its key wait for that verdict too. Between parts a rebalance or a stop ends the batch early: the rest
        is read again by whoever owns it then.
        """
        parts: list[Sequence[Received[M]]] = [batch.received]
        if self._caution is not None and len(chunks := await self._caution.chunks(batch.fetched)) > 1:
            parts = [await self._receive(chunk) for chunk in reversed(chunks)]
        held: list[_Held] = []
        polled_at = time.monotonic()
        try:
            while parts:
                part = parts.pop()
                waits = _has_key_of(part, held)
                outcome = None if waits else await self._outcome(part)
                if (waits or isinstance(outcome, Exception)) and len(part) > 1:
                    middle = len(part) // 2
                    parts += [part[middle:], part[:middle]]
                else:
                    held.append((part, outcome))
                    if isinstance(outcome, Settled) and outcome.shows_a_working_handler:
                        self._blame.handler_took_events()
                        await self._release(held, progress, try_again=True)
                    elif not _failures(held):
                        await self._release(held, progress)
                if parts and (self._rebalancing or self.stopping.is_set()):
                    return
                if parts and time.monotonic() - polled_at > self._settings.max_poll_interval_seconds / 10:
                    if self._fetching is not None:
                        await asyncio.wait({self._fetching})  # there is one poll at a time
                    consumer.pause()
                    await consumer.poll_paused(0.0)
                    polled_at = time.monotonic()
            if held:
                self._blame.judge(_failures(held))
                await self._release(held, progress)
        finally:
            consumer.resume()

    async def _release(self, held: list[_Held], progress: _Progress, *, try_again: bool = False) -> None:
        """Dead-letter what failed of the parts that are held; all of them are progress then.

        `try_again` gives failed events to the handler once more: it works now, but perhaps did not when they failed.
        """
        while held:
            part, outcome = held[0]
            if outcome is None or (try_again and _failures(held[:1])):
                outcome = await self._outcome(part)
            settled = outcome if isinstance(outcome, Settled) else await self._bury(part[0], outcome)
            progress.add(part, settled)
            self._count(settled)
            del held[0]

    async def _outcome(self, part: Sequence[Received[M]]) -> Settled | Exception:
        """Settle a part, or return what one of its events did to it. Raises what is no event's fault."""
        records = [received.record for received in part]
        if self._caution is not None and self._caution.is_due(records[0]):
            before = await self._caution.attempt(records)
            if len(part) == 1 and before >= DEATHS:
                return await self._bury(part[0], MessageRejected(KILLS, f"the process died with it {before} times"))
        try:
            return await self._settler.settle(part)
        except Exception as error:
            if not is_events_fault(error):
                raise
            return error

    async def _receive(self, records: Sequence[ConsumedRecord]) -> list[Received[M]]:
        received: list[Received[M]] = []
        for begin in range(0, len(records), _DECODED_AT_ONCE):
            received += [receive(self._handler, record) for record in records[begin : begin + _DECODED_AT_ONCE]]
            await asyncio.sleep(0)
        return received

    async def _bury(self, received: Received[M], error: Exception) -> Settled:
        record = received.record
        log.error(
            "inbox.event_failed",
            group=self._settings.group,
            event_id=str(received.event_id),
            topic=record.topic,
            partition=record.partition,
            offset=record.offset,
            error=describe(error),
            exc_info=error,
        )
        return await self._settler.bury(received, error)

    async def _commit(self, consumer: GroupConsumer) -> bool:
        committed = await consumer.commit()
        if not committed:
            metrics.COMMIT_FAILURES.labels(self._settings.group).inc()
        return committed

    async def _postpone(
        self, consumer: GroupConsumer, fetched: Fetched, unsettled: Mapping[Partition, int], failure: Exception
    ) -> None:
        """Read the unsettled records again after a backoff, polling meanwhile so that the membership lives on."""
        wait = self.backoff.next_seconds()
        self._postponed = True
        if isinstance(failure, HandlerFails):  # more events may hold one that the handler takes
            self._batch_limit = min(2 * self._batch_limit, max(_COMPARED_AT_LEAST, self._settings.max_batch_records))
        else:  # it may have been too much for the time limits
            self._batch_limit = max(1, self._batch_limit // 2)
        metrics.BATCH_RETRIES.labels(self._settings.group).inc()
        self._degraded(_reason(failure))
        log.warning(
            "inbox.batch_postponed",
            group=self._settings.group,
            events=len(fetched.records),
            error=describe(failure),
            retry_in_seconds=round(wait, 2),
            exc_info=None if is_transient(failure) else failure,
        )
        consumer.pause()
        consumer.seek_back(unsettled, fetched.epoch)
        until = time.monotonic() + wait
        while not self.stopping.is_set() and (left := until - time.monotonic()) > 0:
            await consumer.poll_paused(min(left, self._settings.poll_wait_seconds))
        consumer.resume()

    async def _finish_batch(self) -> None:
        """A rebalance begins: let the batch in hand settle and commit, within the time that the group allows."""
        self._rebalancing = True
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.rebalance_timeout_seconds - 2.0):
                await self._no_batch_in_hand.wait()
                return
        log.error("inbox.rebalance_without_batch", group=self._settings.group)

    def _rebalanced(self) -> None:
        if self._caution is not None:
            self._caution.assigned()
        self._rebalancing = False
        metrics.REBALANCES.labels(self._settings.group).inc()

    def _degraded(self, reason: str) -> None:
        if self.readiness != (changed := Readiness(State.DEGRADED, reason)):
            log.warning("inbox.degraded", group=self._settings.group, reason=reason)
            self.readiness = changed

    def _count(self, settled: Settled) -> None:
        group = self._settings.group
        metrics.HANDLED.labels(group).inc(settled.handled)
        metrics.DUPLICATES.labels(group).inc(settled.duplicates)
        metrics.OUTSIDE_WINDOW.labels(group).inc(settled.outside_window)
        for reason, count in settled.reasons.items():
            metrics.DEAD_LETTERS.labels(group, reason).inc(count)

    def _report(self, settled: Settled, records: Sequence[ConsumedRecord], seconds: float) -> None:
        group = self._settings.group
        self.backoff.reset()
        self._postponed = False
        self._batch_limit = min(self._settings.max_batch_records, self._batch_limit * 2)
        metrics.BATCH_EVENTS.labels(group).observe(len(records))
        written_at = [record.timestamp_ms for record in records if record.timestamp_ms > 0]
        if written_at:
            now = time.time_ns() // 1_000_000
            metrics.LAG_SECONDS.labels(group).set(max(0, now - min(written_at)) / 1000)
            metrics.EVENT_AGE.observe_since(written_at, now, 1000)
        metrics.BATCH_SECONDS.labels(group).observe(seconds)
        dead = settled.dead
        (log.warning if dead else log.debug)(
            "inbox.batch_settled",
            group=group,
            events=settled.handled + settled.outside_window,
            duplicates=settled.duplicates,
            dead=dead,
            **({"reasons": dict(settled.reasons)} if dead else {}),
            seconds=round(seconds, 4),
        )


_Held = tuple[Sequence[Received[Any]], Settled | Exception | None]
"""A part of a batch that waits to become progress, and what became of it: None while it waits behind a failed one."""


def _failures(held: Sequence[_Held]) -> list[tuple[ConsumedRecord, Exception]]:
    """Return the events whose handling failed, for reasons that may be ours. A rejection is a reason of its own."""
    return [
        (part[0].record, outcome)
        for part, outcome in held
        if isinstance(outcome, Exception) and not isinstance(outcome, MessageRejected)
    ]


def _has_key_of(part: Sequence[Received[Any]], held: Sequence[_Held]) -> bool:
    """Tell whether a part has an event whose key is that of one that failed: it must not take effect before it."""
    failed = {(record.topic, record.key) for record, _ in _failures(held) if record.key is not None}
    return bool(failed) and any((received.record.topic, received.record.key) in failed for received in part)


class _Progress:
    """How much of a batch is settled: a prefix of its records in the order of the log."""

    def __init__(self) -> None:
        self.next_offsets: dict[Partition, int] = {}
        self.settled = Settled()
        self._records = 0

    def add(self, part: Sequence[Received[Any]], settled: Settled) -> None:
        self._records += len(part)
        for received in part:
            self.next_offsets[received.record.source] = received.record.offset + 1
        self.settled.add(settled)

    def complete(self, fetched: Fetched) -> bool:
        return self._records == len(fetched.records)

    def unsettled(self, fetched: Fetched) -> dict[Partition, int]:
        """Return where to read each partition of the batch again: behind what is settled of it."""
        return {**fetched.first_offsets(), **self.next_offsets}


def _reason(failure: Exception) -> str:
    if sqlstate(failure) == "23514" and constraint_name(failure) is None:
        return _NO_PARTITION
    if isinstance(failure, Refused | HandlerFails):
        return failure.detail
    return f"a batch failed with {type(failure).__name__} {sqlstate(failure)}".rstrip() + "; it is tried again"


def _span(group: str, records: Sequence[ConsumedRecord]) -> Any:
    """Begin the span of a batch, linked to the traces of its first events."""
    links = []
    for record in records[:_LINKS]:
        for name, value in record.headers:
            if name == "traceparent" and value is not None:
                context = continued_from({name: value.decode("ascii", "replace")})
                origin = trace.get_current_span(context).get_span_context()
                if origin.is_valid:
                    links.append(trace.Link(origin))
    return tracer.start_as_current_span(
        "inbox.batch", links=links, attributes={"messaging.consumer.group.name": group, "batch.size": len(records)}
    )
