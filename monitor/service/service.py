"""The running parts of `monitor serve`: sources in, ledgers, findings, history, exporters and alerts out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from kvscope.monitor.alerting.alert_schema import AlertFigures
from kvscope.monitor.alerting.alerting import Alerts, AlertsConfig
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.errors import BadTarget
from kvscope.monitor.events.samples import Record
from kvscope.monitor.exporters.otel.otel_exporter import OtelConfig, OtelOutlet
from kvscope.monitor.exporters.prometheus import WatchCollector
from kvscope.monitor.exporters.prometheus.otlp_metrics import Exemplars
from kvscope.monitor.history.findings_log import FindingsLog
from kvscope.monitor.history.history import History
from kvscope.monitor.history.recordings import Recordings
from kvscope.monitor.history.retention import Keep, Keeper
from kvscope.monitor.pipeline import Pipeline
from kvscope.monitor.schema import SourceView
from kvscope.monitor.service.data_directory import DataDirectoryCheck
from kvscope.monitor.service.deliveries import Deliveries
from kvscope.monitor.service.loop_watchdog import LoopWatchdog
from kvscope.monitor.service.memory_budget import MemoryBudgetView, ServiceMemory, resident_bytes
from kvscope.monitor.service.resumption import Resumption
from kvscope.monitor.service.source_reader import SourceReader
from kvscope.monitor.sources.prometheus_history import DEFAULT_PAST_S
from kvscope.monitor.sources.recording import Recording
from kvscope.monitor.sources.source import Source, SourceOptions
from kvscope.monitor.sources.source_registry import open_source
from kvscope.monitor.sources.targets import PROMETHEUS_PREFIX, TargetKind

SCRAPE_TIMEOUT_S: Final = 4.5
"""vLLM's front end, on a busy machine, was seen to take 4 s. A page that hangs is reported within 5 s."""


@dataclass(frozen=True)
class ServiceConfig:
    """What `monitor serve` was asked for. `events` are endpoints, `metrics` pages, `targets` sources of any kind."""

    events: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8765
    token: str = ""
    alerts: AlertsConfig = field(default_factory=AlertsConfig)
    otlp: OtelConfig | None = None
    settings: Settings = field(default_factory=Settings)
    data: Path | None = None
    keep: Keep = field(default_factory=Keep)
    recordings: tuple[Path, ...] = ()
    memory_budget: int | None = None
    """Bytes that the process may take, or None: the default bounds on each engine, however many there are."""
    look_back_s: float = DEFAULT_PAST_S
    """How much of what a Prometheus server stored is read at the start."""


