"""The page on the service's one app: what stands before it, what a slow query holds up, who is let in."""

from __future__ import annotations

import asyncio
import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import httpx2
import pytest
import uvicorn
from fastapi import FastAPI

from kvscope.dashboards.web.app import mount
from kvscope.dashboards.web.links import PagePlace
from kvscope.dashboards.web.rendering import Page, Pages
from kvscope.dashboards.web.static_assets import ASSETS_PATH
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.questions.schema import BlockDetail, EngineView
from kvscope.monitor.service.http_api import create_app
from tests.web.parts import service

NOWHERE = "ipc:///tmp/kvscope-no-engine-is-here"
TOKEN = "a-token-for-this-test"


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    # uvloop keeps a pipe of its own for as long as the process lives.
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", loop="asyncio"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


class SlowWatch(Pipeline):
    """Does not answer about blocks until it may."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()
        self.may_answer = threading.Event()

    def block(self, engine: str, block: int, at: str = "") -> BlockDetail:
        self.asked.set()
        assert self.may_answer.wait(30)
        return super().block(engine, block, at)


POINT_AT_A_BLOCK = {
    "output": "pointed-block-data.data",
    "outputs": {"id": "pointed-block-data", "property": "data"},
    "inputs": [
        {"id": "pointed", "property": "data", "value": {"block": 5, "pointing": "/blocks?engine=an-engine"}},
    ],
    "changedPropIds": ["pointed.data"],
}


def test_a_scrape_is_answered_while_a_callback_is_not() -> None:
    watch = SlowWatch()
    app = create_app(watch, list)
    mount(app, watch)
    answers: list[httpx2.Response] = []

    def call_back(url: str) -> None:
        answers.append(httpx2.post(f"{url}/_dash-update-component", json=POINT_AT_A_BLOCK, timeout=60, trust_env=False))

    with serving(app) as url:
        caller = threading.Thread(target=call_back, args=(url,))
        caller.start()
        try:
            assert watch.asked.wait(30)
            scrape = httpx2.get(f"{url}/metrics", timeout=30, trust_env=False)
            assert scrape.status_code == 200
            assert "kvscope_" in scrape.text
            assert not answers
        finally:
            watch.may_answer.set()
            caller.join()
    assert answers[0].status_code == 200
    assert "no engine" in answers[0].text


class CountingWatch(Pipeline):
    """Counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.times_asked = 0

    def engines(self, at: str = "") -> list[EngineView]:
        self.times_asked += 1
        return super().engines(at)


def test_a_view_is_made_once_for_all_viewers() -> None:
    watch = CountingWatch()

    async def many_look() -> list[Page]:
        pages = Pages(watch)
        return await asyncio.gather(*(pages.page(PagePlace()) for _ in range(20)))

    pages = asyncio.run(many_look())
    assert watch.times_asked == 1
    assert {page.notices["title"] for page in pages} == {"waiting for an engine"}


@pytest.fixture(scope="module")
def open_service() -> Iterator[str]:
    with service("--events", NOWHERE) as url:
        yield url


def test_an_unknown_api_path_says_so_as_json(open_service: str) -> None:
    answer = httpx2.get(f"{open_service}/api/no/such/thing", trust_env=False)
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/json"
    assert "/api/no/such/thing" in answer.json()["detail"]


@pytest.mark.parametrize(
    "path", ["/", "/engine?engine=a%40b&from=1", "/request?engine=a%40b&id=r-1", "/block?id=7", "/a/b/c"]
)
def test_a_deep_link_gives_the_page(open_service: str, path: str) -> None:
    answer = httpx2.get(open_service + path, trust_env=False)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert "<title>kvscope</title>" in answer.text
    assert "_dash-config" in answer.text


def test_the_page_names_nothing_that_is_elsewhere(open_service: str) -> None:
    page = httpx2.get(open_service, trust_env=False).text
    assert "http://" not in page
    assert "https://" not in page


def upgrade(url: str, headers: dict[str, str]) -> int:
    """The status that a WebSocket handshake is answered with: 101 lets it in."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    try:
        asked = {
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
            "Origin": url,
        }
        connection.request("GET", "/_dash-ws-callback", headers=asked | headers)
        return connection.getresponse().status
    finally:
        connection.close()


def test_without_a_token_to_ask_for_the_page_may_open_its_websocket(open_service: str) -> None:
    assert upgrade(open_service, {}) == 101
    assert upgrade(open_service, {"Origin": "http://elsewhere.example"}) == 403


def test_the_token_is_asked_for_over_http_and_websocket() -> None:
    with service("--events", NOWHERE, "--token", TOKEN) as url:
        for path in ("/", "/_dash-layout", "/api/engines", "/metrics", f"/{ASSETS_PATH}/kvscope.css"):
            assert httpx2.get(url + path, trust_env=False).status_code == 401
            with_token = httpx2.get(url + path, headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False)
            assert with_token.status_code == 200
        assert httpx2.post(f"{url}/_dash-update-component", json=POINT_AT_A_BLOCK, trust_env=False).status_code == 401
        assert upgrade(url, {}) == 403
        assert upgrade(url, {"Authorization": "Bearer not-this"}) == 403
        assert upgrade(url, {"Authorization": f"Bearer {TOKEN}"}) == 101
        # As a browser has it: once in the address, then in the cookie that this sets.
        with httpx2.Client(base_url=url, trust_env=False) as browser:
            first = browser.get("/", params={"token": TOKEN}, headers={"Accept": "text/html"}, follow_redirects=True)
            assert (first.status_code, first.url.query) == (200, b"")
            assert browser.get("/_dash-layout").status_code == 200
            assert upgrade(url, {"Cookie": "; ".join(f"{n}={v}" for n, v in browser.cookies.items())}) == 101
