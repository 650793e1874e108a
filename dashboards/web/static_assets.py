"""The files of the page as browsers get them: compressed once, and cached for as long as their address stays.

The address of a file changes with its content: the page's own files are under a hash of them all, and Dash writes the
version of a library into the address of each of its files. So a browser need not ask again.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import posixpath
import re
from pathlib import Path
from typing import Final, NamedTuple

from dash.fingerprint import check_fingerprint
from starlette.types import ASGIApp, Message, Receive, Scope, Send

ASSETS_FOLDER: Final = Path(__file__).parent / "assets"
LIBRARIES: Final = "/_dash-component-suites/"
_VERSIONED: Final = re.compile(r"\.v[\w-]+m[0-9a-fA-F]+\.")
"""In the names of libraries' files, as Dash writes them."""
_COMPRESSIBLE: Final = (b"text/", b"application/javascript", b"application/json", b"image/svg+xml")
_CONDITIONS: Final = (b"if-none-match", b"if-modified-since", b"range", b"if-range")
IMMUTABLE: Final = b"public, max-age=31536000, immutable"
CHECKED: Final = b"no-cache"
"""A browser asks each time whether its copy is still the same."""


def content_hash(folder: Path) -> str:
    """Return a short hash of the names and contents of a folder's files."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


ASSETS_PATH: Final = f"assets/{content_hash(ASSETS_FOLDER)}"
"""Where the page's own files are, without the leading slash."""


CHART_LIBRARY: Final = "plotly-basic.min.js"
"""plotly.js with scatter, bar and pie alone: a quarter of the whole. `npm pack plotly.js-basic-dist-min` gets another,
and `make docs` writes its version and hash into the bill of materials.
"""
CHART_LIBRARY_ADDRESS: Final = f"/{ASSETS_PATH}/{CHART_LIBRARY}"
"""Where it is. The page loads it with its first chart."""


class _Packed(NamedTuple):
    headers: list[tuple[bytes, bytes]]
    body: bytes
    tag: bytes


class StaticAssets:
    """Serves the files that `app` has from memory, compressed, to each client that accepts that."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.packed: dict[str, _Packed] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer requests of files. All others go on to the app."""
        if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD") or not _is_file(scope["path"]):
            return await self.app(scope, receive, send)
        caching = IMMUTABLE if _is_versioned(scope["path"]) else CHECKED
        asked = dict(scope["headers"])
        if not accepts_gzip(asked.get(b"accept-encoding", b"").decode("latin-1")):
            return await self.app(scope, receive, _with_headers(send, caching))
        # The version in an address is not checked, so that it may be no part of the key: anybody can invent one.
        key, _ = check_fingerprint(posixpath.normpath(scope["path"]))  # type: ignore[no-untyped-call]
        packed = self.packed.get(key)
        if packed is None:
            start, body = await self._read(scope, receive)
            if start["status"] != 200 or not _content_type(start).startswith(_COMPRESSIBLE):
                sending = _with_headers(send, caching)
                await sending(start)
                return await sending({"type": "http.response.body", "body": body})
            packed = self.packed[key] = await asyncio.to_thread(_pack, start, body)
        headers = [*packed.headers, (b"etag", packed.tag), (b"cache-control", caching), (b"vary", b"Accept-Encoding")]
        if packed.tag in re.split(rb"\s*,\s*", asked.get(b"if-none-match", b"")):
            await send({"type": "http.response.start", "status": 304, "headers": headers})
            return await send({"type": "http.response.body", "body": b""})
        length = (b"content-length", str(len(packed.body)).encode())
        coded = (b"content-encoding", b"gzip")
        await send({"type": "http.response.start", "status": 200, "headers": [*headers, length, coded]})
        body = b"" if scope["method"] == "HEAD" else packed.body
        return await send({"type": "http.response.body", "body": body})

    async def _read(self, scope: Scope, receive: Receive) -> tuple[Message, bytes]:
        """Return what the app answers to an unconditional GET of it."""
        headers = [(name, value) for name, value in scope["headers"] if name not in _CONDITIONS]
        messages: list[Message] = []

        async def keep(message: Message) -> None:
            messages.append(message)

        await self.app({**scope, "method": "GET", "headers": headers}, receive, keep)
        return messages[0], b"".join(message.get("body", b"") for message in messages[1:])


def accepts_gzip(header: str) -> bool:
    """Return whether an Accept-Encoding allows gzip: named, or by `*`, and not with a weight of 0."""
    weights: dict[str, float] = {}
    for part in header.split(","):
        name, _, parameters = part.strip().partition(";")
        weight = re.search(r"q\s*=\s*([\d.]+)", parameters)
        try:
            weights[name.strip().lower()] = float(weight[1]) if weight else 1.0
        except ValueError:
            weights[name.strip().lower()] = 0.0
    return weights.get("gzip", weights.get("*", 0.0)) > 0


def _is_file(path: str) -> bool:
    return path.startswith((f"/{ASSETS_PATH}/", LIBRARIES))


def _is_versioned(path: str) -> bool:
    return path.startswith(f"/{ASSETS_PATH}/") or _VERSIONED.search(path) is not None


def _content_type(start: Message) -> bytes:
    content_type: bytes = dict(start["headers"]).get(b"content-type", b"")
    return content_type


def _pack(start: Message, body: bytes) -> _Packed:
    packed = gzip.compress(body, 9, mtime=0)
    tag = f'"{hashlib.sha256(packed).hexdigest()[:16]}"'.encode()
    return _Packed([(b"content-type", _content_type(start))], packed, tag)


def _with_headers(send: Send, caching: bytes) -> Send:
    """Send the app's own answer, with how long a good one may be kept."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] in (200, 304):
            kept = [(name, value) for name, value in message["headers"] if name.lower() not in (b"cache-control",)]
            message["headers"] = [*kept, (b"cache-control", caching), (b"vary", b"Accept-Encoding")]
        await send(message)

    return sending
