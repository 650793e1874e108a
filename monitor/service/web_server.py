"""`monitor serve` as a process: the service, its HTTP server, its log, reloads on SIGHUP, and how all of it ends."""

from __future__ import annotations

import logging
import signal
import socket
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import msgspec
from fastapi import FastAPI

from ..base.bounded_server import bounded_server
from ..base.errors import BadTarget, CannotTell, ContractError
from ..base.process_limits import collect_rarely, raise_file_limit, why_no_more_sources
from ..base.supervision import SupervisedThread
from ..base.text import counted, escaped, escaped_lines, timestamp
from ..questions.query import Query
from .http_api import ConfigurationView, ServiceApp, create_app
from .loop_watchdog import Part
from .service import Service, ServiceConfig

logger = logging.getLogger(__name__)


class LineFormatter(logging.Formatter):
    """Shows control characters and line breaks of a message as escapes, and indents the lines of a traceback.

    A line that begins without a space is a record of its own.
    """

    def __init__(self) -> None:
        super().__init__("%(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        """Format the line of a record."""
        return escaped(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        """Format a record with its traceback."""
        line, *rest = super().format(record).split("\n")
        return "\n".join([line, *(textwrap.indent(escaped_lines(each), "  ") for each in rest)])


def log_to_stderr() -> None:
    """Send the log of this process to stderr, from WARNING on."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


IDLE_RELOAD_S: Final = 60.0
"""Between looks without a request, which ends the wait at once."""
RELOAD_WITHIN_S: Final = 300.0
"""A reload waits for the readers that end, one after the other."""


class LoadedConfig(NamedTuple):
    """A configuration, and those of its settings that only a restart changes, by key."""

    config: ServiceConfig
    fixed: Mapping[str, object]


class Reloader:
    """Loads the configuration again on request, on a thread of its own, and applies it to `service`.

    load: reads file, variables and flags. Raises ValueError, in whose `where` is what /healthz may show of it.
    """

    def __init__(self, service: Service, started: LoadedConfig, load: Callable[[], LoadedConfig]) -> None:
        self._service = service
        self._first = started
        self._load = load
        self._is_asked = False
        self.view = ConfigurationView(loaded_at=timestamp(time.time_ns()) or "")
        """How the last reload went."""
        self._thread = SupervisedThread(
            "configuration reload", "discovery", self._turn, service.watch.supervisor, within_s=RELOAD_WITHIN_S
        )
        self.start = self._thread.start
        self.stop = self._thread.stop

    def request(self) -> None:
        """Ask for a reload. A signal handler may call it."""
        self._is_asked = True
        self._thread.wake()

    def _turn(self) -> float:
        if self._is_asked:
            self._is_asked = False
            try:
                self.reload()
            except Exception:
                logger.exception("the configuration was not reloaded in full")
                self._fail("see the log")
        return IDLE_RELOAD_S

    def reload(self) -> None:
        """Read the configuration and apply it. A broken one changes nothing."""
        try:
            loaded = self._load()
        except ValueError as error:
            logger.error("the configuration was not reloaded, and the settings before it stay in force: %s", error)
            self._fail(getattr(error, "where", "see the log"))
            return
        fixed = [key for key, value in loaded.fixed.items() if value != self._first.fixed[key]]
        restart_needed = sorted({*fixed, *self._service.apply(loaded.config)})
        if restart_needed:
            logger.warning(
                "the configuration was reloaded. These take effect after a restart: %s", ", ".join(restart_needed)
            )
        else:
            logger.warning("the configuration was reloaded")
        self.view = ConfigurationView(
            loaded_at=timestamp(time.time_ns()) or "",
            restart_needed=restart_needed,
            reloads=self.view.reloads + 1,
            failures=self.view.failures,
        )

    def _fail(self, where: str) -> None:
        self.view = msgspec.structs.replace(self.view, error=where, failures=self.view.failures + 1)


Mount = Callable[[FastAPI, Query], None]
"""Puts the page on the app. The page knows only the query interface, which it gets here."""


def require_token(host: str, token: str) -> None:
    """Refuse a service that other machines can reach without a token. Raises ValueError."""
    if not is_loopback(host) and not token:
        raise ValueError(
            f"--host {host} can be reached from other machines: set a token (--token or KVSCOPE_TOKEN) that"
            " every page and API call must then carry, or listen on 127.0.0.1"
        )


def serve(loaded: LoadedConfig, mount: Mount | None = None, load: Callable[[], LoadedConfig] | None = None) -> int:
    """Run until Ctrl-C or SIGTERM. Return the exit code. Raises ValueError for a configuration that cannot be run.

    mount: puts the page on the app (None: the API alone). load: reads the configuration again, on SIGHUP.
    """
    config = loaded.config
    require_token(config.host, config.token)
    try:
        raise_file_limit()
        service = Service(config)
    except (BadTarget, CannotTell, ContractError) as error:
        raise ValueError(str(error)) from error
    reloader = Reloader(service, loaded, load) if load is not None else None
    app = _app_of(service, reloader)
    if mount is not None:
        mount(app, service.watch)
    if reloader is not None:
        signal.signal(signal.SIGHUP, lambda _number, _frame: reloader.request())
        service.parts.append(Part("the reloader", reloader.start, reloader.stop))
    reading = ", ".join(reader.target for reader in service.readers)
    if refused := service.readers.refused():
        reading += f", and not {counted(len(refused), 'source')} more: {why_no_more_sources()}"
    run_app(app, config.host, config.port, f"reading {reading}", service.start, service.stop)
    return 0


def run_app(
    app: ServiceApp, host: str, port: int, doing: str, start: Callable[[], None], stop: Callable[[], None]
) -> None:
    """Serve until Ctrl-C or SIGTERM. `start` is called once the port is bound, `stop` at the end.

    `doing`: what the line that reports the address goes on with. Raises ValueError for a port that cannot be bound.
    """
    collect_rarely()
    log_to_stderr()
    server = bounded_server(
        app, app.server_limits, log_config=None, log_level="warning", access_log=False, timeout_graceful_shutdown=2
    )

    def end(_number: int, _frame: object) -> None:
        """End the server, if it does not run yet: once it runs it takes both signals itself, and raises them again when
        it has ended. It has work left to do then.
        """
        server.should_exit = True

    for wanted in (signal.SIGINT, signal.SIGTERM):
        signal.signal(wanted, end)
    try:
        with _listening(host, port) as listener:
            # Clients that connect from now on are answered as soon as the server runs.
            print(f"kvscope serves http://{host}:{listener.getsockname()[1]}, {doing}", flush=True, file=sys.stderr)
            start()
            server.run(sockets=[listener])
    finally:
        stop()


def _app_of(service: Service, reloader: Reloader | None) -> ServiceApp:
    return create_app(
        service.watch,
        service.sources,
        service.alerts,
        service.collector,
        service.memory,
        service.readers.changes,
        service.bus_figures,
        discoveries=service.discoveries.views,
        configuration=lambda: reloader.view if reloader is not None else None,
        token=service.config.token,
        host=service.config.host,
    )


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ValueError(
            f"cannot listen on {host}:{port}: {error.strerror}. Name another with --host and --port"
            " (0 picks a free one)"
        ) from error


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    return host in ("localhost", "::1") or host.startswith("127.")
