"""What protects the service from other pages and machines: a token or this machine's own names, for HTTP and WebSocket
alike, sessions of browsers, and the headers by which a browser confines the pages.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from http.cookies import SimpleCookie
from typing import Final
from urllib.parse import parse_qsl, quote, urlencode

from starlette.requests import cookie_parser
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..base import limits
from ..base.bounded_server import refuse
from ..base.latest_entries import LatestEntries

CONTENT_POLICY: Final = (
    "default-src 'self'; script-src 'self'{scripts}; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:;"
    " font-src 'self' data:; connect-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self';"
    " frame-ancestors 'none'"
)
"""Plotly writes its styles into the page, and draws into images of its own. {scripts}: hashes of inline scripts."""
SAFETY_HEADERS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-resource-policy", b"same-origin"),
    # Not no-referrer: a browser then sends `Origin: null` with the forms of our own page.
    (b"referrer-policy", b"same-origin"),
)


class BrowserHeaders:
    """Adds the headers to every answer of `app`. `scripts`: the hashes of the page's inline scripts."""

    def __init__(self, app: ASGIApp, scripts: Callable[[], Sequence[str]]) -> None:
        self.app = app
        self.scripts = scripts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve it."""
        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        policy = CONTENT_POLICY.format(scripts="".join(f" {each}" for each in self.scripts()))
        added = [*SAFETY_HEADERS, (b"content-security-policy", policy.encode())]

        async def sending(message: Message) -> None:
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                message["headers"] = [*message.get("headers", []), *added]
            await send(message)

        return await self.app(scope, receive, sending)


class BrowserSessions:
    """Sessions that end after `seconds`. At most `most` are kept: one more ends the oldest.

    They are kept as hashes, in memory alone: a restart ends all of them.
    """

    def __init__(
        self,
        seconds: int = limits.SESSION_S,
        most: int = limits.SESSIONS,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seconds = seconds
        self._clock_s = clock_s
        self._end_s: LatestEntries[bytes, float] = LatestEntries(most)

    def begin(self) -> str:
        """Begin a session and return its value."""
        value = secrets.token_urlsafe(32)
        self._end_s[_session_key(value)] = self._clock_s() + self.seconds
        return value

    def left_s(self, value: str) -> float:
        """Return the seconds left of the session of that value, or 0 if it has none."""
        key = _session_key(value)
        left_s = self._end_s.get(key, 0.0) - self._clock_s()
        if left_s <= 0:
            self._end_s.pop(key, None)
        return max(0.0, left_s)


def _session_key(value: str) -> bytes:
    """Return a hash, so that a lookup takes no longer for a value that is nearly right."""
    return hashlib.sha256(value.encode("utf-8", "surrogateescape")).digest()


COOKIE: Final = "kvscope_session"
OPEN_PATHS: Final = frozenset({"/healthz"})
OWN_PAGE: Final = frozenset({"", "same-origin", "none"})
"""Sec-Fetch-Site of a request that our own page, the user, or a program other than a browser sent."""
DATA_PATHS: Final = ("/api/", "/_dash-")
"""Answers and the page's data: a link from another origin leads to pages, never to these."""
_HOST: Final = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::(\d{1,5}))?", re.IGNORECASE)
_ORIGIN: Final = re.compile(r"(https?)://([^/?#@\s]+)", re.IGNORECASE)


