"""Metrics of the inbox. Labels are the consumer group and, for dead letters, the reason code; never an id."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from shared.telemetry import LATENCY_BUCKETS, BulkHistogram

HANDLED = Counter("inbox_handled", "Events handled for the first time.", ["group"])
DUPLICATES = Counter("inbox_duplicates", "Records whose event was settled before.", ["group"])
OUTSIDE_WINDOW = Counter("inbox_outside_window", "Events older than the dedup window, given to the handler.", ["group"])
DEAD_LETTERS = Counter("inbox_dead_letters", "Dead letters written.", ["group", "reason"])
BATCH_EVENTS = Histogram(
    "inbox_batch_events", "Records of a settled batch.", ["group"], buckets=(1, 10, 50, 100, 250, 500, 1000, 2000, 5000)
)
BATCH_SECONDS = Histogram(
    "inbox_batch_seconds", "Time from fetched to offsets committed.", ["group"], buckets=LATENCY_BUCKETS
)
BATCH_RETRIES = Counter("inbox_batch_retries", "Batches postponed by a passing failure.", ["group"])
LAG_EVENTS = Gauge("inbox_lag_events", "Records of the assigned partitions that are not read yet.", ["group"])
LAG_SECONDS = Gauge(
    "inbox_lag_seconds", "Age of the oldest record of the last batch; 0 when nothing waits to be read.", ["group"]
)
EVENT_AGE = BulkHistogram(
    "inbox_event_age_seconds",
    "From a record's time, which is its event's, to the commit of its batch.",
    (0.01, 0.05, 0.1, 0.5, 1, 5, 30, 60, 300, 1800, 3600, 86_400),
)
REBALANCES = Counter("inbox_rebalances", "Assignments received from the group.", ["group"])
COMMIT_FAILURES = Counter("inbox_commit_failures", "Offset commits that failed or were dropped.", ["group"])
SKIPPED_OFFSETS = Counter(
    "inbox_skipped_offsets", "Offsets that were gone from the log before they were read.", ["group"]
)
RETRIES = Counter("inbox_dead_letter_retries", "Retries of dead letters by how they ended.", ["group", "result"])
LETTERS_OPEN = Gauge("inbox_dead_letters_open", "Dead letters that wait, 10,000 at most.", ["group", "reason"])
OLDEST_LETTER = Gauge("inbox_dead_letters_oldest_seconds", "Age of the oldest dead letter that waits.", ["group"])
