"""An HTTP server whose requests end: bounds on headers, bodies, connections and WebSockets.

uvicorn waits for ever for the rest of a header or of a body, takes them at any length, and accepts connections until
the process has no file descriptors left. Here every request has to arrive whole within a time and a length. When there
are as many connections as the limit allows, the one that has waited longest for its client is closed for a new one, so
that a health check is answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import uvicorn
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from . import limits
from .process_limits import allowed_files

TOO_LONG_HEADER: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
)


@dataclass(frozen=True)
class ServerLimits:
    """Bounds of one server. `always`: paths that are answered also beyond the limit of requests.

    body_bytes: of one body. bodies_bytes: of all bodies that are being received. files_kept: descriptors that the
    process needs beside its connections.
    """

    body_bytes: int
    bodies_bytes: int
    connections: int
    requests: int
    files_kept: Callable[[], int]
    websockets: int = 0
    always: frozenset[str] = frozenset()

    def here(self) -> ServerLimits:
        """Return the limits that the process's file descriptors allow. Requests and WebSockets keep their share of the
        connections, so that some are left for others.
        """
        connections = max(1, min(self.connections, allowed_files() - self.files_kept()))
        return replace(
            self,
            connections=connections,
            requests=max(1, self.requests * connections // self.connections),
            websockets=self.websockets * connections // self.connections,
        )


class BoundedConfig(uvicorn.Config):
    """The configuration of a uvicorn server with `server_limits`."""

    def __init__(self, app: ASGIApp, server_limits: ServerLimits, **settings: Any) -> None:
        super().__init__(app, http=BoundedConnection, ws_max_size=server_limits.body_bytes, **settings)
        self.server_limits = server_limits.here()


class BoundedConnection(HttpToolsProtocol):
    """A connection whose requests arrive whole within limits.HEADER_S and limits.BODY_S, or that is closed."""

    _timer: asyncio.TimerHandle | None = None
    _waits_for_body = False
    _header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, in place of the one that has waited longest if there are too many."""
        super().connection_made(transport)
        assert isinstance(self.config, BoundedConfig)
        if len(self.connections) > self.config.server_limits.connections:
            waiting = [each for each in self.connections if isinstance(each, BoundedConnection) and each.is_waiting]
            oldest = min(waiting, key=lambda each: each.began, default=self)
            oldest.transport.abort()
        self.began = self.loop.time()
        self._expect(limits.HEADER_S)

    @property
    def is_waiting(self) -> bool:
        """Whether the client has not sent the whole of a request."""
        return hasattr(self, "began") and (self.cycle is None or self.cycle.response_complete or self.cycle.more_body)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._expect(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on, and close the connection if a header is too long."""
        super().data_received(data)
        cycle = self.cycle
        if self not in self.connections or self.transport.is_closing():  # a WebSocket has taken it over, or it ends
            self._expect(None)
        elif cycle is None or cycle.response_complete:
            self._header_bytes += len(data)
            if self._header_bytes > limits.HEADER_BYTES:
                self.transport.write(TOO_LONG_HEADER)
                self.transport.close()
            elif self._timer is None:
                self._expect(limits.HEADER_S)
        elif not cycle.more_body:
            self._expect(None)
            self._header_bytes, self._waits_for_body = 0, False
        elif not self._waits_for_body:
            self._expect(limits.BODY_S)
            self._header_bytes, self._waits_for_body = 0, True

    def _expect(self, seconds: float | None) -> None:
        """Close the connection after so many seconds, or not at all."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)


class BoundedRequests:
    """Reads the body of each request up to a bound before the app sees it, and bounds what the app does at once."""

    def __init__(self, app: ASGIApp, server_limits: ServerLimits) -> None:
        self.app = app
        self.server_limits = server_limits.here()
        self.requests = 0
        """Those that came whole and are not answered."""
        self.websockets = 0
        self.bodies_bytes = 0
        """Of bodies that are being received."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 400 (its query is not UTF-8), 413 (its body is too long) or 503 (too many)."""
        if scope["type"] == "http":
            await self._request(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _request(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _is_utf8(scope["query_string"]):
            return await refuse(scope, receive, send, 400, "The query string is not UTF-8.")
        body = await self._body(scope, receive, send)
        if body is None:
            return None
        if self.requests >= self.server_limits.requests and scope["path"] not in self.server_limits.always:
            return await refuse(scope, receive, send, 503, "The server has as many requests as it takes at once.")
        self.requests += 1
        try:
            await self.app(scope, _with_body(body, receive), send)
        finally:
            self.requests -= 1

    async def _body(self, scope: Scope, receive: Receive, send: Send) -> Message | None:
        """Return all of the body as one message, or None if it was refused or the client left before its end: the app
        would raise for half a body, which costs a traceback.
        """
        most = self.server_limits.body_bytes
        stated = dict(scope["headers"]).get(b"content-length", b"0")
        parts = bytearray()
        is_too_long = not stated.isdigit() or int(stated[:20]) > most
        try:
            while not is_too_long:
                message = await receive()
                if message["type"] != "http.request":
                    return None
                parts += message.get("body", b"")
                self.bodies_bytes += len(message.get("body", b""))
                if len(parts) <= most and not message.get("more_body"):
                    return {"type": "http.request", "body": bytes(parts), "more_body": False}
                if self.bodies_bytes > self.server_limits.bodies_bytes:
                    await refuse(scope, receive, send, 503, "The server is receiving as much as it takes at once.")
                    return None
                is_too_long = len(parts) > most
        finally:
            self.bodies_bytes -= len(parts)
        await refuse(scope, receive, send, 413, f"The body is longer than {most:,} bytes.")
        return None

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.websockets >= self.server_limits.websockets:
            return await refuse(scope, receive, send, 503, "The server has as many WebSockets as it takes.")
        self.websockets += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.websockets -= 1
        return None


def _with_body(body: Message, receive: Receive) -> Receive:
    waiting = [body]

    async def receiving() -> Message:
        return waiting.pop() if waiting else await receive()

    return receiving


async def refuse(scope: Scope, receive: Receive, send: Send, status: int, why: str) -> None:
    """Answer a request or a WebSocket's handshake with a status and one sentence, and close the connection."""
    if scope["type"] == "websocket":  # before it is accepted: the server answers 403
        await send({"type": "websocket.close", "code": 1008, "reason": why})
    else:
        await PlainTextResponse(why, status, headers={"connection": "close"})(scope, receive, send)


def bounded_server(app: ASGIApp, server_limits: ServerLimits, **settings: Any) -> uvicorn.Server:
    """Make a server of `app` with these limits. `settings` are uvicorn's."""
    return uvicorn.Server(BoundedConfig(app, server_limits, **settings))


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
