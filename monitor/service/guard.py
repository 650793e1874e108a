"""Access control for the service: a token, or this machine's own names, for HTTP and WebSocket alike."""

from __future__ import annotations

import hmac
from http.cookies import SimpleCookie
from typing import Final
from urllib.parse import parse_qs, urlsplit

from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE: Final = "kvscope_token"
OPEN_PATHS: Final = frozenset({"/healthz"})


class Guard:
    """Admits or rejects each HTTP request and WebSocket (pure ASGI: Starlette's own middleware sees no WebSocket).

    With a token, a client sends it as a bearer, as `?token=` (which sets a cookie, so that the page works), or in that
    cookie. Without one, the request must name this machine by one of its own names. A web page elsewhere then cannot
    reach the service by pointing its own name at 127.0.0.1.
    """

    def __init__(self, app: ASGIApp, token: str, host: str) -> None:
        self.app = app
        self.token = token
        self.hosts = {"localhost", "127.0.0.1", "::1", host.strip("[]").lower()} - {""}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or reject it without revealing what is behind."""
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
        """Whether a script of our own page sent the request: a browser names the script's origin."""
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
    """Return the name in a Host header, in lower case; empty if it holds none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
