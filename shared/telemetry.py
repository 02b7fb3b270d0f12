"""Logs, traces and metrics: events with fields, one trace from the request to the charge, bounded labels.

Logs are JSON lines, or coloured text on a terminal. Never log customer ids, amounts of a person, payloads or addresses
with passwords; ids of orders and events are fine.
"""

from __future__ import annotations

import logging
import sys
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import structlog
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.propagate import extract, inject
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import REGISTRY, Collector

tracer = trace.get_tracer("chargeonce")

LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Histogram bounds in seconds, fine where a healthy system lives and coarse where an outage does."""


class BulkHistogram(Collector):
    """A histogram that takes many observations at once: the client's own costs a lock and a search for each."""

    def __init__(self, name: str, documentation: str, bounds: Sequence[float] = LATENCY_BUCKETS) -> None:
        self._name, self._documentation, self._bounds = name, documentation, tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        REGISTRY.register(self)

    def observe_since(self, starts: list[int], now: int, ticks_per_second: int) -> None:
        """Count the durations from these times to `now`. Sorts the list; a clock that went back counts as no time."""
        starts.sort()
        longer = len(starts)
        for number, bound in enumerate(self._bounds):
            still_longer = bisect_left(starts, now - bound * ticks_per_second, 0, longer)
            self._counts[number] += longer - still_longer
            longer = still_longer
        self._counts[-1] += longer
        self._sum += max(0, now * len(starts) - sum(starts)) / ticks_per_second

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Return the counts in the client's form: cumulative, by upper bound."""
        total, buckets = 0, []
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        yield HistogramMetricFamily(self._name, self._documentation, buckets=buckets, sum_value=self._sum)


def configure(service: str, *, level: str = "INFO", json_lines: bool | None = None) -> None:
    """Set up logging and tracing of a process. `json_lines` None means: unless standard error is a terminal."""
    if json_lines is None:
        json_lines = not sys.stderr.isatty()
    shared_processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        _add_trace_id,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    # Plain tracebacks: the pretty ones print local variables, and those hold payloads.
    renderer: structlog.typing.Processor = structlog.dev.ConsoleRenderer(
        exception_formatter=structlog.dev.plain_traceback
    )
    if json_lines:
        shared_processors.append(structlog.processors.format_exc_info)
        renderer = structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[*shared_processors, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level]),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared_processors,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    # Our own services tell what a broken connection means for the events; the clients' repetitions do not help.
    for noisy, threshold in (("aiokafka", "CRITICAL"), ("uvicorn.access", "WARNING"), ("apscheduler", "WARNING")):
        logging.getLogger(noisy).setLevel(threshold)
    structlog.contextvars.bind_contextvars(service=service)
    configure_tracing(service)


def configure_tracing(service: str) -> None:
    """Give this process real trace ids; they travel in `traceparent` headers and stand in every log line."""
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        trace.set_tracer_provider(TracerProvider(resource=Resource.create({"service.name": service})))


def _add_trace_id(_logger: object, _name: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    span = trace.get_current_span().get_span_context()
    if span.is_valid:
        event["trace_id"] = format(span.trace_id, "032x")
    return event


def trace_headers() -> dict[str, str]:
    """Return the W3C `traceparent` of the current span, or nothing outside of a trace.

    Not `tracestate` and not baggage: those are the caller's, of any size, and would travel into every event.
    """
    carrier: dict[str, str] = {}
    inject(carrier)
    return {name: value for name, value in carrier.items() if name == "traceparent"}


def continued_from(headers: Mapping[str, str]) -> Context:
    """Return the trace context that the headers carry, so that work done for an event joins the request's trace."""
    carrier: dict[str, Any] = {name.lower(): value for name, value in headers.items()}
    return extract(carrier)
