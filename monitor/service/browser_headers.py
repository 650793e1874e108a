"""The headers by which a browser confines the service's pages, on every answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

CONTENT_POLICY: Final = (
    "default-src 'self'; script-src 'self'{scripts}; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:;"
    " font-src 'self' data:; connect-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self';"
    " frame-ancestors 'none'"
)
"""Plotly writes its styles into the page, and draws into images of its own. {scripts}: hashes of inline scripts."""
SAFETY_HEADERS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
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
