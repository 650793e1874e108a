"""The HTTP side of the service: the query interface as JSON, /metrics, runbooks, and the guard before all of it."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.requests import cookie_parser
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvscope.monitor.alerting.alert_schema import AlertFigures
from kvscope.monitor.alerting.alerting import Alerts, NoSuchThing
from kvscope.monitor.alerting.alerts_page import alerts_page, no_alerts_page
from kvscope.monitor.alerting.silences import BadSilence
from kvscope.monitor.exporters.prometheus import WatchCollector
from kvscope.monitor.pipeline import Watch
from kvscope.monitor.query import BadQuestion, BadTime, NotKnown, Query
from kvscope.monitor.schema import Colouring, FindingState, SourceView

COOKIE = "kvscope_token"
OPEN_PATHS = frozenset({"/healthz"})
_MONITOR = Path(__file__).resolve().parents[1]
_INSTALLED = _MONITOR / "runbooks"  # a wheel carries docs/runbooks here
RUNBOOKS = _INSTALLED if _INSTALLED.is_dir() else _MONITOR.parent / "docs" / "runbooks"


def create_app(
    watch: Watch,
    sources: Callable[[], list[SourceView]],
    alerts: Alerts | None = None,
    collector: WatchCollector | None = None,
    *,
    token: str = "",
    host: str = "",
) -> FastAPI:
    """The app, its own routes first; whatever is mounted later comes after them."""
    app = FastAPI(title="kvscope", docs_url=None, redoc_url=None, openapi_url="/api/openapi.json")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector or WatchCollector(watch, sources, alerts.figures if alerts else AlertFigures))

    @app.exception_handler(NotKnown)
    async def not_known(_request: Request, error: Exception) -> Response:
        return JSONResponse({"detail": str(error)}, 404, headers={"x-kvscope": "not-known"})

    @app.exception_handler(BadQuestion)
    async def bad_question(_request: Request, error: Exception) -> Response:
        kind = "bad-time" if isinstance(error, BadTime) else "bad-question"
        return JSONResponse({"detail": str(error)}, 400, headers={"x-kvscope": kind})

    @app.get("/healthz")
    async def healthz() -> Response:
        """The service itself is up."""
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        """What Prometheus scrapes, with exemplars if it asks for OpenMetrics; made in a thread, so that no slow page
        can hold it up.
        """
        encode, media_type = choose_encoder(request.headers.get("accept", ""))
        page = await asyncio.to_thread(encode, registry)
        return Response(page, media_type=media_type)

    _serve_answers(app, watch)

    @app.get("/api/sources")
    async def all_sources() -> Response:
        """How each source of the service is."""
        return await _json(sources)

    _serve_alerts(app, alerts)

    @app.get("/api/{path:path}")
    async def no_such_api(path: str) -> Response:
        """The page takes every path that is left; an API call that is wrong must hear so."""
        return JSONResponse({"detail": f"there is no /api/{path}; see /api/openapi.json"}, 404)

    @app.get("/docs/runbooks/{name}")
    async def runbook(name: str) -> Response:
        """The page that tells all about a finding's code."""
        pages = await asyncio.to_thread(lambda: {page.name: page for page in RUNBOOKS.glob("*.md")})
        page = pages.get(name)
        if page is None:
            return PlainTextResponse(f"There is no runbook {name}.", 404)
        return PlainTextResponse(await asyncio.to_thread(page.read_text, encoding="utf-8"))

    app.add_middleware(Guard, token=token, host=host)
    return app


