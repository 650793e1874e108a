"""The metrics of findings, of the sources and streams that they rest on, and of what the service sends on."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.samples import Exemplar

from ...base.supervision import Supervisor
from ...contract.kinds import Stage
from ...contract.samples import Sample
from ...detectors.findings import Findings
from ...ledger.engine_ledger import EngineLedger
from ...ledger.pool_forecast import PoolForecast
from ...ledger.records import RequestState
from ...ledger.tally import LATENCY_BOUNDS_S, SERVED, TOKEN_BOUNDS_S, times_of
from ...questions.fleet_schema import BusFigures
from ...questions.pipeline import Pipeline
from ...questions.schema import DiscoveryView, EngineView, SourceView
from ..alerting.message import AlertFigures
from ..gpu import Process, gpu_families, here
from .ledger_metrics import PoolFamilies, RequestFamilies, WorkFamilies, counter, gauge

if TYPE_CHECKING:
    from ...history.archiver import ArchiveFigures


def service_gauge(name: str, help: str, *labels: str) -> GaugeMetricFamily:
    """Make a family of current values that belong to no engine."""
    return GaugeMetricFamily(f"kvscope_{name}", help, labels=labels)


def service_counter(name: str, help: str, *labels: str) -> CounterMetricFamily:
    """Make a family of counts that belong to no engine. The page adds `_total` to the name."""
    return CounterMetricFamily(f"kvscope_{name}", help, labels=labels)


class FindingFamilies:
    """The findings, being filled."""

    def __init__(self) -> None:
        self.findings = gauge("findings", "Firing findings.", "code", "severity", "verdict")
        self.pool_full = gauge(
            "pool_full_seconds",
            "Seconds until the pool is full of blocks that do not return: the estimate, and the earliest and latest for"
            " 9 in 10. No series without such a finding.",
            "bound",
        )

    def add(self, findings: Findings) -> None:
        """All engines'."""
        forecasts: dict[str, PoolForecast] = {}
        for found in findings.firing():
            harm = found.judgement.harm
            if harm is not None and harm.forecast is not None:
                forecasts[found.judgement.engine] = harm.forecast
        for engine, forecast in forecasts.items():
            for bound in ("full_in_s", "earliest_s", "latest_s"):
                name = "estimate" if bound == "full_in_s" else bound.removesuffix("_s")
                self.pool_full.add_metric((engine, name), getattr(forecast, bound))
        counts = Counter(
            (found.judgement.engine, found.judgement.code, str(found.severity), str(found.judgement.verdict))
            for found in findings.firing()
        )
        for labels, count in counts.items():
            self.findings.add_metric(labels, count)


class StatusFamilies:
    """What each engine's clients get, being filled."""

    def __init__(self) -> None:
        self.status = gauge(
            "engine_status",
            "1, with the status as in the web app: serving, degraded, slow, stuck, idle, paused, silent, stopped or"
            " unknown.",
            "status",
        )

    def add(self, view: EngineView) -> None:
        """One engine's."""
        self.status.add_metric((view.engine, view.status), 1)


class StreamFamilies:
    """When an engine was last heard, and the losses of its stream, being filled."""

    def __init__(self) -> None:
        self.lost = counter("stream_batches_lost", "Event batches lost for good, by the stage that lost them.", "stage")
        self.dropped = counter("stream_events_dropped", "Events dropped by the engine's own buffer.")
        self.exact = gauge(
            "ledger_exact",
            "1 while the ledger is exact. 0 from a loss of events until the engine's next complete audit, and while"
            " its reader has failed.",
        )
        self.last_received = gauge(
            "engine_last_heard_timestamp_seconds", "Time of the engine's last event, or of the last sample of it."
        )
        self.stopped = gauge("engine_stopped", "1 after the engine reported a clean shutdown.")

    def add(self, name: str, ledger: EngineLedger) -> None:
        """One engine's."""
        for stage in Stage:
            self.lost.add_metric((name, stage.name.lower()), ledger.lost_batches[stage])
        self.dropped.add_metric((name,), ledger.dropped_events)
        in_doubt = ledger.uncertain_since_ns or any(each.kind == "reader" for each in ledger.observer_failures)
        self.exact.add_metric((name,), 0 if in_doubt else 1)
        self.stopped.add_metric((name,), 1 if ledger.state.stopped_ns else 0)
        self._add_presence(name, ledger)

    def add_sampled(self, name: str, ledger: EngineLedger, _sample: Sample) -> None:
        """One engine's, without a stream that could lose anything."""
        self._add_presence(name, ledger)

    def _add_presence(self, name: str, ledger: EngineLedger) -> None:
        if ledger.last_received_ns:
            self.last_received.add_metric((name,), ledger.last_received_ns / 1e9)


