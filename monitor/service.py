"""`monitor serve`: wires the road in one process. Streams and pages in, ledgers, findings, outlets and the web out."""

from __future__ import annotations

import logging
import signal
import socket
import sqlite3
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import uvicorn
from fastapi import FastAPI

from monitor.api import create_app
from monitor.detectors.thresholds import Settings
from monitor.events.wire import ContractError
from monitor.findings import Transition
from monitor.ledger.ledger import Record
from monitor.outlets.alerts.alerts import Alerts, AlertsConfig
from monitor.outlets.alerts.views import AlertFigures
from monitor.outlets.otel.ids import callers_of
from monitor.outlets.otel.outlet import OtelConfig, OtelOutlet
from monitor.outlets.prometheus import WatchCollector
from monitor.outlets.prometheus.otlp import Exemplars
from monitor.query import Query
from monitor.sources.live import LiveStream
from monitor.sources.metrics_page import MetricsPage
from monitor.views import SourceView
from monitor.watch import Watch

logger = logging.getLogger(__name__)

SCRAPE_TIMEOUT_S: Final = 5.0
"""vLLM's front end, on a busy machine, was seen to take 4 s."""
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


class Reader(threading.Thread):
    """Reads one stream, or one metrics page, into the watch until told to stop."""

    def __init__(
        self,
        source: LiveStream | MetricsPage,
        watch: Watch,
        before: Callable[[list[Record]], None],
        after: Callable[[], None],
    ) -> None:
        self.target = source.events if isinstance(source, LiveStream) else source.url
        super().__init__(name=f"kvscope-read {self.target}", daemon=True)
        self.watch = watch
        self.error = ""
        self.cpu_s = 0.0
        self._before = before
        self._after = after
        self._stopping = threading.Event()
        self._source = source

    def run(self) -> None:
        """Until stopped; an error that another try cannot mend ends it, and is said on every page."""
        try:
            while not self._stopping.is_set():
                records: list[Record]
                if isinstance(self._source, LiveStream):
                    records = [received.frame for received in self._source.poll(0.1)]
                else:
                    records = [*self._source.poll(0.1)]
                self._before(records)
                self.watch.feed(records)
                self._after()
                self.cpu_s = time.thread_time()
        except ContractError as error:
            self.error = str(error)
            logger.error("%s: %s", self.target, error)
        finally:
            self._source.close()

    def stop(self) -> None:
        """End it, and wait until it has."""
        self._stopping.set()
        if self.ident is not None:
            self.join()

    def view(self) -> SourceView:
        """How it is."""
        source = self._source
        if isinstance(source, MetricsPage):
            error = source.last_failure if source.failing else ""
            return SourceView(
                self.target, source.engine, not source.failing, source.failed_scrapes, {}, error, cpu_s=self.cpu_s
            )
        return SourceView(
            self.target,
            source.engine,
            source.in_step,
            source.bad_frames,
            dict(source.filled_from),
            self.error,
            ended=bool(self.error),
            lag_s=source.lag_s,
            cpu_s=self.cpu_s,
        )


class Service:
    """The running parts, but for the HTTP server. Raises ContractError, BadTarget and BadReceiver."""

    def __init__(self, config: ServiceConfig) -> None:
        self.config = config
        self.watch = Watch(config.settings)
        self.alerts: Alerts | None = None
        self.otel: OtelOutlet | None = None
        self.exemplars = Exemplars()
        if config.alerts.receivers:
            self.alerts = Alerts(config.alerts)
            until_ns = time.time_ns() + round(config.alerts.look_again_s * 1e9)
            self.watch.findings.remember(self.alerts.known(), until_ns)
        self.collector = WatchCollector(
            self.watch,
            self.sources,
            self.alerts.figures if self.alerts is not None else AlertFigures,
            lambda: self.otel.figures() if self.otel is not None else (),
            self.exemplars,
        )
        sources: list[LiveStream | MetricsPage] = [LiveStream(endpoint) for endpoint in config.events]
        sources += [MetricsPage(url, SCRAPE_TIMEOUT_S) for url in config.metrics]
        self.readers = [Reader(source, self.watch, self._follow, self._deliver) for source in sources]
        self._delivering = threading.Lock()
        self._undelivered: list[Transition] = []
        if config.otlp is not None:  # it has threads from here on
            self.otel = OtelOutlet(config.otlp, self.watch, self.collector.collect)

    def start(self) -> None:
        """Begin to read and to deliver."""
        if self.alerts is not None:
            self.alerts.start()
        for reader in self.readers:
            reader.start()

    def stop(self) -> None:
        """Stop everything."""
        for reader in self.readers:
            reader.stop()
        if self.alerts is not None:
            self.alerts.close()
        if self.otel is not None:
            self.otel.close()

    def sources(self) -> list[SourceView]:
        """How each source is."""
        return [reader.view() for reader in self.readers]

    def _follow(self, records: list[Record]) -> None:
        if self.otel is not None:
            self.otel.follow(records)

    def _deliver(self) -> None:
        with self._delivering:
            transitions = self.watch.take_transitions()
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
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2))
    for wanted in (signal.SIGINT, signal.SIGTERM):
        # The server takes both while it runs, and raises them again when it has ended: there is still work to do then.
        signal.signal(wanted, lambda _number, _frame: None)
    try:
        with _listening(config) as listener:
            # Whoever connects from now on is answered as soon as the server runs.
            port = listener.getsockname()[1]
            print(
                f"kvscope serves http://{config.host}:{port}, reading {', '.join((*config.events, *config.metrics))}",
                flush=True, file=sys.stderr,
            )  # fmt: skip
            service.start()
            server.run(sockets=[listener])
    finally:
        service.stop()
    return 0


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
