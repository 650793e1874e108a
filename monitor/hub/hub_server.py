"""`monitor hub` as a process: the connection to NATS, the app over it, and how both end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from fastapi import FastAPI, Request, Response
from starlette.responses import JSONResponse

from kvscope.monitor.alerting.alerting import AlertsConfig
from kvscope.monitor.bus.bus_config import BusConfig
from kvscope.monitor.bus.fleet_link import FleetLink
from kvscope.monitor.errors import BadQuestion
from kvscope.monitor.events import limits
from kvscope.monitor.hub.fleet_query import FleetQuery
from kvscope.monitor.hub.hub_alerts import HubAlerts
from kvscope.monitor.hub.hub_metrics import HubCollector
from kvscope.monitor.query import Query
from kvscope.monitor.schema import SourceView
from kvscope.monitor.service.alert_routes import json_answer, serve_alerts
from kvscope.monitor.service.allocators import use_few_allocators
from kvscope.monitor.service.http_api import ServiceApp, empty_app, serve_last, serve_metrics
from kvscope.monitor.service.query_routes import serve_questions
from kvscope.monitor.service.web_server import require_token, run_app

ANSWER_THREADS: Final = limits.HUB_QUESTIONS + 16
READ_FIRST_S: Final = 30.0
"""A hub that has not caught up after this long reports it, and shows what it has."""


@dataclass(frozen=True)
class HubConfig:
    """The settings of `monitor hub`."""

    bus: BusConfig
    host: str = "127.0.0.1"
    port: int = 8765
    token: str = ""
    alerts: AlertsConfig = field(default_factory=AlertsConfig)


class Hub:
    """The running parts, but for the HTTP server."""

    def __init__(self, config: HubConfig) -> None:
        self.config = config
        self.link = FleetLink(config.bus)
        self.query = FleetQuery(self.link)
        self.alerts = HubAlerts(config.alerts, self.link)
        if config.alerts.receivers:
            self.link.companion = self.alerts
        self.query.find_alerts, self.query.find_notifications = self.alerts.state, self.alerts.about
        self._began_s = time.monotonic()

    def start(self) -> None:
        """Begin to follow the streams."""
        self.link.start()

    def stop(self) -> None:
        """Stop everything."""
        self.link.stop()
        self.alerts.close()
        self.query.close()

    def error(self) -> str:
        """Return why what is shown may be old or incomplete, empty if it is neither."""
        late = time.monotonic() - self._began_s > READ_FIRST_S
        if not self.link.is_connected:
            return f"no server of {', '.join(self.config.bus.urls)} answers: what is shown is as old as that"
        if not self.link.is_complete and late:
            return (
                f"the streams of tenant {self.config.bus.tenant} cannot be read: `monitor bus setup` makes them, and"
                " the credentials must allow what `monitor bus permissions --hub` prints"
            )
        return ""

    def health(self) -> dict[str, object]:
        """Return how the hub is: it is up, and what it shows is complete, or why not."""
        return {
            "status": "ok",
            "hub": self.config.bus.agent,
            "tenant": self.config.bus.tenant,
            "connected": self.link.is_connected,
            "complete": self.link.is_complete,
            "error": self.error(),
        }

    def sources(self) -> list[SourceView]:
        """Return what the hub reads: NATS."""
        with self.link.fold() as fold:
            unreadable = fold.unreadable_total
        return [
            SourceView(
                target=", ".join(self.config.bus.urls),
                engine="",
                in_step=self.link.is_connected,
                bad_frames=unreadable,
                filled_from={},
                error=self.error(),
                kind="nats",
            )
        ]


def hub_app(hub: Hub) -> ServiceApp:
    """Return the app: the questions as JSON, /metrics, runbooks, and the guard before all of it."""
    app = empty_app(_with_threads)

    @app.get("/healthz")
    async def healthz() -> Response:
        """Return how the hub is. Status 200 without NATS, too: a restart would not help."""
        return JSONResponse(hub.health())

    serve_metrics(app, HubCollector(hub.link, hub.query))
    serve_questions(app, hub.query)

    @app.get("/api/sources")
    async def all_sources() -> Response:
        """How the connection to NATS is."""
        return await json_answer(hub.sources)

    _serve_sql(app, hub.query)
    serve_alerts(app, hub.alerts.sending)
    serve_last(app)
    app.protect(hub.config.token, hub.config.host)
    return app


@asynccontextmanager
async def _with_threads(_app: FastAPI) -> AsyncIterator[None]:
    """Answer from enough threads: most of them wait for agents, and one that hangs must not hold up the page."""
    threads = ThreadPoolExecutor(ANSWER_THREADS, thread_name_prefix="kvscope-hub")
    asyncio.get_running_loop().set_default_executor(threads)
    try:
        yield
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def _serve_sql(app: FastAPI, query: FleetQuery) -> None:
    @app.get("/api/sql")
    async def sql(request: Request) -> Response:
        """Return the rows of a SQL query over the history that the agent of `engine` keeps, as `monitor sql` reads
        it.
        """
        given = request.query_params
        if not given.get("engine") or not given.get("query"):
            raise BadQuestion("give engine=NAME and query=SQL")
        rows = await asyncio.to_thread(
            query.sql, given["engine"], given["query"], given.get("since", ""), given.get("until", "")
        )
        return Response(rows, media_type="application/json")


def serve_hub(config: HubConfig, mount: Callable[[FastAPI, Query], None]) -> int:
    """Run until Ctrl-C or SIGTERM. Return the exit code. Raises ValueError for a configuration that cannot be run."""
    require_token(config.host, config.token)
    use_few_allocators()
    hub = Hub(config)
    app = hub_app(hub)
    mount(app, hub.query)
    doing = f"showing tenant {config.bus.tenant} of {', '.join(config.bus.urls)}"
    run_app(app, config.host, config.port, doing, hub.start, hub.stop)
    return 0