class SourceFamilies:
    """The sources of the service, and their cost, being filled. These belong to no engine."""

    def __init__(self) -> None:
        self.in_step = service_gauge("source_in_step", "1 while no batch of the source is missing.", "source")
        self.ended = service_gauge(
            "source_ended", "1 after reading stopped with an error that a retry cannot fix.", "source"
        )
        self.lag = service_gauge(
            "source_lag_seconds",
            "The time from when the engine packed its last batch (by its clock) until kvscope received it (by its"
            " own clock).",
            "source",
        )
        self.bad = service_counter("source_bad_frames", "Unreadable messages, or failed scrapes.", "source")
        self.filled = service_counter(
            "source_batches_filled",
            "Batches requested again, by where the engine took them from.",
            "source",
            "supplier",
        )
        self.cpu = service_counter(
            "source_cpu_seconds", "CPU time spent on reading, the ledger and detectors.", "source"
        )

    def add(self, source: SourceView) -> None:
        """One source."""
        self.in_step.add_metric((source.target,), int(source.in_step))
        self.ended.add_metric((source.target,), int(source.ended))
        if source.lag_s is not None:
            self.lag.add_metric((source.target,), source.lag_s)
        self.bad.add_metric((source.target,), source.bad_frames)
        for supplier, batches in source.filled_from.items():
            self.filled.add_metric((source.target, supplier), batches)
        self.cpu.add_metric((source.target,), source.cpu_s)


class WorkerFamilies:
    """How the service's readers, detectors, deliveries and history are, being filled. These belong to no engine."""

    def __init__(self) -> None:
        self.failing = service_gauge(
            "worker_failing",
            "1 for a failed reader, detector, delivery, history or copy (the archive). No series while all work.",
            "worker",
            "kind",
        )
        self.failures = service_counter("worker_failures", "Contained failures, by component.", "worker")
        self.threads = service_gauge(
            "threads",
            "Threads of kvscope itself: those that should run (expected) and those that do (running).",
            "state",
        )

    def add(self, supervisor: Supervisor) -> None:
        """Add a sample to each family."""
        for failure in supervisor.failures():
            self.failing.add_metric((failure.worker, failure.kind), 1)
        for worker, times in supervisor.totals().items():
            self.failures.add_metric((worker,), times)
        health = supervisor.health()
        if health.expected:
            self.threads.add_metric(("expected",), health.expected)
            self.threads.add_metric(("running",), health.running)


class AlertFamilies:
    """Deliveries of alerts, being filled. They have no series in a service that sends none."""

    def __init__(self) -> None:
        self.deliveries = service_counter(
            "alerts_deliveries",
            "Completed messages since the service started: delivered, given-up (rejected for good, or at the last"
            " try), damped (not sent because the alert flaps) or disabled (the receiver is gone).",
            "receiver",
            "outcome",
        )
        self.failed_tries = service_counter("alerts_failed_tries", "Failed tries that are repeated.", "receiver")
        self.pending = service_gauge("alerts_pending", "Messages waiting for delivery.", "receiver")
        self.oldest = service_gauge(
            "alerts_oldest_pending_seconds",
            "How long the oldest message has waited for delivery. 0 while none waits.",
            "receiver",
        )
        self.disabled = service_gauge(
            "alerts_receiver_disabled", "1 after a receiver answered that it is gone.", "receiver"
        )
        self.open = service_gauge("alerts_open", "Alerts sent as firing and not yet as resolved.")
        self.silences = service_gauge("alerts_silences", "Silences that hold.")

    def add(self, figures: AlertFigures) -> None:
        """Add a sample to each family."""
        for receiver in figures.receivers:
            for outcome, count in receiver.ended.items():
                self.deliveries.add_metric((receiver.name, outcome), count)
            self.failed_tries.add_metric((receiver.name,), receiver.failed_tries)
            self.pending.add_metric((receiver.name,), receiver.pending)
            self.oldest.add_metric((receiver.name,), receiver.oldest_pending_s)
            self.disabled.add_metric((receiver.name,), int(receiver.disabled))
        if figures.open is not None:
            self.open.add_metric((), figures.open)
        if figures.silences is not None:
            self.silences.add_metric((), figures.silences)