def _serve_answers(app: FastAPI, query: Query) -> None:
    """The questions of kvscope.monitor.query; times and positions are given as they are there."""

    @app.get("/api/engines")
    async def engines(at: str = "") -> Response:
        """Every engine at a glance."""
        return await _json(query.engines, at)

    @app.get("/api/past_engines")
    async def past_engines() -> Response:
        """Engines that only history knows, as each was last."""
        return await _json(query.past_engines)

    @app.get("/api/findings")
    async def findings(state: str = "", engine: str = "", since: str = "", until: str = "") -> Response:
        """Findings: ?state=pending, firing, suppressed or resolved; firing and resolved without."""
        if state not in ("", "pending", "firing", "suppressed", "resolved"):
            raise BadQuestion(f"state={state} is not pending, firing, suppressed or resolved")
        wanted: FindingState | None = state or None  # type: ignore[assignment]
        return await _json(query.find, wanted, engine, since, until)

    @app.get("/api/finding")
    async def finding(id: str) -> Response:
        """One finding, with what the pool was meanwhile."""
        return await _json(query.finding, id)

    @app.get("/api/alerting")
    async def alerting(finding: str) -> Response:
        """Who was told of a finding by its id, and how that went."""
        return await _json(query.alerting, finding)

    @app.get("/api/points")
    async def points(
        engine: str, seconds: float = 600.0, most: int = 600, since: str = "", until: str = ""
    ) -> Response:
        """The past: from `since`, or for `seconds`, to `until`."""
        return await _json(query.points, engine, seconds, max(1, min(most, 10_000)), since, until)

    @app.get("/api/requests")
    async def requests(engine: str, at: str = "") -> Response:
        """Requests that live or hold blocks, and those that ended of late."""
        return await _json(query.requests, engine, at)

    @app.get("/api/request")
    async def request(engine: str, id: str, at: str = "") -> Response:
        """One request, with its story."""
        return await _json(query.request, engine, id, at)

    @app.get("/api/block")
    async def block(engine: str, id: int, at: str = "") -> Response:
        """One block, why it is held, and its story."""
        return await _json(query.block, engine, id, at)

    @app.get("/api/block_map")
    async def block_map(engine: str, at: str = "") -> Response:
        """What every block is; `states` is base64."""
        return await _json(query.block_map, engine, at)

    @app.get("/api/block_colours")
    async def block_colours(engine: str, by: Colouring, at: str = "") -> Response:
        """Every block by one of its properties; `values` is base64."""
        return await _json(query.block_colours, engine, by, at)

    @app.get("/api/events")
    async def events(
        engine: str,
        since: str = "",
        until: str = "",
        around: str = "",
        most: int = 200,
        kinds: str = "",
        request: str = "",
        block: int | None = None,
    ) -> Response:
        """What happened, in order; ?kinds=allocated,preempted."""
        most = max(1, min(most, 10_000))
        named = [kind for kind in kinds.split(",") if kind]
        return await _json(query.events, engine, since, until, around, most, named, request, block)

    @app.get("/api/never_freed")
    async def never_freed(engine: str, since: str = "", until: str = "") -> Response:
        """What was handed out in a window and not free by its end."""
        return await _json(query.never_freed, engine, since, until)

    @app.get("/api/prefixes")
    async def prefixes(engine: str, at: str = "") -> Response:
        """The prefix cache as a forest, and what was evicted of late."""
        return await _json(query.prefixes, engine, at)

    @app.get("/api/explain")
    async def explain(engine: str, since: str = "", until: str = "") -> Response:
        """What happened in a window, in sentences."""
        return await _json(query.explain, engine, since, until)

    @app.get("/api/compare")
    async def compare(
        engine: str,
        since: str = "",
        until: str = "",
        other: str = "",
        other_since: str = "",
        other_until: str = "",
    ) -> Response:
        """What got better and what got worse in a window, held against the time before it, or against another window of
        this engine or of `other`; an hour each at most.
        """
        return await _json(query.compare, engine, since, until, other, other_since, other_until)

    @app.get("/api/memory")
    async def memory(engine: str) -> Response:
        """The bill of the device's memory."""
        return await _json(query.memory, engine)

    @app.get("/api/calculator")
    async def calculator(engine: str, prompt_tokens: int, max_tokens: int, concurrency: int = 1) -> Response:
        """What so many requests of that length ask of the pool, and how many of them fit."""
        return await _json(query.calculator, engine, prompt_tokens, max_tokens, concurrency)

    @app.get("/api/drop")
    async def drop(engine: str, at: str = "", window: float = 10.0) -> Response:
        """What made usage fall, or throughput vanish, in `window` seconds around the time `at`."""
        if not 0 < window <= 86_400:
            raise BadQuestion(f"window={window:g} is not a number of seconds from 0 to 86400")
        return await _json(query.drop, engine, at, window)

    @app.get("/api/span")
    async def span(engine: str) -> Response:
        """Which past can be asked about."""
        return await _json(query.span, engine)


class AskedSilence(msgspec.Struct, forbid_unknown_fields=True):
    """A silence as it is asked for."""

    matchers: list[str]
    seconds: float
    comment: str = ""


