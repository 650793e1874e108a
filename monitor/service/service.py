"""`monitor serve`: wires the road in one process. Streams, pages and recordings in, ledgers, findings, history, outlets
and the web out.
"""

from __future__ import annotations

import gc
import logging
import signal
import socket
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Final

import uvicorn
from fastapi import FastAPI
from msgspec.structs import replace

from kvscope.monitor.alerting.alert_schema import AlertFigures
from kvscope.monitor.alerting.alerting import Alerts, AlertsConfig
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.events.kinds import Kind
from kvscope.monitor.events.samples import Record
from kvscope.monitor.events.wire import ContractError, Run, batch_of
from kvscope.monitor.exporters.otel.otel_exporter import OtelConfig, OtelOutlet
from kvscope.monitor.exporters.otel.trace_ids import callers_of
from kvscope.monitor.exporters.prometheus import WatchCollector
from kvscope.monitor.exporters.prometheus.otlp_metrics import Exemplars
from kvscope.monitor.findings import Transition
from kvscope.monitor.history.findings_log import FindingsLog
from kvscope.monitor.history.history import History
from kvscope.monitor.history.recordings import Recordings
from kvscope.monitor.history.retention import Keep, Keeper
from kvscope.monitor.ledger.engine_ledger import MAX_POINTS
from kvscope.monitor.pipeline import Pipeline
from kvscope.monitor.query import Query
from kvscope.monitor.schema import SourceView
from kvscope.monitor.service.http_api import create_app
from kvscope.monitor.sources.live_stream import LiveStream
from kvscope.monitor.sources.metrics_page import MetricsPage
from kvscope.monitor.sources.recording import Recording

logger = logging.getLogger(__name__)

SCRAPE_TIMEOUT_S: Final = 5.0
"""vLLM's front end, on a busy machine, was seen to take 4 s."""
RESUME_NS: Final = 600_000_000_000
"""An engine that was heard so shortly before the service began is taken up where it was left."""
COME_BACK_NS: Final = 10_000_000_000
"""It has so long to be heard again; after that it is silent."""
OBSERVE_NS: Final = 1_000_000_000
TAIL_NS: Final = 30_000_000_000
"""So much of what was heard then is gone through again, for what was recent to be recent still."""
POINTS_NS: Final = 3_600_000_000_000
"""So much comes with it of its points, and of what a page said."""
AT_ONCE: Final = 200
"""Frames of a recording that are read before others have a turn."""
COLLECT: Final = 50_000, 20, 10
"""When the garbage collector looks at what is young, older, and old. With its own thresholds it walks the columns of
all blocks of every state that is kept, a third of a second for a million, at each second moment that is asked for; and
hardly anything here is in a cycle.
"""
Mount = Callable[[FastAPI, Query], None]
"""Puts the page on the app; the page knows only the query interface, which is handed to it."""


@dataclass(frozen=True)
class ServiceConfig:
    """What `monitor serve` was asked for."""

    events: tuple[str, ...]
    metrics: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8765
    token: str = ""
    alerts: AlertsConfig = field(default_factory=AlertsConfig)
    otlp: OtelConfig | None = None
    settings: Settings = field(default_factory=Settings)
    data: Path | None = None
    keep: Keep = field(default_factory=Keep)
    recordings: tuple[Path, ...] = ()


class Reader(threading.Thread):
    """Reads one stream, or one metrics page, into the watch until told to stop; with a `keeper`, all of it is kept."""

    def __init__(
        self,
        source: LiveStream | MetricsPage,
        watch: Pipeline,
        keeper: Keeper | None,
        before: Callable[[list[Record]], None],
        after: Callable[[], None],
    ) -> None:
        self.target = source.events if isinstance(source, LiveStream) else source.url
        super().__init__(name=f"kvscope-read {self.target}", daemon=True)
        self.watch = watch
        self.error = ""
        self.cpu_s = 0.0
        self._keeper = keeper
        self._before = before
        self._after = after
        self._stopping = threading.Event()
        self._source = source

    def run(self) -> None:
        """Until stopped; an error that another try cannot mend ends it, and is said on every page."""
        try:
            while not self._stopping.is_set():
                records = self._take(self._source)
                self._before(records)
                self.watch.feed(records)
                self._after()
                self.cpu_s = time.thread_time()
        except ContractError as error:
            self.error = str(error)
            logger.error("%s: %s", self.target, error)
        finally:
            self._source.close()

    def _take(self, source: LiveStream | MetricsPage) -> list[Record]:
        """What has come; it is kept before anything is made of it."""
        if isinstance(source, MetricsPage):
            said = source.poll(0.1)
            if self._keeper is not None:
                self._keeper.note(said)
            return [*said]
        received = source.poll(0.1)
        if self._keeper is not None:
            self._keeper.keep(received, self.watch.fleet.engines.get(source.engine))
        return [each.frame for each in received]

    def stop(self) -> None:
        """End it, and wait until it has."""
        self._stopping.set()
        if self.ident is not None:
            self.join()

    def view(self) -> SourceView:
        """How it is."""
        source = self._source
        not_kept = self._keeper.error(source.engine) if self._keeper is not None else ""
        if isinstance(source, MetricsPage):
            error = source.last_failure if source.failing else not_kept
            return SourceView(
                self.target, source.engine, not source.failing, source.failed_scrapes, {}, error, cpu_s=self.cpu_s
            )
        return SourceView(
            self.target,
            source.engine,
            source.in_step,
            source.bad_frames,
            dict(source.filled_from),
            self.error or not_kept,
            ended=bool(self.error),
            lag_s=source.lag_s,
            cpu_s=self.cpu_s,
        )


