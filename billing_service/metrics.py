"""Billing's metrics. Labels are bounded (states, outcomes, reasons), never an id; nothing is counted at a scrape."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from billing_service import repository
from billing_service.breaker import BreakerState
from shared.database import Database
from shared.lifecycle import READY
from shared.schedule import PeriodicService
from shared.telemetry import LATENCY_BUCKETS

ATTEMPTS = Counter("billing_charge_attempts", "Calls of the provider by outcome.", ["outcome"])
SETTLED = Counter("billing_charges_settled", "Charges that got their result.", ["state"])
REVIEWS = Counter("billing_charges_sent_to_review", "Charges handed to a person.", ["reason"])
FENCES_LOST = Counter("billing_charge_fences_lost", "Answers dropped: another executor had claimed the charge.")
PROVIDER_SECONDS = Histogram(
    "billing_provider_seconds", "Time of one call of the provider.", ["outcome"], buckets=LATENCY_BUCKETS
)
BREAKER = Gauge("billing_breaker_state", "1 for the state that the circuit breaker is in.", ["state"])
UNFINISHED = Gauge(
    "billing_unfinished_charges",
    f"Charges that are not settled; {repository.COUNTED_AT_MOST} means at least that many.",
    ["state"],
)
RECONCILIATION_FINDINGS = Gauge(
    "billing_reconciliation_findings", "Orders that the last reconciliation found to contradict the provider.", ["kind"]
)
RECONCILED_AT = Gauge("billing_reconciled_timestamp_seconds", "When a reconciliation last came to its end.")
RECONCILIATION_SECONDS = Gauge("billing_reconciliation_seconds", "How long the last reconciliation took.")
OLDEST_SECONDS = Gauge("billing_oldest_unfinished_charge_seconds", "Age of the oldest charge in a state.", ["state"])


def tell_breaker(current: BreakerState) -> None:
    """Show the breaker's state."""
    for state in BreakerState:
        BREAKER.labels(state).set(state is current)


def observe_call(outcome: str, seconds: float) -> None:
    """Count one call of the provider."""
    PROVIDER_SECONDS.labels(outcome).observe(seconds)


class ChargeMonitor(PeriodicService):
    """Reads the backlog of charges every few seconds, at a bounded cost."""

    name = "charge-monitor"

    def __init__(self, database: Database, interval_seconds: float = 5.0) -> None:
        super().__init__(interval_seconds)
        self._database = database

    async def do(self) -> None:
        async with self._database.session() as session:
            found = await repository.unfinished(session)
        for backlog in found:
            UNFINISHED.labels(backlog.state).set(backlog.charges)
            OLDEST_SECONDS.labels(backlog.state).set(backlog.oldest_seconds)
        self.readiness = READY