class ArchiveFamilies:
    """The archive, being filled, without series in a service that has none. These belong to no engine."""

    def __init__(self) -> None:
        self.archived = service_counter(
            "archive_segments", "History segments that reached the archive since the service started."
        )
        self.archived_bytes = service_counter("archive_bytes", "Bytes of those segments.")
        self.archive_failures = service_counter(
            "archive_failures", "Failed uploads to the archive, which are repeated."
        )
        self.archive_deleted = service_counter(
            "archive_segments_lost",
            "Segments that --keep-bytes deleted from the local disk before the archive had them.",
        )
        self.archive_waiting = service_gauge(
            "archive_waiting_segments", "Closed segments that the archive does not have yet."
        )
        self.archive_lag = service_gauge(
            "archive_lag_seconds", "How long the oldest of them has been closed. 0 without any."
        )

    def add(self, figures: ArchiveFigures) -> None:
        """All of it."""
        self.archived.add_metric((), figures.segments)
        self.archived_bytes.add_metric((), figures.bytes)
        self.archive_failures.add_metric((), figures.failures)
        self.archive_deleted.add_metric((), figures.deleted)
        self.archive_waiting.add_metric((), figures.waiting)
        self.archive_lag.add_metric((), figures.waiting_s)


class BusFamilies:
    """The metrics of the bus. They belong to no engine."""

    def __init__(self) -> None:
        self.connected = service_gauge("bus_connected", "1 while a NATS server answers.")
        self.away = service_gauge(
            "bus_away_seconds",
            "How long messages have waited because NATS or its stream accepts none. 0 while it accepts them.",
        )
        self.spooled = service_gauge("bus_spooled_messages", "Messages waiting to be sent.")
        self.spooled_bytes = service_gauge("bus_spooled_bytes", "Bytes of waiting messages.")
        self.published = service_counter("bus_published", "Messages acknowledged by a stream, by kind.", "kind")
        self.dropped = service_counter(
            "bus_dropped",
            "Messages given up, by kind: the spool was full, or another agent held the engine's lease meanwhile.",
            "kind",
        )
        self.leases = service_gauge("bus_leases", "Engines whose lease this agent holds.")
        self.taken_over = service_counter(
            "bus_taken_over", "Engines that this agent took over from one that did not renew its lease."
        )
        self.answered = service_counter(
            "bus_answered", "Questions of hubs that this agent answered, by outcome.", "outcome"
        )

    def add(self, figures: BusFigures) -> None:
        """Add a sample to each family."""
        self.connected.add_metric((), int(figures.connected))
        self.away.add_metric((), figures.away_s)
        self.spooled.add_metric((), figures.spooled)
        self.spooled_bytes.add_metric((), figures.spooled_bytes)
        for kind, count in figures.published.items():
            self.published.add_metric((kind,), count)
        for kind, count in figures.dropped.items():
            self.dropped.add_metric((kind,), count)
        self.leases.add_metric((), figures.leases)
        self.taken_over.add_metric((), figures.taken_over)
        for outcome, count in figures.answered.items():
            self.answered.add_metric((outcome,), count)


class OtlpFigures(NamedTuple):
    """One signal: traces, logs or metrics. Items are requests, findings and snapshots. `waiting` is their weight."""

    signal: str
    sent: int
    waiting: int
    dropped: int


_BOUNDS: Final = {"queue": LATENCY_BOUNDS_S, "first_token": LATENCY_BOUNDS_S, "per_token": TOKEN_BOUNDS_S}


class OtlpFamilies:
    """Items sent by OpenTelemetry, being filled. They have no series in a service that does not use it."""

    def __init__(self) -> None:
        self.sent = service_counter(
            "otlp_sent",
            "Items that reached the OTLP endpoint: traces of requests, logs of findings, snapshots of metrics.",
            "signal",
        )
        self.dropped = service_counter(
            "otlp_dropped", "Items lost on the way there: the queue was full, or two minutes of tries failed.", "signal"
        )
        self.waiting = service_gauge(
            "otlp_waiting", "Items waiting to be sent: events of requests, findings, points of metrics.", "signal"
        )

    def add(self, figures: OtlpFigures) -> None:
        """One signal."""
        self.sent.add_metric((figures.signal,), figures.sent)
        self.dropped.add_metric((figures.signal,), figures.dropped)
        self.waiting.add_metric((figures.signal,), figures.waiting)


