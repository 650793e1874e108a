"""The OpenTelemetry exporter: request events in, traces, log records and metrics out."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk.metrics.export import MetricsData
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext
from prometheus_client.core import Metric as Family

from kvscope.monitor.events.samples import Record
from kvscope.monitor.exporters.otel.export_queue import ExportSender, Pace, Reasons
from kvscope.monitor.exporters.otel.finding_logs import log_of
from kvscope.monitor.exporters.otel.metric_bridge import metrics_data, points_in
from kvscope.monitor.exporters.otel.otel_schema import OtlpFigures
from kvscope.monitor.exporters.otel.otlp_exporters import BadEndpoint, exporters_for
from kvscope.monitor.exporters.otel.request_recorder import RecordedRequest, RequestRecorder
from kvscope.monitor.exporters.otel.request_spans import spans_of
from kvscope.monitor.exporters.otel.trace_ids import root_of
from kvscope.monitor.exporters.otel.trace_sampling import Sampling
from kvscope.monitor.findings import Transition
from kvscope.monitor.pipeline import EndedRequest, Pipeline
from kvscope.monitor.state.records import RequestState

METRICS_EVERY_S: Final = 15.0
"""The usual scrape interval of Prometheus."""
NOTE_EVERY_S: Final = 1.0
"""Requests that findings name: they grow, and detectors run twice a second."""
SPAN_EVENTS: Final = 400_000
"""Bound on the events of requests that wait to be sent as spans: 30 s of 1,000 requests a second with a dozen events
each, about 100 MB.
"""
LOGS: Final = 10_000
POINTS: Final = 100_000
"""Bound on metric points: minutes of a fleet's."""


@dataclass(frozen=True)
class OtelConfig:
    """The endpoint, the share of unremarkable requests to keep (0 to 1), the interval of metrics, and the interval of
    retries.
    """

    url: str
    sample: float = 1.0
    metrics_every_s: float = 0.0
    pace: Pace = field(default_factory=Pace)


class _KeptRequest(NamedTuple):
    """A request whose trace is kept. Its spans are made when they are sent."""

    engine: str
    provider: str
    record: RequestState
    wall_minus_mono_ns: int
    recorded: RecordedRequest
    why: str


class OtelOutlet:
    """Sends all of it to one endpoint. Raises BadEndpoint.

    `collect` gives the families of /metrics, which may include the counters of this outlet itself (`figures`).
    """

    def __init__(self, config: OtelConfig, watch: Pipeline, collect: Callable[[], Iterable[Family]]) -> None:
        if not 0 <= config.sample <= 1:
            raise BadEndpoint(f"a share of traces is a number from 0 to 1, not {config.sample:g}")
        every_s = config.metrics_every_s or _metrics_every_s()
        exporters = exporters_for(config.url)
        self._reasons = reasons = Reasons()
        self.recorder = RequestRecorder()
        self._watch = watch
        self._collect = collect
        self._every_s = every_s
        self._sampling = Sampling(config.sample)
        self._noted_s = 0.0
        self._resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "kvscope")})
        pace = config.pace
        self._traces = ExportSender[_KeptRequest](
            "traces", exporters.traces, self._spans, capacity=SPAN_EVENTS, batch=100, pace=pace, reasons=reasons
        )
        self._logs = ExportSender[ReadableLogRecord](
            "logs", exporters.logs, list, capacity=LOGS, batch=500, pace=pace, reasons=reasons
        )
        self._metrics = ExportSender[MetricsData](
            "metrics", exporters.metrics, _single, capacity=POINTS, batch=1, pace=pace, reasons=reasons
        )
        self._stopping = threading.Event()
        self._measuring = threading.Thread(target=self._measure, name="kvscope-otlp-measure", daemon=True)
        self._measuring.start()

    def follow(self, records: Iterable[Record]) -> None:
        """Note the events of requests, before the watch takes them and knows which have ended."""
        self.recorder.follow(records)

    def send(self, ended: Iterable[EndedRequest]) -> list[tuple[EndedRequest, SpanContext]]:
        """Queue the kept traces of these. Return them with the roots of their traces."""
        kept = []
        for one in ended:
            engine, record, offset = one
            recorded = self.recorder.take(engine, record.number)
            root = root_of(engine, record)
            why = self._sampling.why(engine, record, recorded, root.trace_id)
            if why:
                provider = self._provider(engine)
                self._traces.put(
                    _KeptRequest(engine, provider, record, offset, recorded, why), 10 + len(recorded.about)
                )
                kept.append((one, root))
        return kept

    def report(self, transitions: Iterable[Transition]) -> None:
        """Queue a log record for each. Call it often, even without transitions: it also notes current problems."""
        if time.monotonic() - self._noted_s >= NOTE_EVERY_S:
            self._noted_s = time.monotonic()
            with self._watch.locked():
                findings = self._watch.lifecycle
                self._sampling.note([*findings.firing(), *findings.suppressed()])
        for transition in transitions:
            self._logs.put(log_of(transition, self._culprit(transition), self._resource))

    def figures(self) -> list[OtlpFigures]:
        """Return for each signal the sent, waiting and lost items."""
        return [
            OtlpFigures(sender.signal, sender.sent, sender.waiting, sender.dropped)
            for sender in (self._traces, self._logs, self._metrics)
        ]

    def close(self) -> None:
        """Send what waits, for a few seconds at most."""
        self._stopping.set()
        self._measuring.join()
        senders = (self._traces, self._logs, self._metrics)
        closing = [threading.Thread(target=sender.close) for sender in senders]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
        self._reasons.stop()

    def _measure(self) -> None:
        while not self._stopping.wait(self._every_s):
            self._put_metrics()
        self._put_metrics()  # the last of them

    def _put_metrics(self) -> None:
        data = metrics_data(self._collect(), time.time_ns(), self._resource)
        self._metrics.put(data, points_in(data))

    def _spans(self, kept: Sequence[_KeptRequest]) -> list[ReadableSpan]:
        return [span for one in kept for span in spans_of(*one, self._resource)]

    def _provider(self, engine: str) -> str:
        ledger = self._watch.fleet.engines.get(engine)
        return (ledger.description.engine if ledger is not None else "") or "unknown"

    def _culprit(self, transition: Transition) -> SpanContext | None:
        """Return the root span of the first request that it is about and that is still known."""
        judged = transition.finding.judgement
        with self._watch.locked():
            ledger = self._watch.fleet.engines.get(judged.engine)
            for name in judged.requests:
                record = ledger.request(name) if ledger is not None else None
                if record is not None:
                    return root_of(judged.engine, record)
        return None


def _single(data: Sequence[MetricsData]) -> MetricsData:
    return data[0]


def _metrics_every_s() -> float:
    """By OpenTelemetry's own setting, in ms."""
    given = os.environ.get("OTEL_METRIC_EXPORT_INTERVAL", "")
    try:
        return float(given) / 1e3 if given else METRICS_EVERY_S
    except ValueError as error:
        raise BadEndpoint(f"OTEL_METRIC_EXPORT_INTERVAL is not a number of milliseconds: {error}") from error
