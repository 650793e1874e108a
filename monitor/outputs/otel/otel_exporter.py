"""The OpenTelemetry exporter: request events in, traces, log records and metrics out.

A trace is kept if users may want to inspect it, or as part of a share of the rest. The decision comes when the request
ends, with all data. The trace's id decides the share, as in OpenTelemetry's TraceIdRatioBased, so that services with
the same share keep the same traces.

Metrics are whatever the collector of /metrics gives. A counter is a monotonic sum, a histogram a histogram. Both are
cumulative. OTLP has no histogram that falls, so the buckets of a gaugehistogram are gauges by the names that the page
gives them. Names stay, but for a counter's `_total`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import NonRecordingSpan, SpanContext, set_span_in_context
from prometheus_client.core import Metric as Family
from prometheus_client.samples import Sample

from ...base.supervision import SupervisedThread
from ...contract.kinds import Kind
from ...contract.samples import Record
from ...detectors.findings import Finding, Transition, severity_at_least
from ...detectors.judgement import Severity
from ...ledger.records import RequestState
from ...ledger.tally import SERVED
from ...questions.pipeline import EndedRequest, Pipeline
from ..prometheus.service_metrics import OtlpFigures
from .export_queue import CLOSE_S, BadEndpoint, ExportSender, Pace, Reasons, Sending, exporters_for
from .request_recorder import RecordedRequest, RequestRecorder
from .request_spans import SCOPE, root_of, spans_of

SLOW_FIRST_TOKEN_S: Final = 5.0
"""From arrival to the first token, or to the end without one. Chat users wait a second or two. Even a prompt that fills
a whole context window takes less on the hardware that serves it. A longer time means that it stood still somewhere.
"""
PER_TOKEN_S: Final = 0.2
"""Between two tokens, on average over the request. People read about five words a second: from here on the text comes
slower than it is read."""
WAITED_S: Final = 5.0
"""In all, while the scheduler had it and did not run it: as long as is too long for a first token."""
MAX_CULPRITS: Final = 10_000
_RATIO_BITS: Final = (1 << 64) - 1


class Sampling:
    """Keeps `share` (0 to 1) of the unremarkable requests."""

    def __init__(self, share: float = 1.0) -> None:
        self._bound = round(share * (_RATIO_BITS + 1))
        self._culprits: dict[tuple[str, str], str] = {}
        """Requests that a finding named, by engine and request id, with its code, until they end."""

    def note(self, findings: Iterable[Finding]) -> None:
        """Note the requests that current findings name, to keep their traces when they end."""
        for finding in findings:
            judged = finding.judgement
            if severity_at_least(finding.severity, "warning"):
                self._culprits.update({(judged.engine, name): judged.code for name in judged.requests})
        while len(self._culprits) > MAX_CULPRITS:
            del self._culprits[next(iter(self._culprits))]

    def why(self, engine: str, record: RequestState, recorded: RecordedRequest, trace_id: int) -> str:
        """Why the trace of a request that ended is kept: failed, finding CODE, stuck, preempted, slow, or share of the
        rest, or an empty string if it is not.
        """
        code = self._culprits.pop((engine, record.id), "")
        if record.status not in SERVED:
            return "failed"
        if code:
            return f"finding {code}"
        if record.stalled_ns or any(event.kind == Kind.STALLED for _, _, event in recorded.about):
            return "stuck"
        if record.preemptions:
            return "preempted"
        if _is_slow(record):
            return "slow"
        return "share" if trace_id & _RATIO_BITS < self._bound else ""


def _is_slow(record: RequestState) -> bool:
    first_ns = record.first_token_ns or record.finished_ns
    if (first_ns - (record.received_ns or record.arrived_ns)) / 1e9 > SLOW_FIRST_TOKEN_S:
        return True
    if sum(record.waited_ns.values()) / 1e9 > WAITED_S:
        return True
    between = record.output_tokens - 1
    return between > 0 and (record.finished_ns - first_ns) / 1e9 / between > PER_TOKEN_S


MAX_LOGGED_CULPRITS: Final = 100
OTEL_SEVERITIES: Final[Mapping[Severity, tuple[str, SeverityNumber]]] = {
    "none": ("INFO", SeverityNumber.INFO),
    "info": ("INFO", SeverityNumber.INFO),
    "warning": ("WARN", SeverityNumber.WARN),
    "error": ("ERROR", SeverityNumber.ERROR),
    "critical": ("FATAL", SeverityNumber.FATAL),
}


def log_of(transition: Transition, culprit: SpanContext | None, resource: Resource) -> ReadableLogRecord:
    """One transition. `culprit`: the root span of a request that it is about, if there is one.

    The finding's own severity is an attribute. The record's is INFO when it is resolved.
    """
    report = transition.finding.report()
    text, number = OTEL_SEVERITIES[report.severity if transition.to == "firing" else "info"]
    record = LogRecord(
        timestamp=transition.at_ns,
        observed_timestamp=time.time_ns(),
        context=set_span_in_context(NonRecordingSpan(culprit)) if culprit is not None else None,
        severity_text=text,
        severity_number=number,
        event_name="kvscope.finding",
        body=report.explanation,
        attributes={
            "kvscope.finding.id": report.id,
            "kvscope.finding.code": report.code,
            "kvscope.finding.title": report.title,
            "kvscope.finding.state": transition.to,
            "kvscope.finding.severity": report.severity,
            "kvscope.finding.verdict": report.verdict,
            "kvscope.finding.since": report.since or "",
            "kvscope.finding.runbook": report.runbook,
            "kvscope.finding.do_now": report.do_now,
            "kvscope.finding.change": report.change,
            "kvscope.culprits.requests": report.culprits.requests[:MAX_LOGGED_CULPRITS],
            "kvscope.culprits.blocks": len(report.culprits.blocks),
            "kvscope.engine": report.engine,
        },
    )
    return ReadableLogRecord(record, resource, SCOPE)


OTEL_UNITS: Final = {"seconds": "s", "bytes": "By"}
"""By the last word of a name. Without one the unit is left out, so that no backend puts one into the name."""
Labels = tuple[tuple[str, str], ...]


def metrics_data(families: Iterable[Family], at_ns: int, resource: Resource) -> MetricsData:
    """All families, of one moment (wall ns)."""
    metrics = [metric for family in families for metric in _metrics(family, at_ns)]
    return MetricsData([ResourceMetrics(resource, [ScopeMetrics(SCOPE, metrics, "")], "")])


def points_in(data: MetricsData) -> int:
    """How many there are in it."""
    return sum(
        len(metric.data.data_points)
        for of_resource in data.resource_metrics
        for scope in of_resource.scope_metrics
        for metric in scope.metrics
    )


def _metrics(family: Family, at_ns: int) -> Iterable[Metric]:
    def metric(name: str, data: Gauge | Sum | Histogram) -> Metric:
        return Metric(name, family.documentation, OTEL_UNITS.get(family.name.rpartition("_")[2], ""), data)

    def point(sample: Sample) -> NumberDataPoint:
        return NumberDataPoint(dict(sample.labels), 0, at_ns, sample.value)

    if not family.samples:
        return
    if family.type == "counter":
        totals = [point(sample) for sample in family.samples if sample.name.endswith("_total")]
        yield metric(family.name, Sum(totals, AggregationTemporality.CUMULATIVE, is_monotonic=True))
    elif family.type == "histogram":
        yield metric(family.name, Histogram(_histograms(family, at_ns), AggregationTemporality.CUMULATIVE))
    else:
        by_name: dict[str, list[NumberDataPoint]] = {}
        for sample in family.samples:
            by_name.setdefault(sample.name, []).append(point(sample))
        for name, points in by_name.items():
            yield metric(name, Gauge(points))


def _histograms(family: Family, at_ns: int) -> list[HistogramDataPoint]:
    """Prometheus counts up to each bound, OTLP between two."""
    buckets: dict[Labels, list[tuple[float, int]]] = {}
    sums: dict[Labels, float] = {}
    for sample in family.samples:
        labels = tuple((name, value) for name, value in sample.labels.items() if name != "le")
        if sample.name.endswith("_bucket"):
            buckets.setdefault(labels, []).append((float(sample.labels["le"]), round(sample.value)))
        elif sample.name.endswith("_sum"):
            sums[labels] = sample.value
    points = []
    for labels, counts in buckets.items():
        ups = [0, *(count for _, count in counts)]
        between = [after - before for before, after in pairwise(ups)]
        bounds = [bound for bound, _ in counts[:-1]]
        points.append(
            HistogramDataPoint(
                dict(labels), 0, at_ns, ups[-1], sums.get(labels, 0.0), between, bounds, float("nan"), float("nan")
            )
        )
    return points


METRICS_EVERY_S: Final = 15.0
"""The usual scrape interval of Prometheus."""
MEASURE_WITHIN_S: Final = 30.0
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
        sending = Sending(config.pace, reasons, watch.supervisor)
        self._traces = ExportSender[_KeptRequest](
            "traces", exporters.traces, self._spans, sending, capacity=SPAN_EVENTS, batch=100
        )
        self._logs = ExportSender[ReadableLogRecord]("logs", exporters.logs, list, sending, capacity=LOGS, batch=500)
        self._metrics = ExportSender[MetricsData](
            "metrics", exporters.metrics, lambda data: data[0], sending, capacity=POINTS, batch=1
        )
        self._due_s = time.monotonic() + every_s
        self._measuring = SupervisedThread(
            "OTLP metrics", "delivery", self._measure, watch.supervisor, within_s=MEASURE_WITHIN_S
        )
        self._measuring.start()

    def follow(self, records: Iterable[Record]) -> None:
        """Note the events of requests, before the watch takes them and knows which have ended."""
        self.recorder.follow(records)

    def send(self, ended: Iterable[EndedRequest]) -> list[tuple[EndedRequest, SpanContext]]:
        """Queue the traces of ended requests that sampling keeps. Return these requests with their root spans."""
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
        self._measuring.stop()
        self._put_metrics()  # the last of them
        senders = (self._traces, self._logs, self._metrics)
        for sender in senders:
            sender.begin_to_close()
        until_s = time.monotonic() + CLOSE_S
        for sender in senders:
            sender.close(until_s)
        self._reasons.stop()

    def _measure(self) -> float:
        if time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + self._every_s
            self._put_metrics()
        return self._due_s - time.monotonic()

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


def _metrics_every_s() -> float:
    """By OpenTelemetry's own setting, in ms."""
    given = os.environ.get("OTEL_METRIC_EXPORT_INTERVAL", "")
    try:
        return float(given) / 1e3 if given else METRICS_EVERY_S
    except ValueError as error:
        raise BadEndpoint(f"OTEL_METRIC_EXPORT_INTERVAL is not a number of milliseconds: {error}") from error
