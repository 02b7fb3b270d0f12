"""The audit: every confirmed order has exactly one payment, proved from three ledgers that do not share a database.

Orders, charges and the provider's payments are merged by order id in constant memory. On a running system the three are
never read at the same instant, so nothing is called wrong that was read once: a suspect is read again by id until two
readings agree. What is not charged yet is pending or late, not wrong, until it is overdue.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta

from chargeonce.audit_result import AuditResult, Sums
from chargeonce.judgement import EXPLANATIONS, Case, Kind, Rules, Verdict, judge
from chargeonce.ledgers import Ledgers

__all__ = ["EXPLANATIONS", "Audit", "AuditResult", "Case", "Kind", "Rules", "Sums", "Verdict", "judge"]

OVERDUE_AFTER_SECONDS = 900.0


class Audit:
    """Reads the ledgers once, and suspects again.

    `recheck_seconds` pass between two readings of a suspect; it is wrong when they agree, and judged by its last
    reading when it still changes after `recheck_tries`. At most `suspects_at_once` suspects are held in memory.
    """

    def __init__(
        self,
        ledgers: Ledgers,
        *,
        recheck_seconds: float = 1.0,
        recheck_tries: int = 10,
        suspects_at_once: int = 1000,
        readers: int = 16,
        finding_limit: int = 20,
    ) -> None:
        self._ledgers = ledgers
        self._recheck_seconds = recheck_seconds
        self._recheck_tries = recheck_tries
        self._suspects_at_once = suspects_at_once
        self._readers = asyncio.Semaphore(readers)
        self._finding_limit = finding_limit

    async def run(
        self,
        *,
        before: datetime | None = None,
        grace_seconds: float = 60.0,
        overdue_after_seconds: float = OVERDUE_AFTER_SECONDS,
        settled: bool = False,
    ) -> AuditResult:
        """Judge the orders confirmed before a time, by default `grace_seconds` ago on the order service's clock.

        Those of them that are not charged yet are late, and overdue when they are older than `overdue_after_seconds`.
        Raises LedgerAwayError when a service does not answer.
        """
        began = time.monotonic()
        now = await self._ledgers.clock()
        cut = before or now - timedelta(seconds=grace_seconds)
        overdue_before = min(cut, now - timedelta(seconds=overdue_after_seconds))
        rules = Rules(cut.astimezone(UTC), overdue_before.astimezone(UTC), settled)
        result = AuditResult(rules.cut, settled, self._finding_limit, rules.overdue_before)
        suspects: list[Case] = []
        async for case in self._cases():
            verdict = judge(case, rules)
            if verdict.is_certain:
                result.add(case, verdict)
            else:
                suspects.append(case)
            if len(suspects) >= self._suspects_at_once:
                await self._read_again(suspects, rules, result)
                suspects = []
        await self._read_again(suspects, rules, result)
        result.inboxes = await self._ledgers.inboxes()
        result.seconds = time.monotonic() - began
        return result

    async def _cases(self) -> AsyncIterator[Case]:
        """Merge the three streams by order id."""
        async with AsyncExitStack() as streams:
            orders, charges, payments = self._ledgers.orders(), self._ledgers.charges(), self._ledgers.payments()
            for stream in (orders, charges, payments):
                streams.push_async_callback(stream.close)
            while True:
                heads = [await orders.first_id(), await charges.first_id(), await payments.first_id()]
                ids = [head for head in heads if head is not None]
                if not ids:
                    return
                order_id = min(ids)
                order = await orders.take(order_id)
                yield Case(
                    order_id, order[0] if order else None, await charges.take(order_id), await payments.take(order_id)
                )

    async def _read_again(self, suspects: Sequence[Case], rules: Rules, result: AuditResult) -> None:
        """Account for suspects once nothing is wrong with them, or once two readings agree that something is."""
        for tries_left in reversed(range(self._recheck_tries)):
            if not suspects:
                return
            await asyncio.sleep(self._recheck_seconds)
            result.read_again += len(suspects)
            readings = await asyncio.gather(*(self._read(case.order_id) for case in suspects))
            changing: list[Case] = []
            for before, case in zip(suspects, readings, strict=True):
                verdict = judge(case, rules)
                if verdict.wrong and not _agree(before, case) and tries_left:
                    changing.append(case)
                elif case.order or case.charges or case.payments:
                    result.add(case, verdict)
            suspects = changing

    async def _read(self, order_id: int) -> Case:
        """Read one order from its end backwards, so that an entry's cause is read after it."""
        async with self._readers:
            payments = await self._ledgers.payments_of(order_id)
            charges = await self._ledgers.charges_of(order_id)
            return Case(order_id, await self._ledgers.order(order_id), charges, payments)


def _agree(before: Case, after: Case) -> bool:
    """Whether two readings say the same of the money; only a reading by id knows of events."""
    orders = [case.order.model_copy(update={"events": ()}) if case.order else None for case in (before, after)]
    return orders[0] == orders[1] and before.charges == after.charges and before.payments == after.payments
