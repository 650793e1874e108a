"""The running parts of `monitor serve`: sources in, ledgers, findings, history, exporters and alerts out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..base.errors import BadTarget, NotKnown
from ..base.supervision import Supervisor
from ..base.text import install_hint
from ..contract.samples import Record, Sample
from ..detectors.detector import Settings
from ..fleet.bus_config import BusConfig
from ..history.findings_log import FindingsLog
from ..history.history import History, Recordings
from ..history.retention import Keep, Keeper
from ..outputs.alerting.alerting import Alerts, AlertsConfig
from ..outputs.alerting.message import AlertFigures
from ..outputs.otel.otel_exporter import OtelConfig, OtelOutlet
from ..outputs.prometheus import WatchCollector
from ..outputs.prometheus.service_metrics import Exemplars, SourceChangeFigures
from ..questions.fleet_schema import BusFigures
from ..questions.pipeline import Pipeline
from ..questions.schema import SourceView
from ..sources.discovery_config import DiscoveryConfig
from ..sources.prometheus_history import DEFAULT_PAST_S
from ..sources.recording import Recording
from ..sources.source import LOOK_BACK_S, Source, SourceError, SourceOptions
from ..sources.source_registry import open_source
from ..sources.targets import PROMETHEUS_PREFIX, TargetKind
from .allocators import HeapTrimmer
from .deliveries import Deliveries
from .discoveries import Discoveries
from .loop_watchdog import LoopWatchdog, Part
from .memory_budget import MemoryBudgetView, ServiceMemory, resident_bytes
from .resumption import Resumption
from .source_reader import SourceReader
from .source_set import SharedEngines, SourceSet, WantedSource
from .sql_question import SqlQuestion

if TYPE_CHECKING:
    from ..fleet.bus_link import BusLink
    from ..history.archiver import ArchiveFigures

HISTORY_WORKER: Final = "the history in the data directory"
OUTBOX_WORKER: Final = "the outbox in the data directory"
ARCHIVE_WORKER: Final = "the archive of the history"
CONFIGURED: Final = "the configuration"
"""The origin of sources that flags and the configuration file name."""
STREAM_IN_MEMORY_NS: Final = 15 * 60 * 1_000_000_000
"""How much of the event stream is in memory where a history has what is older, from which a past state takes 0.1 s."""
SCRAPE_TIMEOUT_S: Final = 4.5
"""vLLM's front end, on a busy machine, was seen to take 4 s. A page that hangs is reported within 5 s."""


@dataclass(frozen=True)
class ServiceConfig:
    """The settings of `monitor serve`. `events` are endpoints, `metrics` pages, `targets` sources of any kind."""

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
    archive: str = ""
    """Where closed segments of the history go, if anywhere: needs `data`."""
    recordings: tuple[Path, ...] = ()
    memory_budget: int | None = None
    """Bytes that the process may take, or None: the default bounds on each engine, however many there are."""
    discovery: tuple[DiscoveryConfig, ...] = ()
    """Discoveries that find further engines while the service runs."""
    look_back_s: float = DEFAULT_PAST_S
    """How much of what a Prometheus server stored is read at the start."""
    bus: BusConfig | None = None
    """Where NATS is, if findings and points go there."""


