"""Files of the page are compressed for who accepts that, and kept by browsers for as long as their address stays."""

from __future__ import annotations

import asyncio
import gzip
import re
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest
from fastapi import FastAPI
from starlette.types import ASGIApp, Message

from kvscope.dashboards.web.app import mount
from kvscope.dashboards.web.static_assets import (
    ASSETS_FOLDER,
    ASSETS_PATH,
    CHART_LIBRARY_ADDRESS,
    IMMUTABLE,
    StaticAssets,
    accepts_gzip,
    content_hash,
)
from kvscope.monitor.questions.pipeline import Pipeline

GZIP = {"accept-encoding": "gzip, deflate, br"}
PLAIN = {"accept-encoding": "identity"}
MOST_BYTES = 1_500_000
"""Of all that the first chart needs, as a browser gets it."""


class Answer(NamedTuple):
    """What was transferred."""

    status: int
    headers: dict[str, str]
    body: bytes


@pytest.fixture(scope="module")
def app() -> FastAPI:
    app = FastAPI()
    mount(app, Pipeline())
    return app


def fetch(app: ASGIApp, address: str, headers: dict[str, str], method: str = "GET") -> Answer:
    """Ask the app as a server does."""
    reported: list[Message] = []
    parts = urlsplit(address)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": parts.path,
        "raw_path": parts.path.encode(),
        "query_string": parts.query.encode(),
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "server": ("127.0.0.1", 80),
        "client": ("127.0.0.1", 1),
    }

    waiting = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Message:
        if not waiting:
            await asyncio.Event().wait()  # it does not hang up
        return waiting.pop()

    async def send(message: Message) -> None:
        reported.append(message)

    async def ask() -> None:
        await app(scope, receive, send)

    asyncio.run(ask())
    sent = {name.decode(): value.decode() for name, value in reported[0]["headers"]}
    return Answer(reported[0]["status"], sent, b"".join(message.get("body", b"") for message in reported[1:]))


def addresses(app: FastAPI) -> list[str]:
    """Every script and style sheet of the page, and the one that draws charts."""
    index = fetch(app, "/", PLAIN).body.decode()
    found = re.findall(r'(?:src|href)="(/[^"]+\.(?:js|css|svg)[^"]*)"', index)
    assert any(path.startswith(f"/{ASSETS_PATH}/kvscope.js") for path in found)
    assert CHART_LIBRARY_ADDRESS not in found  # it comes with the first chart
    return [*found, CHART_LIBRARY_ADDRESS]


def test_all_that_a_first_chart_needs_is_compressed_and_kept(app: FastAPI) -> None:
    total = plain_total = 0
    for path in addresses(app):
        answer, plain = fetch(app, path, GZIP), fetch(app, path, PLAIN)
        assert answer.status == plain.status == 200
        assert answer.headers["content-encoding"] == "gzip"
        assert "content-encoding" not in plain.headers
        for one in (answer, plain):
            assert one.headers["cache-control"] == IMMUTABLE.decode(), path
            assert one.headers["vary"] == "Accept-Encoding"
            assert one.headers["content-type"] == answer.headers["content-type"]
        total, plain_total = total + len(answer.body), plain_total + len(plain.body)
    assert total < plain_total / 3
    assert total < MOST_BYTES


def test_what_is_compressed_is_the_file(app: FastAPI) -> None:
    for path in ASSETS_FOLDER.iterdir():
        answer = fetch(app, f"/{ASSETS_PATH}/{path.name}", GZIP)
        assert gzip.decompress(answer.body) == path.read_bytes()


def test_a_file_that_is_the_same_is_not_sent_again(app: FastAPI) -> None:
    path = f"/{ASSETS_PATH}/kvscope.js"
    tag = fetch(app, path, GZIP).headers["etag"]
    again = fetch(app, path, {**GZIP, "if-none-match": f'"another", {tag}'})
    assert (again.status, again.body) == (304, b"")
    other = fetch(app, path, {**GZIP, "if-none-match": '"another"'})
    assert other.status == 200
    assert other.body


def test_a_head_has_the_headers_and_no_body(app: FastAPI) -> None:
    path = f"/{ASSETS_PATH}/kvscope.js"
    answer = fetch(app, path, GZIP, "HEAD")
    assert answer.headers["content-encoding"] == "gzip"
    assert int(answer.headers["content-length"]) == len(fetch(app, path, GZIP).body)
    assert answer.body == b""


def test_what_is_not_there_is_not_kept(app: FastAPI) -> None:
    for path in (f"/{ASSETS_PATH}/none.js", "/_dash-component-suites/plotly/none.v1m1.js"):
        for headers in (GZIP, PLAIN):
            answer = fetch(app, path, headers)
            assert answer.status == 404
            assert "cache-control" not in answer.headers


def test_pages_and_figures_are_never_kept(app: FastAPI) -> None:
    for path in ("/", "/engine", "/_dash-layout"):
        assert "immutable" not in fetch(app, path, GZIP).headers.get("cache-control", "")


def test_a_library_without_its_version_is_checked_each_time(app: FastAPI) -> None:
    path = "/_dash-component-suites/plotly/package_data/plotly.min.js"
    assert fetch(app, path, GZIP).headers["cache-control"] == "no-cache"


def test_invented_versions_and_ways_to_write_a_path_take_no_memory(app: FastAPI) -> None:
    kept = StaticAssets(app)
    for number in range(3):
        path = f"/_dash-component-suites/dash/dash-renderer/build/dash_renderer.v{number}m{number}.min.js"
        assert fetch(kept, path, GZIP).status == 200
        assert fetch(kept, f"/{ASSETS_PATH}/{'./' * number}kvscope.js", GZIP).status == 200
    assert len(kept.packed) == 2


def test_an_address_changes_with_what_is_there(tmp_path: Path) -> None:
    file = tmp_path / "page.js"
    file.write_text("one")
    before = content_hash(tmp_path)
    assert content_hash(tmp_path) == before
    file.write_text("two")
    assert content_hash(tmp_path) != before


@pytest.mark.parametrize(
    ("header", "accepted"),
    [
        ("gzip", True),
        ("br, gzip;q=0.5", True),
        ("*", True),
        ("GZIP", True),
        ("", False),
        ("identity", False),
        ("gzip;q=0", False),
        ("br, *;q=0", False),
        ("gzip;q=0, *", False),
        ("gzip;q=1.2.3", False),
    ],
)
def test_what_a_client_accepts(header: str, accepted: bool) -> None:
    assert accepts_gzip(header) == accepted