class RecordingReader(threading.Thread):
    """Reads a recording into the watch, to its end. What was told of it then is told to nobody again. `engine` is the
    name that its engine has here; empty: its own.
    """

    def __init__(self, directory: Path, watch: Pipeline, engine: str = "") -> None:
        super().__init__(name=f"kvscope-read {directory}", daemon=True)
        self.target = str(directory)
        self.watch = watch
        self.error = ""
        self._engine = engine
        self._recording = Recording(directory)
        self._stopping = threading.Event()
        self._done = False

    def run(self) -> None:
        """To the end, or until stopped."""
        frames = iter(self._recording)
        try:
            while not self._stopping.is_set() and (some := list(islice(frames, AT_ONCE))):
                self.watch.feed([replace(frame, engine=self._engine) for frame in some] if self._engine else some)
                self.watch.take_transitions()
                self.watch.take_ended()
            self.watch.settle()
        except ContractError as error:
            self.error = str(error)
            logger.error("%s: %s", self.target, error)
        self._done = True

    def stop(self) -> None:
        """End it, and wait until it has."""
        self._stopping.set()
        if self.ident is not None:
            self.join()

    def view(self) -> SourceView:
        """How it is."""
        engine = self._engine or next(iter(self.watch.fleet.engines), "")
        lost = f"{self._recording.bytes_lost:,} bytes are cut off or damaged" if self._recording.bytes_lost else ""
        return SourceView(
            self.target, engine, self._done, self._recording.bad_frames, {}, self.error or lost, ended=bool(self.error)
        )


def _recorded(directories: Sequence[Path]) -> tuple[History | None, dict[str, Path]]:
    """What recordings have kept, and each of them by the name that its engine has here; empty: its own."""
    if len(directories) < 2:
        return (History(directories[0]), {"": directories[0]}) if directories else (None, {})
    together = Recordings(directories)
    return together, together.named