class Service:
    """The running parts, but for the HTTP server. Raises SourceError, ContractError, BadReceiver and HistoryInUse.

    parts: in the order in which they start. They stop in the opposite order.
    """

    def __init__(self, config: ServiceConfig) -> None:
        self.config = config
        self.keeper: Keeper | None = None
        self._findings_log: FindingsLog | None = None
        supervisor = Supervisor()
        history, recorded = _recorded(config.recordings)
        if config.data is not None:
            past = config.data / "history"
            self.keeper = _keeper(past, config, supervisor)
            self._findings_log = FindingsLog(past)
            self._findings_log.drop(config.keep.days)
            history = History(past)
        self.watch = Pipeline(config.settings, history, supervisor)
        if config.data is not None:
            self.watch.fleet.max_recent_ns = STREAM_IN_MEMORY_NS
        self.alerts: Alerts | None = None
        self.exemplars = Exemplars()
        if config.alerts.receivers:
            self.alerts = Alerts(config.alerts, supervisor=supervisor)
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
            self._archive_figures,
            self.bus_figures,
            lambda: SourceChangeFigures(self.readers.counts(), self.discoveries.views()),
        )
        self.shared: SharedEngines | None = None
        """The sources that other agents could read as well, if leases decide who does."""
        self._sql = SqlQuestion(config.data / "history" if config.data is not None else None)
        self.readers = SourceSet(self.watch, self._opened, self._reader_of, self._left)
        self.bus = self._bus_link() if config.bus is not None else None
        if config.bus is not None:  # agents of one host have names of their own
            self.watch.observer = f"kvscope@{config.bus.agent}"
        self.watch.read_stored_with(self._stored)
        for wanted in wanted_sources(config):
            (self.shared or self.readers).add(wanted, CONFIGURED)
        self.discoveries = Discoveries(self.shared or self.readers, self.readers.engines, self.watch, config.discovery)
        for engine, directory in recorded.items():
            recording = SourceReader(Recording(directory, engine), self.watch, after=self._deliveries.discard)
            self.readers.add_reader(recording, WantedSource(str(directory)), CONFIGURED)
        self.budget = ServiceMemory(self.watch, config.memory_budget) if config.memory_budget is not None else None
        if config.otlp is not None:  # it has threads from here on
            self._deliveries.otel = OtelOutlet(config.otlp, self.watch, self.collector.collect)
        self.parts: list[Part] = []
        self.parts += self._parts()

    @property
    def otel(self) -> OtelOutlet | None:
        """The OpenTelemetry exporter, if there is one."""
        return self._deliveries.otel

    def start(self) -> None:
        """Begin to read and to deliver."""
        for part in self.parts:
            part.start()

    def stop(self) -> None:
        """Stop everything."""
        for part in reversed(self.parts):
            part.stop()

    def _parts(self) -> Iterator[Part]:
        """Yield what runs: first what takes, then what it is given by."""
        if self.otel is not None:
            yield Part("OpenTelemetry", stop=self.otel.close)
        if self.alerts is not None:
            yield Part(OUTBOX_WORKER, self.alerts.start, self.alerts.close, self.alerts.problem)
        if (keeper := self.keeper) is not None:
            yield Part(HISTORY_WORKER, keeper.start, self._end_history, keeper.problem, "history")
            if keeper.archiver is not None:  # the keeper starts and stops it
                yield Part(ARCHIVE_WORKER, problem=keeper.archiver.problem, kind="copy")
        readers = Part("the sources", self.readers.start, self.readers.stop)
        bus = [Part("NATS", self.bus.start, self.bus.stop)] if self.bus is not None else []
        # With shared engines, the bus stops first, while what it hands over is still read.
        yield from [readers, *bus] if self.shared is not None else [*bus, readers]
        yield Part("SQL for hubs", stop=self._sql.close)
        yield Part("the discoveries", self.discoveries.start, self.discoveries.stop)
        yield Part("the heaps", problem=HeapTrimmer().check)
        if self.budget is not None:
            yield Part("the memory budget", problem=self.budget.check)
        watchdog = LoopWatchdog(self.watch, self.readers, self._deliver, parts=self.parts)
        yield Part("the watchdog", watchdog.start, watchdog.stop)

    def _end_history(self) -> None:
        assert self.keeper is not None
        self.keeper.stop(self.watch.fleet.engines.values())

    def apply(self, config: ServiceConfig) -> list[str]:
        """Change sources, thresholds and receivers to those of `config` while the service runs.

        Return the keys that need a restart after all: a service that sends no alerts cannot begin to. Raises
        BadReceiver, BadTarget, SourceError and ContractError.
        """
        with self.watch.locked():
            self.watch.settings = config.settings
        needs_restart = []
        if self.alerts is not None:
            self.alerts.replace_receivers(config.alerts.receivers)
        elif config.alerts.receivers:
            needs_restart.append("alert")
        wanted = wanted_sources(config)
        sources = self.shared or self.readers
        sources.remove([one for one in sources.wanted(CONFIGURED) if one not in wanted], CONFIGURED)
        for one in wanted:
            sources.add(one, CONFIGURED)
        self.discoveries.replace(config.discovery)
        return needs_restart

    def memory(self) -> MemoryBudgetView:
        """Return the memory budget and what was given up for it."""
        return self.budget.view() if self.budget is not None else MemoryBudgetView(resident_bytes=resident_bytes())

    def sources(self) -> list[SourceView]:
        """How each source is."""
        return self.readers.views()

    def _archive_figures(self) -> ArchiveFigures | None:
        archiver = self.keeper.archiver if self.keeper is not None else None
        return archiver.figures() if archiver is not None else None

    def _remember(self) -> None:
        """Recall the findings that an earlier run of the service reported, and the engines that it followed."""
        known = self.alerts.known() if self.alerts is not None else {}
        if self._findings_log is not None:
            self.watch.lifecycle.recall(self._findings_log.resolved())
            known = self._findings_log.open() | known
        self.watch.lifecycle.remember(known, time.time_ns() + round(self.config.alerts.look_again_s * 1e9))
        shares = self.config.bus is not None and self.config.bus.share  # its engines may be another agent's by now
        if self.alerts is not None and shares:
            self.alerts.hand_over({engine for engine, _, _ in self.alerts.known()})
        if self.config.data is not None and not shares:  # its own: what a history hands out must not be fed
            resumed = self._resumption.resume(History(self.config.data / "history"))
            if self.keeper is not None:
                self.keeper.add_points(self._resumption.unwritten)
            if self.alerts is not None:
                self.alerts.resume(resumed)

    def bus_figures(self) -> BusFigures | None:
        """How the connection to NATS is, if there is to be one."""
        return self.bus.figures() if self.bus is not None else None

    def _bus_link(self) -> BusLink:
        """Make the link to NATS. Raises ValueError."""
        assert self.config.bus is not None
        try:
            from ..fleet.bus_link import BusLink
        except ImportError as error:
            raise ValueError(f"--nats needs more than is installed: {install_hint('fleet')} ({error})") from error
        if self.config.bus.share:
            self.shared = SharedEngines(self.watch, self.readers)
        path = self.config.data / "bus.sqlite" if self.config.data is not None else None
        link = BusLink(self.config.bus, self.watch, path, self.shared, {"sql": self._sql.answer})
        self._deliveries.bus = link
        return link

    def _unkept(self, engine: str, epoch: int) -> int:
        """Return the first batch of an engine's epoch that no history has, or -1 if that is not known."""
        by_others = self.shared.unkept(engine, epoch) if self.shared is not None else -1
        return by_others if by_others >= 0 else self._resumption.unkept(engine, epoch)

    def _opened(self, wanted: WantedSource) -> Source:
        """Make a source that is read live. Raises BadTarget, SourceError and ContractError."""
        is_prometheus = wanted.target.startswith(PROMETHEUS_PREFIX)
        options = SourceOptions(
            timeout_s=SCRAPE_TIMEOUT_S,
            follow=True,
            known=self._resumption.next_of,
            unkept=self._unkept,
            kept_until_ns=self._resumption.kept_until_ns,
            look_back_s=self.config.look_back_s if is_prometheus else LOOK_BACK_S,
        )
        source = open_source(wanted.target, options, wanted.kind)
        if not source.grows:
            source.close()
            raise BadTarget(
                f"{wanted.target} is over: `monitor doctor {wanted.target}` reads it. A recording can be served alone,"
                " with --recording"
            )
        return source

    def _reader_of(self, source: Source) -> SourceReader:
        return SourceReader(source, self.watch, self.keeper, self._follow, self._deliver)

    def _stored(self, engine: str, since_ns: int, until_ns: int) -> list[Sample]:
        """Return what a source's server kept of an engine. Raises NotKnown where it does not answer."""
        try:
            for reader in self.readers:
                if engine in reader.engines() and (samples := reader.stored(engine, since_ns, until_ns)):
                    return samples
        except SourceError as error:
            raise NotKnown(str(error)) from error
        return []

    def _left(self, engines: list[str]) -> None:
        """Hand on what is new of engines that are about to leave the ledgers, and finish what is kept of them."""
        self._deliver()
        for engine in engines:
            self._resumption.drop(engine)
            if self.keeper is not None:
                self.keeper.end(engine, self.watch.fleet.engines.get(engine))
        if self.alerts is not None and self.shared is not None:
            self.alerts.hand_over(engines)
        elif self.alerts is not None:
            self.alerts.stop_watching(engines)

    def _follow(self, records: list[Record]) -> None:
        if self.otel is not None:
            self.otel.follow(records)

    def _deliver(self) -> None:
        self._resumption.watch_for_silence()
        self._deliveries.deliver()