def _serve_alerts(app: FastAPI, alerts: Alerts | None) -> None:
    """What can be asked and done about alerts."""

    def sent() -> Alerts:
        if alerts is None:
            raise NoSuchThing("this service sends no alerts: start `monitor serve` with --alert URL")
        return alerts

    @app.exception_handler(NoSuchThing)
    async def no_such_thing(_request: Request, error: Exception) -> Response:
        return JSONResponse({"detail": str(error)}, 404)

    @app.exception_handler(BadSilence)
    async def bad_silence(_request: Request, error: Exception) -> Response:
        return JSONResponse({"detail": str(error)}, 400)

    @app.get("/alerts")
    async def page() -> Response:
        """The same for a person, with buttons."""
        try:
            return HTMLResponse(alerts_page(await asyncio.to_thread(sent().view)))
        except NoSuchThing as error:
            return HTMLResponse(no_alerts_page(str(error)))

    @app.get("/api/alerts")
    async def all_alerts() -> Response:
        """Receivers, open alerts, silences, and the latest deliveries."""
        return await _json(sent().view)

    @app.post("/api/alerts/test")
    async def test(request: Request, receiver: str = "") -> Response:
        """Send a test to one receiver, or to all; what each answered."""
        return _for(request, await _json(sent().test, receiver))

    @app.post("/api/alerts/deliveries/{number}/replay")
    async def replay(request: Request, number: int) -> Response:
        """Send a message of the delivery log again, with its id."""
        return _for(request, await _json(sent().replay, number))

    @app.post("/api/alerts/silences")
    async def silence(request: Request) -> Response:
        """Tell nobody of what matches (`matchers`, such as code=leak.*), for `seconds`; the silence's number."""
        body = await request.body()
        try:
            if request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
                asked = _silence_of_form(parse_qs(body.decode()))
            else:
                asked = msgspec.json.decode(body, type=AskedSilence)
        except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
            raise BadSilence(f"a silence is {{matchers: [NAME=PATTERN], seconds, comment}}: {error}") from error
        return _for(request, await _json(sent().silence, asked.matchers, asked.seconds, asked.comment))

    @app.delete("/api/alerts/silences/{number}")
    async def unsilence(number: int) -> Response:
        """End a silence."""
        return await _json(sent().unsilence, number)


def _silence_of_form(fields: dict[str, list[str]]) -> AskedSilence:
    """What a form of the page asks for. Raises msgspec.ValidationError."""
    texts = {name: values[-1] for name, values in fields.items()} | {"matchers": fields.get("matchers", [])}
    return msgspec.convert(texts, AskedSilence, strict=False)


def _for(request: Request, answer: Response) -> Response:
    """The answer; or, for who pressed a button on a page of ours, that page, where it shows."""
    if "text/html" not in request.headers.get("accept", ""):
        return answer
    came_from = urlsplit(request.headers.get("referer", ""))
    if not came_from.path or came_from.netloc != request.headers.get("host"):
        return RedirectResponse("/alerts", 303)
    return RedirectResponse(f"/{came_from.path.strip('/')}?{came_from.query}".rstrip("?"), 303)


async def _json(ask: Callable[..., Any], *args: Any) -> Response:
    """Ask in a thread, since the answer may wait for the ledger; answer as JSON."""
    answer = await asyncio.to_thread(ask, *args)
    return Response(msgspec.json.encode(answer), media_type="application/json")


class Guard:
    """Lets in who may, over HTTP and WebSocket alike (pure ASGI: Starlette's own middleware sees no WebSocket).

    With a token: who brings it as a bearer, as `?token=` (which sets a cookie, so that the page works), or in that
    cookie. Without one: who asked for this machine by a name of its own, so that no web page elsewhere can reach it
    by pointing a name of its own at 127.0.0.1.
    """

    def __init__(self, app: ASGIApp, token: str, host: str) -> None:
        self.app = app
        self.token = token
        self.hosts = {"localhost", "127.0.0.1", "::1", host.strip("[]").lower()} - {""}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass it on, or refuse it without a word about what is behind."""
        if scope["type"] not in ("http", "websocket") or scope["path"] in OPEN_PATHS:
            return await self.app(scope, receive, send)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if not self.token:
            if _host_name(headers.get("host", "")) in self.hosts and self._same_origin(headers):
                return await self.app(scope, receive, send)
            return await self._refuse(scope, receive, send, 403, "This name is not one that kvscope answers to.")
        asked = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if self._is_token(asked):
            return await self.app(scope, receive, self._with_cookie(send))
        cookie = cookie_parser(headers.get("cookie", "")).get(COOKIE, "")
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_token(bearer) or self._is_token(cookie):
            return await self.app(scope, receive, send)
        return await self._refuse(scope, receive, send, 401, "A token is needed: open this page with ?token=….")

    def _is_token(self, text: str) -> bool:
        return bool(text) and hmac.compare_digest(text.encode(), self.token.encode())

    def _same_origin(self, headers: dict[str, str]) -> bool:
        """A browser says where a script comes from; ours come from here."""
        origin = headers.get("origin", "")
        return not origin or origin.partition("://")[2] == headers.get("host", "")

    def _with_cookie(self, send: Send) -> Send:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                cookie = SimpleCookie({COOKIE: self.token})
                for attribute, value in (("httponly", True), ("samesite", "Strict"), ("path", "/")):
                    cookie[COOKIE][attribute] = value
                line = cookie[COOKIE].OutputString().encode()
                message["headers"] = [*message.get("headers", []), (b"set-cookie", line)]
            await send(message)

        return sending

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, status: int, why: str) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": why})
        else:
            await PlainTextResponse(why, status)(scope, receive, send)


def _host_name(host: str) -> str:
    """The name in a Host header, in lower case; an empty one if there is none in it."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
