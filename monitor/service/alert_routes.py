"""The HTTP routes about alerts: receivers, deliveries and silences."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.responses import JSONResponse, RedirectResponse

from kvscope.monitor.alerting.alerting import Alerts, NoSuchThing
from kvscope.monitor.alerting.silences import BadSilence
from kvscope.monitor.json_names import encode_answer


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

    @app.exception_handler(NoSuchThing)
    async def no_such_thing(_request: Request, error: Exception) -> Response:
        return JSONResponse({"detail": str(error)}, 404)

    @app.exception_handler(BadSilence)
    async def bad_silence(_request: Request, error: Exception) -> Response:
        return JSONResponse({"detail": str(error)}, 400)

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
    return Response(encode_answer(answer), media_type="application/json")
