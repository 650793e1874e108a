"""The service's HTTP app: the questions as JSON, alerts, /metrics, runbooks, and the guard before all of it."""

from __future__ import annotations

import asyncio
import html
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit

import msgspec
from fastapi import FastAPI, Request, Response
from markdown_it import MarkdownIt
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse
from starlette.routing import Match, Route
from starlette.types import Lifespan, Receive, Scope, Send

from ..base import limits
from ..base.bounded_server import BoundedRequests, ServerLimits
from ..base.process_limits import files_of_service
from ..base.supervision import LATE_FACTOR, Supervisor
from ..detectors.registry import runbook_of
from ..outputs.alerting.alerting import Alerts, NoSuchThing
from ..outputs.alerting.message import AlertFigures, BadSilence
from ..outputs.prometheus import WatchCollector
from ..questions.fleet_schema import BusFigures
from ..questions.pipeline import Pipeline
from ..questions.schema import SCHEMA_VERSION, DiscoveryView, SourceChange, SourceView
from .guard import OPEN_PATHS, BrowserHeaders, Guard
from .memory_budget import MemoryBudgetView
from .query_routes import answer_error, describe_answers, serve_questions

logger = logging.getLogger(__name__)


class ConfigurationView(msgspec.Struct, frozen=True, kw_only=True):
    """How the configuration file was read last. No value of a setting is in it.

    loaded_at: when the settings in force were read. error: where a file that was read since is wrong, so that it
    changed nothing. restart_needed: keys with values that only a restart puts in force. reloads, failures: since then.
    """

    loaded_at: str
    error: str = ""
    restart_needed: list[str] = []
    reloads: int = 0
    failures: int = 0


class SilenceRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A silence to create."""

    matchers: list[str]
    seconds: float
    comment: str = ""


def no_alerts() -> Alerts:
    """Raise NoSuchThing: this service sends none."""
    raise NoSuchThing("this service sends no alerts: start `monitor serve` with --alert URL")


def serve_alerts(app: FastAPI, sent: Callable[[], Alerts]) -> None:
    """Add the routes. `sent` returns the alerts, or raises NoSuchThing where there are none."""
    answer_error(app, NoSuchThing, 404)
    answer_error(app, BadSilence, 400)

    @app.get("/api/alerts")
    async def all_alerts() -> Response:
        """Receivers, open alerts, silences, and the latest deliveries."""
        return await json_answer(sent().view)

    @app.post("/api/alerts/test")
    async def test(request: Request, receiver: str = "") -> Response:
        """Send a test to one receiver, or to all, and return their responses."""
        return _redirected(request, await json_answer(sent().test, receiver))

    @app.post("/api/alerts/deliveries/{number}/replay")
    async def replay(request: Request, number: int) -> Response:
        """Send a message of the delivery log again, with the same id."""
        return _redirected(request, await json_answer(sent().replay, number))

    @app.post("/api/alerts/silences")
    async def silence(request: Request) -> Response:
        """Silence what matches (`matchers`, such as code=leak.*) for `seconds`, and return the silence's number."""
        body = await request.body()
        try:
            if request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
                asked = _silence_of_form(parse_qs(body.decode()))
            else:
                asked = msgspec.json.decode(body, type=SilenceRequest)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadSilence(f"a silence is {{matchers: [NAME=PATTERN], seconds, comment}}: {error}") from error
        answer = await json_answer(sent().silence, asked.matchers, asked.seconds, asked.comment)
        return _redirected(request, answer, silenced=bytes(answer.body).decode())

    @app.post("/api/alerts/silences/{number}/end")
    async def end(request: Request, number: int) -> Response:
        """End a silence, by a button of the page."""
        return _redirected(request, await json_answer(sent().unsilence, number), silenced="")

    @app.delete("/api/alerts/silences/{number}")
    async def unsilence(number: int) -> Response:
        """End a silence."""
        return await json_answer(sent().unsilence, number)