class Guard:
    """Admits or rejects each HTTP request and WebSocket (pure ASGI: Starlette's own middleware sees no WebSocket).

    With a token, a program sends it as a bearer. A browser opens a page with `?token=` once: the answer sets a cookie
    with a random session and leads to the same page without the token. Without a token, the request must name this
    machine by one of its own names, so that a web page elsewhere cannot reach the service by pointing a name of its own
    at 127.0.0.1. In both modes a browser's request must come from a page of this service, also one that only reads, for
    an answer may take a minute of work, and cookies are sent to every port of a host. From elsewhere it may only open a
    page, as a link in a chat does.
    """

    def __init__(self, app: ASGIApp, token: str, host: str) -> None:
        self.app = app
        self.token = token
        self.hosts = {"localhost", "127.0.0.1", "::1", host.strip("[]").lower()} - {""}
        self.sessions = BrowserSessions()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or reject it without revealing what is behind."""
        if scope["type"] not in ("http", "websocket") or scope["path"] in OPEN_PATHS:
            return await self.app(scope, receive, send)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if sum(name == b"host" for name, _ in scope["headers"]) > 1:
            return await refuse(scope, receive, send, 400, "The request has more than one Host header.")
        if not self._is_from_here(scope, headers):
            return await refuse(scope, receive, send, 403, "This request came from a page of another origin.")
        if not self.token:
            if _host_name(headers.get("host", "")) in self.hosts:
                return await self.app(scope, receive, send)
            return await refuse(scope, receive, send, 403, "kvscope does not serve this host name.")
        if self._is_token(_bearer(headers)):
            return await self.app(scope, receive, send)
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if self._is_token(next((value for name, value in query if name == "token"), "")):
            if _is_page_load(scope, headers):
                return await self._begin_session(scope, receive, send, headers)
            return await self.app(scope, receive, send)
        left_s = self.sessions.left_s(cookie_parser(headers.get("cookie", "")).get(_cookie_name(headers), ""))
        if left_s > 0:
            return await self.app(scope, _ending(scope, receive, send, left_s), send)
        return await refuse(scope, receive, send, 401, "A token is needed: open this page with ?token=….")

    def _is_token(self, text: str) -> bool:
        return bool(text) and hmac.compare_digest(text.encode(), self.token.encode())

    def _is_from_here(self, scope: Scope, headers: Mapping[str, str]) -> bool:
        """Whether no other page sent the request, unless to open a page of ours: browsers name where it comes from."""
        if headers.get("sec-fetch-site", "") not in OWN_PAGE and not _is_link(scope, headers):
            return False
        origin = headers.get("origin")
        if origin is None:
            return True
        match = _ORIGIN.fullmatch(origin)
        # Behind TLS that a proxy ends, the page's scheme is not the one that the request has here.
        schemes = {"http", "https"} if self.token else {"https" if scope["scheme"] in ("https", "wss") else "http"}
        return match is not None and match[1].lower() in schemes and match[2].lower() == headers.get("host", "").lower()

    async def _begin_session(self, scope: Scope, receive: Receive, send: Send, headers: Mapping[str, str]) -> None:
        """Set the cookie of a new session, and lead to the same page without the token."""
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        others = urlencode([(name, value) for name, value in query if name != "token"])
        path = "/" + quote(scope["path"].lstrip("/\\"))  # one slash: two would name another host
        name = _cookie_name(headers)
        cookie = SimpleCookie({name: self.sessions.begin()})
        attributes = {"httponly": True, "samesite": "Strict", "path": "/", "max-age": self.sessions.seconds}
        for attribute, value in attributes.items():
            cookie[name][attribute] = value
        if scope["scheme"] == "https":
            cookie[name]["secure"] = True
        answer = RedirectResponse(f"{path}?{others}".rstrip("?"), 303, headers={"cache-control": "no-store"})
        answer.raw_headers.append((b"set-cookie", cookie[name].OutputString().encode()))
        await answer(scope, receive, send)


def _is_link(scope: Scope, headers: Mapping[str, str]) -> bool:
    """Whether a browser opens a page in a tab of its own, and neither in a frame nor as a part of another page."""
    opens = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    is_safe = scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
    return opens and is_safe and not f"{scope['path']}/".startswith(DATA_PATHS)


def _bearer(headers: Mapping[str, str]) -> str:
    """Return the token of an Authorization header with the scheme Bearer, in any letter case (RFC 9110), or an empty
    string.
    """
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _is_page_load(scope: Scope, headers: Mapping[str, str]) -> bool:
    """Whether a browser loads a page, whose address it then shows and keeps."""
    return scope["type"] == "http" and scope["method"] in ("GET", "HEAD") and "text/html" in headers.get("accept", "")


def _cookie_name(headers: Mapping[str, str]) -> str:
    """Name the cookie by the port: a browser sends those of one host to all of its ports."""
    match = _HOST.fullmatch(headers.get("host", ""))
    return f"{COOKIE}_{match[2]}" if match and match[2] else COOKIE


def _host_name(host: str) -> str:
    """Return the name in a Host header, in lower case, or an empty string if it holds no name."""
    match = _HOST.fullmatch(host)
    return match[1].strip("[]").lower() if match else ""


def _ending(scope: Scope, receive: Receive, send: Send, left_s: float) -> Receive:
    """Receive for a WebSocket until its session ends, and close it then."""
    if scope["type"] != "websocket":
        return receive
    end_s = time.monotonic() + left_s

    async def receiving() -> Message:
        try:
            return await asyncio.wait_for(receive(), max(0.0, end_s - time.monotonic()))
        except TimeoutError:
            await send({"type": "websocket.close", "code": 1008, "reason": "The session has ended."})
            return {"type": "websocket.disconnect", "code": 1008}

    return receiving
