"""Puts the page together, of one moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric

from kvscope.monitor.alerting.alert_schema import AlertFigures
from kvscope.monitor.bus_figures import BusFigures
from kvscope.monitor.exporters.gpu import Process, gpu_families, here
from kvscope.monitor.exporters.otel.otel_schema import OtlpFigures
from kvscope.monitor.exporters.prometheus.bus_metrics import BusFamilies
from kvscope.monitor.exporters.prometheus.observer_metrics import (
    AlertFamilies,
    FindingFamilies,
    SourceFamilies,
    StreamFamilies,
    WorkerFamilies,
)
from kvscope.monitor.exporters.prometheus.otlp_metrics import Exemplars, OtlpFamilies
from kvscope.monitor.exporters.prometheus.outgoing_metrics import OutgoingFamilies, OutgoingFigures
from kvscope.monitor.exporters.prometheus.pool_metrics import PoolFamilies
from kvscope.monitor.exporters.prometheus.request_metrics import RequestFamilies
from kvscope.monitor.exporters.prometheus.source_change_metrics import SourceChangeFamilies, SourceChangeFigures
from kvscope.monitor.exporters.prometheus.work_metrics import WorkFamilies
from kvscope.monitor.pipeline import Pipeline
from kvscope.monitor.schema import SourceView


def _none() -> Iterable[SourceView]:
    return ()


class WatchCollector:
    """A prometheus_client collector over everything that `watch` knows, the sources it is fed by, the alerts and the
    OpenTelemetry that are sent of it, and this process.
    """

    def __init__(
        self,
        watch: Pipeline,
        sources: Callable[[], Iterable[SourceView]] = _none,
        alerts: Callable[[], AlertFigures] = AlertFigures,
        otlp: Callable[[], Iterable[OtlpFigures]] = tuple,
        exemplars: Exemplars | None = None,
        outgoing: Callable[[], OutgoingFigures] = OutgoingFigures,
        bus: Callable[[], BusFigures | None] = lambda: None,
        source_changes: Callable[[], SourceChangeFigures] = SourceChangeFigures,
    ) -> None:
        self.watch = watch
        self._sources = sources
        self._alerts = alerts
        self._otlp = otlp
        self._outgoing = outgoing
        self._source_changes = source_changes
        self._exemplars = exemplars or Exemplars()
        self._bus = bus
        self._process = ProcessCollector(registry=None)

    def describe(self) -> list[Metric]:
        """Nothing beforehand: registering must not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Collect all metrics, those of engines as of one time."""
        requests = RequestFamilies()
        of_engines = (PoolFamilies(), requests, WorkFamilies(), StreamFamilies())
        findings, sources, alerts, otlp = FindingFamilies(), SourceFamilies(), AlertFamilies(), OtlpFamilies()
        processes: list[Process | None] = []
        with self.watch.locked():
            for name, ledger in self.watch.fleet.engines.items():
                if ledger.has_stream:
                    processes.append(here(name, ledger.description.pid))
                    for families in of_engines:
                        families.add(name, ledger)
            findings.add(self.watch.lifecycle)
        workers = WorkerFamilies()
        workers.add(self.watch.supervisor)
        for source in self._sources():
            sources.add(source)
        alerts.add(self._alerts())
        for figures in self._otlp():
            otlp.add(figures)
        outgoing = OutgoingFamilies()
        outgoing.add(self._outgoing())
        on_bus = BusFamilies()
        if (connection := self._bus()) is not None:
            on_bus.add(connection)
        changes = SourceChangeFamilies()
        changes.add(self._source_changes())
        self._exemplars.add_to(requests)
        for filled in (findings, *of_engines, sources, workers, alerts, otlp, outgoing, on_bus, changes):
            yield from vars(filled).values()
        yield from self._process.collect()
        yield from gpu_families(filter(None, processes))