def _silence_of_form(fields: dict[str, list[str]]) -> SilenceRequest:
    """Read a form of the page. Raises msgspec.ValidationError."""
    texts = {name: values[-1] for name, values in fields.items()} | {"matchers": fields.get("matchers", [])}
    return msgspec.convert(texts, SilenceRequest, strict=False)


def _redirected(request: Request, answer: Response, **shown: str) -> Response:
    """Return the answer. For a button of our own page, redirect to that page, which shows it. `shown`: further query
    parameters of the address. Empty ones are left out.
    """
    if "text/html" not in request.headers.get("accept", ""):
        return answer
    came_from = urlsplit(request.headers.get("referer", ""))
    if not came_from.path or came_from.netloc != request.headers.get("host"):
        return RedirectResponse("/alerts", 303)
    asked = [(name, value) for name, value in parse_qsl(came_from.query) if name not in shown]
    query = urlencode([*asked, *((name, value) for name, value in shown.items() if value)])
    return RedirectResponse(f"/{came_from.path.strip('/')}?{query}".rstrip("?"), 303)


async def json_answer(ask: Callable[..., Any], *args: Any) -> Response:
    """Call `ask` in a thread, since it may wait for a lock, and answer as JSON."""
    answer = await asyncio.to_thread(ask, *args)
    return Response(msgspec.json.encode(answer), media_type="application/json")


CHECK_THREADS_EVERY_S: Final = 1.0

SERVICE_LIMITS: Final = ServerLimits(
    body_bytes=limits.SERVICE_BODY_BYTES,
    bodies_bytes=limits.SERVICE_BODIES_BYTES,
    connections=limits.SERVICE_CONNECTIONS,
    requests=limits.SERVICE_REQUESTS,
    files_kept=files_of_service,
    websockets=limits.SERVICE_WEBSOCKETS,
    always=OPEN_PATHS,
)