class Exemplars:
    """The last request with a trace in each bucket of the requests' histograms. Thread-safe."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, str, str, str], Exemplar] = {}
        """By engine, what was measured, outcome and bucket."""
        self._lock = threading.Lock()

    def note(self, engine: str, record: RequestState, finished_s: float, trace_id: int, span_id: int) -> None:
        """Note a request that ended at that wall time and has a stored trace."""
        labels = {"trace_id": f"{trace_id:032x}", "span_id": f"{span_id:016x}"}
        outcome = "served" if record.status in SERVED else "failed"
        with self._lock:
            for what, ns in times_of(record).items():
                bounds, seconds = _BOUNDS[what], ns / 1e9
                index = bisect_left(bounds, seconds)
                bucket = str(bounds[index]) if index < len(bounds) else "+Inf"
                self._of[engine, what, outcome, bucket] = Exemplar(labels, seconds, finished_s)

    def add_to(self, families: RequestFamilies) -> None:
        """Put each beside its bucket, if something was counted in that."""
        with self._lock:
            known = dict(self._of)
        for what, family in (
            ("queue", families.queue),
            ("first_token", families.first_token),
            ("per_token", families.per_token),
        ):
            below = 0.0
            for place, sample in enumerate(family.samples):
                labels = sample.labels
                exemplar = known.get((labels["engine"], what, labels["outcome"], labels.get("le", "")))
                if exemplar is not None and sample.value > below:
                    family.samples[place] = sample._replace(exemplar=exemplar)
                below = sample.value if "le" in labels else 0.0


class SourceChangeFigures(NamedTuple):
    """Changes by kind, and the discoveries."""

    changes: Mapping[str, int] = {}
    discoveries: Sequence[DiscoveryView] = ()


class SourceChangeFamilies:
    """Added and removed sources, being filled. These belong to no engine."""

    def __init__(self) -> None:
        self.changes = service_counter("source_changes", "Sources added and removed while the service ran.", "change")
        self.targets = service_gauge("discovery_targets", "Targets in the last list of a discovery.", "discovery")
        self.blind = service_gauge(
            "discovery_blind",
            "1 while a discovery receives no list. The last list stays in force, and new engines are not watched.",
            "discovery",
        )

    def add(self, figures: SourceChangeFigures) -> None:
        """Add a sample to each family."""
        for change, count in figures.changes.items():
            self.changes.add_metric((change,), count)
        for view in figures.discoveries:
            self.targets.add_metric((view.name,), view.targets)
            self.blind.add_metric((view.name,), int(view.is_blind))


@dataclass(eq=False)
class WatchCollector:
    """A prometheus_client collector over everything that `watch` knows, the sources it is fed by, the alerts and the
    OpenTelemetry that are sent of it, and this process.
    """

    watch: Pipeline
    sources: Callable[[], Iterable[SourceView]] = tuple
    alerts: Callable[[], AlertFigures] = AlertFigures
    otlp: Callable[[], Iterable[OtlpFigures]] = tuple
    exemplars: Exemplars = field(default_factory=Exemplars)
    archive: Callable[[], ArchiveFigures | None] = lambda: None
    bus: Callable[[], BusFigures | None] = lambda: None
    source_changes: Callable[[], SourceChangeFigures] = SourceChangeFigures
    _process: ProcessCollector = field(init=False, default_factory=lambda: ProcessCollector(registry=None))

    def describe(self) -> list[Metric]:
        """Nothing beforehand: registering must not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Collect all metrics, those of engines as of one time."""
        requests, findings, statuses = RequestFamilies(), FindingFamilies(), StatusFamilies()
        of_engines = (PoolFamilies(), requests, WorkFamilies(), StreamFamilies())
        processes: list[Process | None] = []
        with self.watch.locked():
            for name, ledger in self.watch.fleet.engines.items():
                if ledger.has_stream:
                    processes.append(here(name, ledger.description.pid))
                    for families in of_engines:
                        families.add(name, ledger)
                else:
                    sample = ledger.samples[-1] if ledger.samples else Sample(name, "")
                    for families in of_engines:
                        families.add_sampled(name, ledger, sample)
            for view in self.watch.engines():
                statuses.add(view)
            findings.add(self.watch.lifecycle)
        of_service: tuple[tuple[Any, Iterable[Any]], ...] = (
            (SourceFamilies(), self.sources()),
            (WorkerFamilies(), [self.watch.supervisor]),
            (AlertFamilies(), [self.alerts()]),
            (OtlpFamilies(), self.otlp()),
            (ArchiveFamilies(), filter(None, [self.archive()])),
            (BusFamilies(), filter(None, [self.bus()])),
            (SourceChangeFamilies(), [self.source_changes()]),
        )
        for families, figures in of_service:
            for one in figures:
                families.add(one)
        self.exemplars.add_to(requests)
        for filled in (findings, statuses, *of_engines, *(families for families, _ in of_service)):
            yield from vars(filled).values()
        yield from self._process.collect()
        yield from gpu_families(filter(None, processes))