class Service:
    """The running parts, but for the HTTP server. Raises ContractError, BadTarget, BadReceiver and HistoryInUse."""

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
        self.otel: OtelOutlet | None = None
        self.exemplars = Exemplars()
        if config.alerts.receivers:
            self.alerts = Alerts(config.alerts)
            self.watch.find_notifications = self.alerts.about
        self._began_ns = self._observed_ns = time.time_ns()
        self._resumed: dict[str, int] = {}
        """Engines that were taken up and are still to be heard, and when they were last."""
        self._remember()
        self.collector = WatchCollector(
            self.watch,
            self.sources,
            self.alerts.figures if self.alerts is not None else AlertFigures,
            lambda: self.otel.figures() if self.otel is not None else (),
            self.exemplars,
        )
        sources: list[LiveStream | MetricsPage] = [LiveStream(each, known=self._next_of) for each in config.events]
        sources += [MetricsPage(url, SCRAPE_TIMEOUT_S) for url in config.metrics]
        self.readers: list[Reader | RecordingReader] = [
            Reader(source, self.watch, self.keeper, self._follow, self._deliver) for source in sources
        ]
        self.readers += [RecordingReader(directory, self.watch, engine) for engine, directory in recorded.items()]
        self._delivering = threading.Lock()
        self._undelivered: list[Transition] = []
        if config.otlp is not None:  # it has threads from here on
            self.otel = OtelOutlet(config.otlp, self.watch, self.collector.collect)

    def start(self) -> None:
        """Begin to read and to deliver."""
        if self.alerts is not None:
            self.alerts.start()
        if self.keeper is not None:
            self.keeper.start()
        for reader in self.readers:
            reader.start()

    def stop(self) -> None:
        """Stop everything."""
        for reader in self.readers:
            reader.stop()
        if self.keeper is not None:
            self.keeper.stop(self.watch.fleet.engines.values())
        if self.alerts is not None:
            self.alerts.close()
        if self.otel is not None:
            self.otel.close()

    def sources(self) -> list[SourceView]:
        """How each source is."""
        return [reader.view() for reader in self.readers]

    # ---------------------------------------------------------------- where the service before this one was

    def _remember(self) -> None:
        """What an earlier life of the service knew of findings, and of the engines that it heard until just now."""
        known = self.alerts.known() if self.alerts is not None else {}
        if self._findings_log is not None:
            self.watch.lifecycle.recall(self._findings_log.resolved())
            known = self._findings_log.open() | known
        self.watch.lifecycle.remember(known, time.time_ns() + round(self.config.alerts.look_again_s * 1e9))
        if self.config.data is not None:
            self._resume(History(self.config.data / "history"))  # its own: what a history hands out must not be fed

    def _resume(self, past: History) -> None:
        """Take engines up where they were left: it was told and counted then, and is not again."""
        for engine in past.engines():
            until_ns = past.last_ns(engine)
            if time.time_ns() - until_ns > RESUME_NS:
                continue
            records = chain(past.notes(engine, until_ns - POINTS_NS, until_ns), past.tail(engine, until_ns - TAIL_NS))
            self.watch.resume(records, past.points(engine, until_ns - POINTS_NS, until_ns, MAX_POINTS))
            if engine in self.watch.fleet.engines and self.watch.fleet.engines[engine].has_stream:
                self._resumed[engine] = self.watch.fleet.engines[engine].heard_ns

    def _watch_for_silence(self) -> None:
        """Time passes for an engine that was taken up and is not there any more: no stream knows that it should be."""
        now_ns = time.time_ns()
        if not self._resumed or now_ns - self._observed_ns < OBSERVE_NS:
            return
        self._observed_ns = now_ns
        for engine, heard_ns in list(self._resumed.items()):
            ledger = self.watch.fleet.engines[engine]
            if ledger.heard_ns > heard_ns:
                del self._resumed[engine]
            elif now_ns - self._began_ns > COME_BACK_NS:
                silence = Run(Kind.OBSERVED, 0, -1, [now_ns], [])
                self.watch.feed([batch_of(engine, ledger.epoch, [silence], wall_ns=now_ns)])

    def _next_of(self, engine: str, epoch: int) -> int:
        """The batch that comes next in that life of an engine, as far as it was heard before; -1 if it was not."""
        ledger = self.watch.fleet.engines.get(engine)
        return ledger.sequence + 1 if ledger is not None and ledger.ready and ledger.epoch == epoch else -1

    def _follow(self, records: list[Record]) -> None:
        if self.otel is not None:
            self.otel.follow(records)

    def _deliver(self) -> None:
        with self._delivering:
            self._watch_for_silence()
            transitions = self.watch.take_transitions()
            self._keep_findings(transitions)
            if self.alerts is not None:
                self._alert(self.alerts, [*self._undelivered, *transitions])
            for transition in transitions:
                judged = transition.finding.judgement
                level = logging.INFO if transition.finding.severity == "info" else logging.WARNING
                logger.log(level, "%s %s on %s: %s", transition.to, judged.code, judged.engine, judged.explanation)
            if self.otel is not None:
                self.otel.tell(transitions)
            ended = self.watch.take_ended()
            traced = self.otel.send(ended) if self.otel is not None else callers_of(ended)
            for (engine, record, offset), span in traced:
                at_s = (record.finished_ns + offset) / 1e9
                self.exemplars.note(engine, record, at_s, span.trace_id, span.span_id)

    def _keep_findings(self, transitions: list[Transition]) -> None:
        try:
            if self._findings_log is not None:
                self._findings_log.append(transitions)
        except OSError as error:
            logger.error("what is found is not kept: %s", error)

    def _alert(self, alerts: Alerts, transitions: list[Transition]) -> None:
        """Into the outbox, or kept for the next time if that cannot be written (a full disk, say)."""
        try:
            alerts.put(transitions)
            self._undelivered = []
        except sqlite3.Error as error:
            if transitions != self._undelivered:
                logger.error("the outbox of alerts cannot be written and is tried again: %s", error)
            self._undelivered = transitions


def serve(config: ServiceConfig, mount: Mount) -> int:
    """Run until Ctrl-C or SIGTERM; the exit code. Raises ValueError for a configuration that cannot be run."""
    if not is_loopback(config.host) and not config.token:
        raise ValueError(
            f"--host {config.host} can be reached from other machines: set a token (--token or KVSCOPE_TOKEN) that"
            " every page and API call must then carry, or listen on 127.0.0.1"
        )
    try:
        service = Service(config)
    except ContractError as error:
        raise ValueError(str(error)) from error
    app = create_app(
        service.watch, service.sources, service.alerts, service.collector, token=config.token, host=config.host
    )
    mount(app, service.watch)
    collect_rarely()
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2))
    for wanted in (signal.SIGINT, signal.SIGTERM):
        # The server takes both while it runs, and raises them again when it has ended: there is still work to do then.
        signal.signal(wanted, lambda _number, _frame: None)
    try:
        with _listening(config) as listener:
            # Whoever connects from now on is answered as soon as the server runs.
            port = listener.getsockname()[1]
            print(
                f"kvscope serves http://{config.host}:{port}, reading"
                f" {', '.join(reader.target for reader in service.readers)}",
                flush=True,
                file=sys.stderr,
            )
            service.start()
            server.run(sockets=[listener])
    finally:
        service.stop()
    return 0


def collect_rarely() -> None:
    """Of the process: the garbage collector leaves alone what is there now, and looks at the rest more rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT)


def _listening(config: ServiceConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family)
    except OSError as error:
        raise ValueError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror}. Name another with --host and --port"
            " (0 picks a free one)"
        ) from error


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    return host in ("localhost", "::1") or host.startswith("127.")
