"""The service's HTTP app: the questions as JSON, alerts, /metrics, runbooks, and the guard before all of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec
from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import Lifespan, Receive, Scope, Send

from kvscope.monitor.alerting.alert_schema import AlertFigures
from kvscope.monitor.alerting.alerting import Alerts
from kvscope.monitor.bounded_server import BoundedRequests, ServerLimits
from kvscope.monitor.bus_figures import BusFigures
from kvscope.monitor.detectors.registry import runbook_of
from kvscope.monitor.events import limits
from kvscope.monitor.exporters.prometheus import WatchCollector
from kvscope.monitor.pipeline import Pipeline
from kvscope.monitor.schema import SCHEMA_VERSION, DiscoveryView, SourceChange, SourceView
from kvscope.monitor.service.alert_routes import json_answer, no_alerts, serve_alerts
from kvscope.monitor.service.browser_headers import BrowserHeaders
from kvscope.monitor.service.data_directory import COPIES
from kvscope.monitor.service.guard import OPEN_PATHS, Guard
from kvscope.monitor.service.memory_budget import MemoryBudgetView
from kvscope.monitor.service.query_routes import describe_answers, serve_questions
from kvscope.monitor.service.reload import ConfigurationView
from kvscope.monitor.supervision import LATE_FACTOR

SERVICE_LIMITS: Final = ServerLimits(
    body_bytes=limits.SERVICE_BODY_BYTES,
    connections=limits.SERVICE_CONNECTIONS,
    requests=limits.SERVICE_REQUESTS,
    websockets=limits.SERVICE_WEBSOCKETS,
    always=OPEN_PATHS,
)


class ServiceApp(FastAPI):
    """The app behind its guard.

    The guard is no middleware: the web app adds one of its own, which would come before it and read the bodies of
    requests that the guard rejects. `state.inline_scripts`: hashes of the inline scripts of pages that are mounted.
    """

    def protect(self, token: str, host: str) -> None:
        """Put the guard before the app."""
        self.state.inline_scripts = ()
        guarded = Guard(BoundedRequests(super().__call__, SERVICE_LIMITS), token, host)
        self._outermost = BrowserHeaders(guarded, lambda: self.state.inline_scripts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request that the guard admits."""
        await self._outermost(scope, receive, send)


def empty_app(lifespan: Lifespan[FastAPI] | None = None) -> ServiceApp:
    """Return an app without routes but for the description of those that it will have."""
    return ServiceApp(
        title="kvscope",
        version=SCHEMA_VERSION,
        docs_url=None,
        redoc_url=None,
        openapi_url="/api/openapi.json",
        lifespan=lifespan,
    )


def create_app(
    watch: Pipeline,
    sources: Callable[[], list[SourceView]],
    alerts: Alerts | None = None,
    collector: WatchCollector | None = None,
    memory: Callable[[], MemoryBudgetView] = MemoryBudgetView,
    changes: Callable[[], list[SourceChange]] = list,
    bus: Callable[[], BusFigures | None] = lambda: None,
    *,
    discoveries: Callable[[], list[DiscoveryView]] = list,
    configuration: Callable[[], ConfigurationView | None] = lambda: None,
    token: str = "",
    host: str = "",
) -> ServiceApp:
    """Make the app. Its own routes come first, those that are mounted later after them."""
    app = empty_app()
    serve_health(app, watch, configuration, bus)
    serve_metrics(app, collector or WatchCollector(watch, sources, alerts.figures if alerts else AlertFigures))
    serve_questions(app, watch)
    serve_own_state(app, sources, memory, changes, discoveries)
    serve_alerts(app, no_alerts if alerts is None else lambda: alerts)
    serve_last(app)
    app.protect(token, host)
    return app


def serve_metrics(app: FastAPI, collector: Collector) -> None:
    """Add the metrics page."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Return the metrics page, with exemplars if Prometheus asks for OpenMetrics.

        A thread renders it, so that no slow page delays it.
        """
        encode, media_type = choose_encoder(request.headers.get("accept", ""))
        page = await asyncio.to_thread(encode, registry)
        return Response(page, media_type=media_type)


def serve_last(app: FastAPI) -> None:
    """Add what comes after every other route of the API, and the schemas of all answers."""

    @app.get("/api/{path:path}")
    async def no_such_api(path: str) -> Response:
        """Answer a wrong API path as JSON: the web app takes every path that is left."""
        return JSONResponse({"detail": f"there is no /api/{path}: see /api/openapi.json"}, 404)

    @app.get("/docs/runbooks/{name}")
    async def runbook(name: str) -> Response:
        """Return the runbook of a finding code."""
        text = await asyncio.to_thread(runbook_of, name.removesuffix(".md"))
        return PlainTextResponse(f"There is no runbook {name}.", 404) if text is None else PlainTextResponse(text)

    describe_answers(app)


def serve_health(
    app: FastAPI,
    watch: Pipeline,
    configuration: Callable[[], ConfigurationView | None],
    bus: Callable[[], BusFigures | None],
) -> None:
    """Add the route by which an orchestrator asks whether the service works."""

    @app.get("/healthz")
    async def healthz() -> Response:
        """Whether the service is up and every loop of it turns: 503 with the loops that do not, if not.

        `behind` names what does not reach an archive or remote store: a restart would not help, so that is no 503. With
        a configuration file, `configuration` is how that was read last. With NATS, `bus` is how the connection is: the
        service works on without it.
        """
        read = configuration()
        state: dict[str, object] = {} if read is None else {"configuration": msgspec.to_builtins(read)}
        if (figures := bus()) is not None:
            state["bus"] = msgspec.to_builtins(figures)
        late = watch.supervisor.late(LATE_FACTOR)
        if late:
            seconds = {worker: round(age_s, 1) for worker, age_s in late.items()}
            return JSONResponse({"status": "late", "late": seconds} | state, status_code=503)
        behind = sorted(each.worker for each in watch.supervisor.failures() if each.worker in COPIES)
        return JSONResponse({"status": "ok"} | ({"behind": behind} if behind else {}) | state)


def serve_own_state(
    app: FastAPI,
    sources: Callable[[], list[SourceView]],
    memory: Callable[[], MemoryBudgetView],
    changes: Callable[[], list[SourceChange]],
    discoveries: Callable[[], list[DiscoveryView]],
) -> None:
    """Add the routes about the service itself."""

    @app.get("/api/sources")
    async def all_sources() -> Response:
        """Return the status of each source."""
        return await json_answer(sources)

    @app.get("/api/source-changes")
    async def source_changes() -> Response:
        """Return the sources that were added and removed while the service ran, the latest first."""
        return await json_answer(changes)

    @app.get("/api/discoveries")
    async def all_discoveries() -> Response:
        """How each discovery is: the targets of its last list, and why it is blind."""
        return await json_answer(discoveries)

    @app.get("/api/memory-budget")
    async def memory_budget() -> Response:
        """Return the memory budget of the service, and what was given up for it."""
        return await json_answer(memory)
