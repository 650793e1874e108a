"""`monitor serve` as a process: the service, its HTTP server, and how both end."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable

from fastapi import FastAPI

from kvscope.monitor.bounded_server import bounded_server
from kvscope.monitor.errors import BadTarget, CannotTell, ContractError
from kvscope.monitor.query import Query
from kvscope.monitor.rare_collections import collect_rarely
from kvscope.monitor.service.allocators import use_few_allocators
from kvscope.monitor.service.http_api import SERVICE_LIMITS, create_app
from kvscope.monitor.service.reload import LoadedConfig, Reloader
from kvscope.monitor.service.service import Service
from kvscope.monitor.service.service_log import log_to_stderr

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
        use_few_allocators()
        service = Service(config)
    except (BadTarget, CannotTell, ContractError) as error:
        raise ValueError(str(error)) from error
    reloader = Reloader(service, loaded, load) if load is not None else None
    app = _app_of(service, reloader)
    if mount is not None:
        mount(app, service.watch)
    if reloader is not None:
        signal.signal(signal.SIGHUP, lambda _number, _frame: reloader.request())

    def start() -> None:
        service.start()
        if reloader is not None:
            reloader.start()

    def stop() -> None:
        if reloader is not None:
            reloader.stop()
        service.stop()

    reading = ", ".join(reader.target for reader in service.readers)
    run_app(app, config.host, config.port, f"reading {reading}", start, stop)
    return 0


def run_app(
    app: FastAPI, host: str, port: int, doing: str, start: Callable[[], None], stop: Callable[[], None]
) -> None:
    """Serve until Ctrl-C or SIGTERM. `start` is called once the port is bound, `stop` at the end.

    `doing`: what the line that reports the address goes on with. Raises ValueError for a port that cannot be bound.
    """
    collect_rarely()
    log_to_stderr()
    server = bounded_server(
        app, SERVICE_LIMITS, log_config=None, log_level="warning", access_log=False, timeout_graceful_shutdown=2
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


def _app_of(service: Service, reloader: Reloader | None) -> FastAPI:
    return create_app(
        service.watch,
        service.sources,
        service.alerts,
        service.collector,
        service.memory,
        service.readers.changes,
        service.bus_figures,
        discoveries=service.discoveries.views,
        configuration=lambda: reloader.view() if reloader is not None else None,
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
