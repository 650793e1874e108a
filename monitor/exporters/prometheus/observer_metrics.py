"""Findings, the health of their inputs (the stream, its sources), and deliveries of notifications."""

from __future__ import annotations

from collections import Counter

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from kvscope.monitor.alerting.alert_schema import AlertFigures
from kvscope.monitor.events.kinds import Stage
from kvscope.monitor.exporters.prometheus.metric_families import counter, gauge
from kvscope.monitor.findings import Findings
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.ledger.pool_forecast import PoolForecast
from kvscope.monitor.schema import SourceView
from kvscope.monitor.supervision import Supervisor


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


class StreamFamilies:
    """The losses of an engine's stream, and whether the engine is there, being filled."""

    def __init__(self) -> None:
        self.lost = counter("stream_batches_lost", "Event batches lost for good, by the stage that lost them.", "stage")
        self.dropped = counter("stream_events_dropped", "Events dropped by the engine's own buffer.")
        self.exact = gauge(
            "ledger_exact",
            "1 while the ledger is exact. 0 from a loss of events until the engine's next complete audit, and while"
            " its reader has failed.",
        )
        self.last_received = gauge("engine_last_heard_timestamp_seconds", "Time of the engine's last event.")
        self.stopped = gauge("engine_stopped", "1 after the engine reported a clean shutdown.")

    def add(self, name: str, ledger: EngineLedger) -> None:
        """One engine's."""
        for stage in Stage:
            self.lost.add_metric((name, stage.name.lower()), ledger.lost_batches[stage])
        self.dropped.add_metric((name,), ledger.dropped_events)
        in_doubt = ledger.uncertain_since_ns or any(each.kind == "reader" for each in ledger.observer_failures)
        self.exact.add_metric((name,), 0 if in_doubt else 1)
        self.last_received.add_metric((name,), ledger.last_received_ns / 1e9)
        self.stopped.add_metric((name,), 1 if ledger.state.stopped_ns else 0)


class SourceFamilies:
    """The sources of the service, and their cost, being filled. These belong to no engine."""

    def __init__(self) -> None:
        self.in_step = GaugeMetricFamily(
            "kvscope_source_in_step", "1 while no batch of the source is missing.", labels=("source",)
        )
        self.ended = GaugeMetricFamily(
            "kvscope_source_ended",
            "1 after reading stopped with an error that a retry cannot fix.",
            labels=("source",),
        )
        self.lag = GaugeMetricFamily(
            "kvscope_source_lag_seconds",
            "The time from when the engine packed its last batch (by its clock) until kvscope received it (by its"
            " own clock).",
            labels=("source",),
        )
        self.bad = CounterMetricFamily(
            "kvscope_source_bad_frames", "Unreadable messages, or failed scrapes.", labels=("source",)
        )
        self.filled = CounterMetricFamily(
            "kvscope_source_batches_filled",
            "Batches requested again, by where the engine took them from.",
            labels=("source", "supplier"),
        )
        self.cpu = CounterMetricFamily(
            "kvscope_source_cpu_seconds", "CPU time spent on reading, the ledger and detectors.", labels=("source",)
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
        self.failing = GaugeMetricFamily(
            "kvscope_worker_failing",
            "1 for a failed reader, detector, delivery, history or copy (archive, remote write). No series while"
            " all work.",
            labels=("worker", "kind"),
        )
        self.failures = CounterMetricFamily(
            "kvscope_worker_failures", "Contained failures, by component.", labels=("worker",)
        )

    def add(self, supervisor: Supervisor) -> None:
        """All of them."""
        for failure in supervisor.failures():
            self.failing.add_metric((failure.worker, failure.kind), 1)
        for worker, times in supervisor.totals().items():
            self.failures.add_metric((worker,), times)


class AlertFamilies:
    """Deliveries of alerts, being filled. They have no series in a service that sends none."""

    def __init__(self) -> None:
        self.deliveries = CounterMetricFamily(
            "kvscope_alerts_deliveries",
            "Completed messages since the service started: delivered, given-up (rejected for good, or at the last"
            " try), damped (not sent because the alert flaps) or disabled (the receiver is gone).",
            labels=("receiver", "outcome"),
        )
        self.failed_tries = CounterMetricFamily(
            "kvscope_alerts_failed_tries", "Failed tries that are repeated.", labels=("receiver",)
        )
        self.pending = GaugeMetricFamily(
            "kvscope_alerts_pending", "Messages waiting for delivery.", labels=("receiver",)
        )
        self.oldest = GaugeMetricFamily(
            "kvscope_alerts_oldest_pending_seconds",
            "How long the oldest message has waited for delivery. 0 while none waits.",
            labels=("receiver",),
        )
        self.disabled = GaugeMetricFamily(
            "kvscope_alerts_receiver_disabled", "1 after a receiver answered that it is gone.", labels=("receiver",)
        )
        self.open = GaugeMetricFamily("kvscope_alerts_open", "Alerts sent as firing and not yet as resolved.")
        self.silences = GaugeMetricFamily("kvscope_alerts_silences", "Silences that hold.")

    def add(self, figures: AlertFigures) -> None:
        """All of them."""
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
