"""`monitor hub` as a process: the connection to NATS, the app over it, and how both end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.responses import StreamingResponse

from ..base import limits
from ..base.errors import BadQuestion
from ..base.process_limits import raise_file_limit
from ..fleet.bus_config import BusConfig, bus_config
from ..fleet.bus_questions import ANSWER_PART_BYTES
from ..fleet.fleet_link import FleetLink
from ..outputs.alerting.alerting import AlertsConfig
from ..questions.query import Query
from ..questions.schema import SourceView
from .fleet_query import FleetQuery
from .http_api import (
    SERVICE_LIMITS,
    ServiceApp,
    empty_app,
    health_answer,
    json_answer,
    serve_alerts,
    serve_last,
    serve_metrics,
)
from .hub_alerts import HubAlerts
from .hub_findings import HubFindings
from .hub_metrics import HubCollector
from .query_routes import serve_questions
from .service_config import alerts_config, bad_receivers
from .settings_file import Effective
from .settings_table import HUB_KEYS
from .web_server import require_token, run_app

ANSWER_THREADS: Final = limits.HUB_QUESTIONS + 16
HUB_LIMITS: Final = replace(SERVICE_LIMITS, files_kept=lambda: limits.SERVICE_FILES)
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


def hub_config(effective: Effective) -> HubConfig:
    """Return the configuration that follows from the settings in force. Raises BadConfiguration."""
    problems = [
        effective.problem(key, "this is of `monitor agent`: a hub reads no engine and keeps nothing. Leave it out")
        for key, layer in effective.layers.items()
        if layer == "file" and key not in HUB_KEYS
    ]
    if not effective["nats"]:
        problems.append(effective.problem("nats", "a hub reads what agents publish: name a NATS server"))
    problems += [effective.problem("alert", message) for message in bad_receivers(effective)]
    effective.refuse(problems)
    try:
        bus = bus_config(effective.__getitem__, "hub")
    except ValueError as error:
        effective.refuse([effective.problem("nats", str(error))])
        raise
    return HubConfig(
        bus=bus,
        host=effective["host"],
        port=effective["port"],
        token=effective["token"],
        alerts=alerts_config(effective),
    )


class Hub:
    """The running parts, but for the HTTP server."""

    def __init__(self, config: HubConfig) -> None:
        self.config = config
        self.link = FleetLink(config.bus)
        self.findings = HubFindings(self.link)
        self.query = FleetQuery(self.link, self.findings)
        self.alerts = HubAlerts(config.alerts, self.link, self.findings)
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
    app = empty_app(hub.link.supervisor, _with_threads)

    @app.get("/healthz")
    async def healthz() -> Response:
        """Return how the hub is. Status 200 without NATS, too: a restart would not help."""
        return health_answer(hub.link.supervisor, hub.health())

    serve_metrics(app, HubCollector(hub.link, hub.query))
    serve_questions(app, hub.query)

    @app.get("/api/sources")
    async def all_sources() -> Response:
        """How the connection to NATS is."""
        return await json_answer(hub.sources)

    _serve_sql(app, hub.query)
    serve_alerts(app, hub.alerts.sending)
    serve_last(app)
    app.protect(hub.config.token, hub.config.host, HUB_LIMITS)
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


class SqlBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a question in SQL: the engine whose agent is asked, the query, and the window of its rows."""

    engine: str
    query: str
    since: str = ""
    until: str = ""


def _serve_sql(app: FastAPI, query: FleetQuery) -> None:
    _, components = msgspec.json.schema_components([SqlBody])
    body = {"required": True, "content": {"application/json": {"schema": components["SqlBody"]}}}

    @app.post("/api/sql", openapi_extra={"requestBody": body})
    async def sql(request: Request) -> Response:
        """Run a SQL query over the history that the agent of `engine` keeps, as `monitor sql` does. Return the names of
        its columns, its rows as objects, and what of the history is left out because it is damaged.
        """
        try:
            asked = msgspec.json.decode(await request.body(), type=SqlBody)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadQuestion(f'the body is to be {{"engine": NAME, "query": SQL}} in JSON: {error}') from error
        answer = await asyncio.to_thread(query.sql, asked.engine, asked.query, asked.since, asked.until)
        length = {"content-length": str(len(answer))}
        return StreamingResponse(_pieces(answer), media_type="application/json", headers=length)


async def _pieces(answer: bytearray) -> AsyncIterator[bytes]:
    """Yield an answer as fast as the client reads, so that no second copy of it waits."""
    for start in range(0, len(answer), ANSWER_PART_BYTES):
        yield bytes(answer[start : start + ANSWER_PART_BYTES])


def serve_hub(config: HubConfig, mount: Callable[[FastAPI, Query], None]) -> int:
    """Run until Ctrl-C or SIGTERM. Return the exit code. Raises ValueError for a configuration that cannot be run."""
    require_token(config.host, config.token)
    raise_file_limit()
    hub = Hub(config)
    app = hub_app(hub)
    mount(app, hub.query)
    doing = f"showing tenant {config.bus.tenant} of {', '.join(config.bus.urls)}"
    run_app(app, config.host, config.port, doing, hub.start, hub.stop)
    return 0