class Service:
    """The running parts, but for the HTTP server. Raises SourceError, ContractError, BadReceiver and HistoryInUse."""

    def __init__(self, config: ServiceConfig) -> None:
        self.config = config
        self.keeper: Keeper | None = None
        self._findings_log: FindingsLog | None = None
        history, recorded = _recorded(config.recordings)
        if config.data is not None:
            past = config.data / "history"
            self.keeper = Keeper(past, config.keep)
            self._findings_log = FindingsLog(past)
            self._findings_log.drop(config.keep.days)
            history = History(past)
        self.watch = Pipeline(config.settings, history)
        self.alerts: Alerts | None = None
        self.exemplars = Exemplars()
        if config.alerts.receivers:
            self.alerts = Alerts(config.alerts)
            self.watch.find_notifications = self.alerts.about
            self.watch.find_alerts = self.alerts.state
        self._deliveries = Deliveries(self.watch, self.exemplars, self.alerts, self._findings_log)
        self._resumption = Resumption(self.watch)
        self._remember()
        self.collector = WatchCollector(
            self.watch,
            self.sources,
            self.alerts.figures if self.alerts is not None else AlertFigures,
            lambda: self.otel.figures() if self.otel is not None else (),
            self.exemplars,
        )
        self.readers = [
            SourceReader(source, self.watch, self.keeper, self._follow, self._deliver)
            for source in _sources_of(config, self._resumption)
        ]
        self.readers += [
            SourceReader(Recording(directory, engine), self.watch, after=self._deliveries.discard)
            for engine, directory in recorded.items()
        ]
        self.budget = ServiceMemory(self.watch, config.memory_budget) if config.memory_budget is not None else None
        data = DataDirectoryCheck(self.watch, self.keeper, self.alerts)
        checks = [data.check, *([self.budget.check] if self.budget is not None else [])]
        self._watchdog = LoopWatchdog(self.watch, self.readers, self._deliver, checks=checks)
        if config.otlp is not None:  # it has threads from here on
            self._deliveries.otel = OtelOutlet(config.otlp, self.watch, self.collector.collect)

    @property
    def otel(self) -> OtelOutlet | None:
        """The OpenTelemetry exporter, if there is one."""
        return self._deliveries.otel

    def start(self) -> None:
        """Begin to read and to deliver."""
        if self.alerts is not None:
            self.alerts.start()
        if self.keeper is not None:
            self.keeper.start()
        for reader in self.readers:
            reader.start()
        self._watchdog.start()

    def stop(self) -> None:
        """Stop everything."""
        self._watchdog.stop()
        for reader in self.readers:
            reader.stop()
        if self.keeper is not None:
            self.keeper.stop(self.watch.fleet.engines.values())
        if self.alerts is not None:
            self.alerts.close()
        if self.otel is not None:
            self.otel.close()

    def memory(self) -> MemoryBudgetView:
        """Return the memory budget and what was given up for it."""
        return self.budget.view() if self.budget is not None else MemoryBudgetView(resident_bytes=resident_bytes())

    def sources(self) -> list[SourceView]:
        """How each source is."""
        return [reader.view() for reader in self.readers]

    def _remember(self) -> None:
        """Recall the findings that an earlier run of the service reported, and the engines that it followed."""
        known = self.alerts.known() if self.alerts is not None else {}
        if self._findings_log is not None:
            self.watch.lifecycle.recall(self._findings_log.resolved())
            known = self._findings_log.open() | known
        self.watch.lifecycle.remember(known, time.time_ns() + round(self.config.alerts.look_again_s * 1e9))
        if self.config.data is not None:  # its own: what a history hands out must not be fed
            self._resumption.resume(History(self.config.data / "history"))

    def _follow(self, records: list[Record]) -> None:
        if self.otel is not None:
            self.otel.follow(records)

    def _deliver(self) -> None:
        self._resumption.watch_for_silence()
        self._deliveries.deliver()


def _sources_of(config: ServiceConfig, resumption: Resumption) -> Iterator[Source]:
    """Every source that is read live. Raises SourceError and ContractError."""
    options = SourceOptions(
        timeout_s=SCRAPE_TIMEOUT_S,
        follow=True,
        known=resumption.next_of,
        kept_until_ns=resumption.kept_until_ns,
    )
    for endpoint in config.events:
        yield open_source(endpoint, options, TargetKind.STREAM)
    for url in config.metrics:
        yield open_source(url, options, TargetKind.METRICS)
    for target in config.targets:
        is_prometheus = target.startswith(PROMETHEUS_PREFIX)
        source = open_source(target, replace(options, look_back_s=config.look_back_s) if is_prometheus else options)
        if not source.grows:
            source.close()
            raise BadTarget(
                f"{target} is over: `monitor doctor {target}` reads it. A recording can be served alone, with"
                " --recording"
            )
        yield source


def _recorded(directories: Sequence[Path]) -> tuple[History | None, dict[str, Path]]:
    """What recordings have kept, and each of them by the name that its engine has here; empty: its own."""
    if len(directories) < 2:
        return (History(directories[0]), {"": directories[0]}) if directories else (None, {})
    together = Recordings(directories)
    return together, together.named