def _keeper(past: Path, config: ServiceConfig, supervisor: Supervisor) -> Keeper:
    """Make what keeps the history in `past`, with its archive if there is to be one. Raises ValueError."""
    try:
        from ..history.archive_store import Archive
        from ..history.archiver import Archiver
    except ImportError as error:
        raise ValueError(f"--data needs more than is installed: {install_hint('history')} ({error})") from error
    archiver = None
    if config.archive:
        archiver = Archiver(past, Archive(config.archive, make=True), supervisor=supervisor)
    return Keeper(past, config.keep, archiver, supervisor)


def wanted_sources(config: ServiceConfig) -> list[WantedSource]:
    """Return every source that is read live."""
    events = [WantedSource(endpoint, TargetKind.STREAM) for endpoint in config.events]
    pages = [WantedSource(url, TargetKind.METRICS) for url in config.metrics]
    return [*events, *pages, *map(WantedSource, config.targets)]


def _recorded(directories: Sequence[Path]) -> tuple[History | None, dict[str, Path]]:
    """Return the history of the recordings, and each recording by the name that its engine has here. An empty name
    means its own.
    """
    if len(directories) < 2:
        return (History(directories[0]), {"": directories[0]}) if directories else (None, {})
    together = Recordings(directories)
    return together, together.named
