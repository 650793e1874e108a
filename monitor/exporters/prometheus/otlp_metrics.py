"""Items sent and lost by OpenTelemetry, and traces beside the buckets of /metrics."""

from __future__ import annotations

import threading
from bisect import bisect_left
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.samples import Exemplar

from kvscope.monitor.exporters.otel.otel_schema import OtlpFigures
from kvscope.monitor.exporters.prometheus.request_metrics import RequestFamilies
from kvscope.monitor.ledger.latency import LATENCY_BOUNDS_S, SERVED, TOKEN_BOUNDS_S, times_of
from kvscope.monitor.state.records import RequestState

_BOUNDS: Final = {"queue": LATENCY_BOUNDS_S, "first_token": LATENCY_BOUNDS_S, "per_token": TOKEN_BOUNDS_S}


class OtlpFamilies:
    """Items sent by OpenTelemetry, being filled. They have no series in a service that does not use it."""

    def __init__(self) -> None:
        self.sent = CounterMetricFamily(
            "kvscope_otlp_sent",
            "Items that reached the OTLP endpoint: traces of requests, logs of findings, snapshots of metrics.",
            labels=("signal",),
        )
        self.dropped = CounterMetricFamily(
            "kvscope_otlp_dropped",
            "Items lost on the way there: the queue was full, or two minutes of tries failed.",
            labels=("signal",),
        )
        self.waiting = GaugeMetricFamily(
            "kvscope_otlp_waiting",
            "Items waiting to be sent: events of requests, findings, points of metrics.",
            labels=("signal",),
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