class ServiceApp(FastAPI):
    """The app behind its guard.

    The guard is no middleware: the web app adds one of its own, which would come before it and read the bodies of
    requests that the guard rejects. `state.inline_scripts`: hashes of the inline scripts of pages that are mounted.
    """

    def protect(self, token: str, host: str, server_limits: ServerLimits = SERVICE_LIMITS) -> None:
        """Put the guard before the app. `server_limits`: those of the server, too."""
        self.state.inline_scripts = ()
        self.server_limits = server_limits
        guarded = Guard(BoundedRequests(super().__call__, server_limits), token, host)
        self._outermost = BrowserHeaders(guarded, lambda: self.state.inline_scripts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request that the guard admits."""
        await self._outermost(scope, receive, send)


def empty_app(supervisor: Supervisor, lifespan: Lifespan[FastAPI] | None = None) -> ServiceApp:
    """Return an app without routes but for the description of those that it will have.

    While it runs, it starts the threads of `supervisor` again that have ended: its own loop outlives them all.
    """

    @asynccontextmanager
    async def overseen(app: FastAPI) -> AsyncIterator[None]:
        overseeing = asyncio.create_task(_oversee(supervisor))
        try:
            if lifespan is None:
                yield
            else:
                async with lifespan(app):
                    yield
        finally:
            overseeing.cancel()

    return ServiceApp(
        title="kvscope",
        version=SCHEMA_VERSION,
        docs_url=None,
        redoc_url=None,
        openapi_url="/api/openapi.json",
        lifespan=overseen,
    )


async def _oversee(supervisor: Supervisor) -> None:
    while True:
        try:
            supervisor.check()
        except Exception:
            logger.exception("the threads of the service could not be checked, and are checked again")
        await asyncio.sleep(CHECK_THREADS_EVERY_S)


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
    app = empty_app(watch.supervisor)
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


RUNBOOK_MARKDOWN: Final = MarkdownIt("commonmark", {"html": False}).enable("table")
"""Plug-ins bring runbooks of their own: markup in them stays text."""
RUNBOOK_PAGE: Final = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>
  :root {{ color-scheme: light dark }}
  body {{ font: 1rem/1.5 system-ui, sans-serif; max-width: 48rem; margin: 2rem auto; padding: 0 1rem }}
  pre {{ overflow-x: auto }}
  td, th {{ text-align: left; vertical-align: top; padding: 0 1rem .5rem 0 }}
</style></head><body><main>{body}</main></body></html>
"""


def serve_last(app: FastAPI) -> None:
    """Add what comes after every other route of the API, and the schemas of all answers."""

    @app.get("/api/{path:path}")
    async def no_such_api(request: Request, path: str) -> Response:
        """Answer a wrong API path, or method, as JSON: the web app takes every path that is left."""
        for route in app.routes:
            matched, _ = route.matches(request.scope)
            if matched is Match.PARTIAL and isinstance(route, Route):
                allowed = ", ".join(sorted(route.methods or ()))
                return JSONResponse({"detail": f"ask /api/{path} with {allowed}"}, 405, headers={"allow": allowed})
        return JSONResponse({"detail": f"there is no /api/{path}: see /api/openapi.json"}, 404)

    @app.get("/docs/runbooks/{name}")
    async def runbook(request: Request, name: str) -> Response:
        """Return the runbook of a finding code: as a page for a browser, and else as it is written."""
        text = await asyncio.to_thread(runbook_of, name.removesuffix(".md"))
        if text is None:
            return PlainTextResponse(f"There is no runbook {name}.", 404)
        if "text/html" not in request.headers.get("accept", ""):
            return PlainTextResponse(text)
        title, body = html.escape(name.removesuffix(".md")), RUNBOOK_MARKDOWN.render(text)
        return HTMLResponse(RUNBOOK_PAGE.format(title=title, body=body), headers={"vary": "accept"})

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

        `threads` compares those that should run with those that do, and `failing` names those that ended or raised just
        now: they are started again, so that is no 503. Nor is `behind`, which names what does not reach the archive:
        a restart would not help. With a configuration file, `configuration` is how that was read last.
        With NATS, `bus` is how the connection is: the service works on without it.
        """
        read = configuration()
        state: dict[str, object] = {} if read is None else {"configuration": msgspec.to_builtins(read)}
        if (figures := bus()) is not None:
            state["bus"] = msgspec.to_builtins(figures)
        behind = sorted(each.worker for each in watch.supervisor.failures() if each.kind == "copy")
        return health_answer(watch.supervisor, ({"behind": behind} if behind else {}) | state)


def health_answer(supervisor: Supervisor, state: dict[str, object]) -> JSONResponse:
    """Return `state` with how the threads of the service are, as the answer of /healthz."""
    threads = supervisor.health()
    counts = {"threads": {"expected": threads.expected, "running": threads.running}}
    late = supervisor.late(LATE_FACTOR)
    if late:
        seconds = {worker: round(age_s, 1) for worker, age_s in late.items()}
        return JSONResponse(state | {"status": "late", "late": seconds} | counts, status_code=503)
    status: dict[str, object] = {"status": "ok"}
    if threads.failing:
        status = {"status": "failing", "failing": threads.failing}
    return JSONResponse(status | counts | state)


def serve_own_state(
    app: FastAPI,
    sources: Callable[[], list[SourceView]],
    memory: Callable[[], MemoryBudgetView],
    changes: Callable[[], list[SourceChange]],
    discoveries: Callable[[], list[DiscoveryView]],
) -> None:
    """Add the routes about the service itself."""

    def add(name: str, path: str, ask: Callable[[], object], text: str) -> None:
        async def answer() -> Response:
            return await json_answer(ask)

        app.add_api_route(path, answer, name=name, description=text)

    add("all_sources", "/api/sources", sources, "Return the status of each source.")
    text = "Return the sources that were added and removed while the service ran, the latest first."
    add("source_changes", "/api/source-changes", changes, text)
    text = "How each discovery is: the targets of its last list, and why it is blind."
    add("all_discoveries", "/api/discoveries", discoveries, text)
    text = "Return the memory budget of the service, and what was given up for it."
    add("memory_budget", "/api/memory-budget", memory, text)
