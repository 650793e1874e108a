"""The API over a real server: who may ask, what is answered, and that it is what the Pipeline itself answers."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.cookies import SimpleCookie

import httpx2
import msgspec
import pytest
import uvicorn
from starlette.websockets import WebSocket
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin

from kvscope.monitor.base.errors import BadQuestion, BadTime, NotKnown, Unreachable
from kvscope.monitor.outputs.alerting.alerting import Alerts
from kvscope.monitor.questions.client import ServiceClient
from kvscope.monitor.questions.handlers import QueryHandlers
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.questions.query import QUESTIONS, Query
from kvscope.monitor.questions.schema import SourceView
from kvscope.monitor.service.guard import COOKIE
from kvscope.monitor.service.http_api import create_app
from tests.detectors.scenes import ENGINE, Watched, finished_held, unaccounted
from tests.waiting import PATIENCE_S

TOKEN = 's3cret;with "odd" characters=é'
SOURCES = [SourceView("tcp://127.0.0.1:5757", ENGINE, True, 0, {"ring": 2}, "")]


@contextmanager
def served(watch: Pipeline, token: str = "", host: str = "127.0.0.1", alerts: Alerts | None = None) -> Iterator[str]:
    """Its address. A WebSocket that says hello is beside the API, as the page's would be."""
    app = create_app(watch, lambda: SOURCES, alerts, token=token, host=host)

    @app.websocket("/hello")
    async def hello(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text("hello")
        await socket.close()

    # asyncio's own loop: uvloop's library keeps a pipe open until the process ends.
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", loop="asyncio"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def leaking() -> Watched:
    """A leak that fires, another engine's that was resolved, requests of every kind."""
    scene = finished_held("leak.finished-held:every=2")
    scene.live(15)
    scene.lab.arrive(200, max_tokens=4)
    scene.lab.arrive(30, max_tokens=60)
    scene.steps(5)
    return scene


@pytest.fixture
def get() -> Iterator[httpx2.Client]:
    with httpx2.Client(trust_env=False) as client:
        yield client


# -------------------------------------------------------------------- answers


def test_a_remote_query_gives_what_the_watch_gives(leaking: Watched) -> None:
    watch = leaking.watch
    with served(watch) as url:
        remote = ServiceClient(url)
        try:
            assert remote.engines() == watch.engines()
            assert remote.past_engines() == watch.past_engines() == []
            for state in (None, "pending", "firing", "suppressed", "resolved"):
                assert remote.findings(state) == watch.findings(state)
            assert remote.findings("firing")
            assert remote.points(ENGINE) == watch.points(ENGINE)
            assert remote.points(ENGINE, seconds=5, limit=7) == watch.points(ENGINE, seconds=5, limit=7)
            assert 0 < len(remote.points(ENGINE, limit=7)) <= 7
            assert remote.requests(ENGINE) == watch.requests(ENGINE)
            for view in watch.requests(ENGINE):
                assert remote.request(ENGINE, view.id) == watch.request(ENGINE, view.id)
                assert remote.request(ENGINE, f"#{view.number}") == watch.request(ENGINE, view.id)
            for block in range(leaking.lab.pool.total):
                assert remote.block(ENGINE, block) == watch.block(ENGINE, block)
            assert remote.block_map(ENGINE) == watch.block_map(ENGINE)
            assert remote.usage_drop(ENGINE) == watch.usage_drop(ENGINE)
            at = watch.engines()[0].at or ""
            assert remote.usage_drop(ENGINE, at, 3.0) == watch.usage_drop(ENGINE, at, 3.0) != watch.usage_drop(ENGINE)
            assert remote.explain(ENGINE) == watch.explain(ENGINE)
            assert remote.retained_blocks(ENGINE) == watch.retained_blocks(ENGINE)
            assert remote.prefix_cache(ENGINE) == watch.prefix_cache(ENGINE)
            assert remote.calculator(ENGINE, 30, 20, 4) == watch.calculator(ENGINE, 30, 20, 4)
            assert remote.history(ENGINE) == watch.history(ENGINE)
            for finding in watch.findings():
                assert remote.finding(finding.id) == watch.finding(finding.id)
        finally:
            remote.close()


def test_a_remote_query_gives_the_past_that_the_watch_gives(leaking: Watched) -> None:
    watch = leaking.watch
    events = watch.events(ENGINE, limit=10_000)
    position, at = events[len(events) // 2].position, events[len(events) // 3].at or ""
    with served(watch) as url:
        remote = ServiceClient(url)
        try:
            for moment in (position, at):
                assert remote.engines(moment) == watch.engines(moment) != watch.engines()
                assert remote.requests(ENGINE, moment) == watch.requests(ENGINE, moment)
                assert remote.block_map(ENGINE, moment) == watch.block_map(ENGINE, moment)
                assert remote.block(ENGINE, 3, moment) == watch.block(ENGINE, 3, moment)
                assert remote.prefix_cache(ENGINE, moment) == watch.prefix_cache(ENGINE, moment)
                assert remote.points(ENGINE, since=at, until=moment) == watch.points(ENGINE, since=at, until=moment)
                assert remote.retained_blocks(ENGINE, until=moment) == watch.retained_blocks(ENGINE, until=moment)
                assert remote.explain(ENGINE, until=moment) == watch.explain(ENGINE, until=moment)
                assert remote.findings(engine=ENGINE, until=moment) == watch.findings(engine=ENGINE, until=moment)
                for view in watch.requests(ENGINE, moment)[:3]:
                    reported = remote.request(ENGINE, view.id, moment)
                    assert reported == watch.request(ENGINE, view.id, moment)
            assert remote.events(ENGINE, since=at, limit=9) == watch.events(ENGINE, since=at, limit=9)
            assert remote.events(ENGINE, around=position, limit=9) == watch.events(ENGINE, around=position, limit=9)
            about = {"kinds": ["allocated", "released"], "request": "r-1", "block": 3}
            assert remote.events(ENGINE, **about) == watch.events(ENGINE, **about)  # type: ignore[arg-type]
        finally:
            remote.close()


def test_what_is_asked_wrongly_is_said_over_http_too(leaking: Watched, get: httpx2.Client) -> None:
    with served(leaking.watch) as url:
        remote = ServiceClient(url)
        try:
            with pytest.raises(BadTime, match="'noon' is not a time"):
                remote.block_map(ENGINE, "noon")
            with pytest.raises(BadQuestion, match="is not a kind of event"):
                remote.events(ENGINE, kinds=["x"])
            with pytest.raises(NotKnown, match="is not kept"):
                remote.requests(ENGINE, "2001-01-01T00:00:00Z")
            with pytest.raises(NotKnown, match="no finding 'x'"):
                remote.finding("x")
        finally:
            remote.close()
        assert get.get(f"{url}/api/calculator", params={"engine": ENGINE, "prompt_tokens": "many"}).status_code == 422


def test_each_question_has_one_signature_everywhere() -> None:
    """In process, over HTTP and in the API: the same names in the same order."""
    document = create_app(Pipeline(), list).openapi()["paths"]
    assert QUESTIONS
    for name, question in QUESTIONS.items():
        signature = inspect.signature(getattr(Query, name))
        assert inspect.signature(getattr(Pipeline, name)) == signature
        handler = "_plan" if name == "plan" else name  # the parameters of a plan are the fields of its request
        assert handler in vars(QueryHandlers), f"{name} has no handler"
        assert name not in vars(ServiceClient)
        names = [each for each in signature.parameters if each != "self"]
        assert [each["name"] for each in document[question.route]["get"]["parameters"]] == [*names, "format"]


def test_what_is_not_known_is_so_over_http_too(leaking: Watched, get: httpx2.Client) -> None:
    with served(leaking.watch) as url:
        remote = ServiceClient(url)
        try:
            with pytest.raises(NotKnown, match=r"no engine 'nobody'.*there are: lab@"):
                remote.requests("nobody")
            with pytest.raises(NotKnown, match="no request 'r-99'"):
                remote.request(ENGINE, "r-99")
            for block in (-1, leaking.lab.pool.total):
                with pytest.raises(NotKnown, match=f"no block {block}: .* 0 to {leaking.lab.pool.total - 1}"):
                    remote.block(ENGINE, block)
        finally:
            remote.close()
        answer = get.get(f"{url}/api/request", params={"engine": ENGINE, "id": "r-99"})
        assert (answer.status_code, answer.headers["x-kvscope"]) == (404, "not-known")


def test_an_api_that_is_not_there_says_so_in_json(leaking: Watched, get: httpx2.Client) -> None:
    with served(leaking.watch) as url:
        answer = get.get(f"{url}/api/enginez")
        assert (answer.status_code, "x-kvscope" in answer.headers) == (404, False)
        assert "/api/enginez" in answer.json()["detail"]
        remote = ServiceClient(f"{url}/api")
        try:
            with pytest.raises(Unreachable, match=r"answers 404 Not Found, as no kvscope service does.*/api/metrics$"):
                remote.engines()
        finally:
            remote.close()


def test_what_is_asked_wrongly_hears_why(leaking: Watched, get: httpx2.Client) -> None:
    with served(leaking.watch) as url:
        assert get.get(f"{url}/api/findings?state=open").status_code == 400
        assert get.get(f"{url}/api/requests").status_code == 422
        assert get.get(f"{url}/api/block", params={"engine": ENGINE, "id": "first"}).status_code == 422
        assert get.get(f"{url}/docs/runbooks/nothing.md").status_code == 404
        assert get.get(f"{url}/docs/runbooks/..%2f..%2fREADME.md").status_code == 404


def test_a_browser_gets_a_runbook_as_a_page_and_others_as_it_is_written(leaking: Watched, get: httpx2.Client) -> None:
    with served(leaking.watch) as url:
        written = get.get(f"{url}/docs/runbooks/leak.finished-held.md")
        page = get.get(f"{url}/docs/runbooks/leak.finished-held.md", headers={"accept": "text/html,*/*;q=0.8"})
    assert written.headers["content-type"].startswith("text/plain")
    assert written.text.startswith("# leak.finished-held: ")
    assert page.headers["content-type"].startswith("text/html")
    assert "<h1>leak.finished-held: " in page.text
    assert "<h2>How to confirm</h2>" in page.text


def test_the_rest_of_it(leaking: Watched, get: httpx2.Client) -> None:
    with served(leaking.watch) as url:
        assert get.get(f"{url}/healthz").json()["status"] == "ok"
        assert msgspec.json.decode(get.get(f"{url}/api/sources").content, type=list[SourceView]) == SOURCES
        page = get.get(f"{url}/metrics")
        assert page.headers["content-type"].startswith("text/plain")
        assert 'code="leak.finished-held"' in page.text
        assert get.get(f"{url}/api/openapi.json").json()["info"]["title"] == "kvscope"


def test_two_engines_side_by_side() -> None:
    """A question is about one of them."""
    watch = Pipeline()
    for scene, name in ((finished_held(), "a@127.0.0.1:1/0"), (unaccounted(), "b@127.0.0.1:2/0")):
        scene.live(120)
        watch.feed(msgspec.structs.replace(frame, engine=name) for frame in scene.lab.frames)
    with served(watch) as url:
        remote = ServiceClient(url)
        try:
            assert [engine.engine for engine in remote.engines()] == ["a@127.0.0.1:1/0", "b@127.0.0.1:2/0"]
            found = {(f.engine, f.code) for f in remote.findings("firing") if f.severity == "error"}
            assert found == {("a@127.0.0.1:1/0", "leak.finished-held"), ("b@127.0.0.1:2/0", "leak.unaccounted")}
            assert remote.engines()[0].findings["error"] == remote.engines()[1].findings["error"] == 1
        finally:
            remote.close()


def test_nobody_there() -> None:
    with served(Pipeline()) as url:
        pass
    remote = ServiceClient(url, timeout_s=5)
    try:
        with pytest.raises(Unreachable, match="monitor serve"):
            remote.engines()
    finally:
        remote.close()


# -------------------------------------------------------------------- who may ask


def test_with_a_token_nothing_is_answered_without_it(leaking: Watched, get: httpx2.Client) -> None:
    with served(leaking.watch, TOKEN) as url:
        for path in ("/api/engines", "/metrics", "/docs/runbooks/leak.finished-held.md", "/api/openapi.json", "/none"):
            assert get.get(url + path).status_code == 401
            assert get.get(url + path, params={"token": TOKEN + "x"}).status_code == 401
            assert get.get(url + path, params={"token": ""}).status_code == 401
            assert get.get(url + path, headers={"authorization": "Bearer"}).status_code == 401
            assert get.get(url + path, headers={"authorization": "Bearer wrong"}).status_code == 401
            assert get.get(url + path, headers={"cookie": f"{COOKIE}=wrong"}).status_code == 401
        assert get.get(f"{url}/healthz").status_code == 200
        remote = ServiceClient(url)
        try:
            with pytest.raises(Unreachable, match="--token or KVSCOPE_TOKEN"):
                remote.engines()
        finally:
            remote.close()


def test_a_bearer(leaking: Watched) -> None:
    token = "a-bearers-token"
    with served(leaking.watch, token) as url:
        remote = ServiceClient(url, token)
        try:
            assert remote.engines() == leaking.watch.engines()
        finally:
            remote.close()


def test_a_token_in_the_address_begins_a_session_and_leaves_the_address(leaking: Watched) -> None:
    with served(leaking.watch, TOKEN) as url, httpx2.Client(trust_env=False) as browser:
        asked = {"token": TOKEN, "engine": "a b"}
        first = browser.get(f"{url}/api/findings", params=asked, headers={"accept": "text/html"})
        assert (first.status_code, first.headers["location"]) == (303, "/api/findings?engine=a+b")
        (cookie,) = SimpleCookie(first.headers["set-cookie"]).values()
        assert cookie.key.startswith(COOKIE)
        assert (cookie["httponly"], cookie["samesite"], cookie["path"]) == (True, "Strict", "/")
        assert not cookie["secure"]
        assert TOKEN not in first.headers["set-cookie"]
        assert browser.get(f"{url}/api/engines").status_code == 200
        sent = first.headers["set-cookie"].partition("; ")[0]
        browser.cookies.clear()
        assert browser.get(f"{url}/api/engines").status_code == 401
        # Cookies of whatever else is served on this machine come along, in forms that no parser of rules likes.
        for others in ('prefs={"theme":"dark"}; ', "a b=c; ", "=; ;; ", '"; '):
            assert browser.get(f"{url}/api/engines", headers={"cookie": others + sent}).status_code == 200


def test_a_program_may_send_the_token_in_the_address_and_gets_no_cookie(leaking: Watched, get: httpx2.Client) -> None:
    with served(leaking.watch, TOKEN) as url:
        answer = get.get(f"{url}/api/engines", params={"token": TOKEN})
        assert answer.status_code == 200
        assert "set-cookie" not in answer.headers


def test_websockets_need_it_too(leaking: Watched) -> None:
    token = "a-token"
    with served(leaking.watch, token) as url:
        address = url.replace("http:", "ws:") + "/hello"
        refused: tuple[dict[str, str], ...] = (
            {},
            {"Authorization": "Bearer b-token"},
            {"Cookie": f"{COOKIE}={token}"},
            {"Cookie": f"{COOKIE}_{url.rpartition(':')[2]}={token}"},
            {"Authorization": f"Bearer {token}", "Origin": "http://127.0.0.1:1"},
            {"Authorization": f"Bearer {token}", "Sec-Fetch-Site": "same-site"},
        )
        for bad in refused:
            with pytest.raises((InvalidStatus, ConnectionClosed)), connect(address, additional_headers=bad) as socket:
                socket.recv()
        begun = httpx2.get(url, params={"token": token}, headers={"accept": "text/html"}, trust_env=False)
        session = begun.headers["set-cookie"].partition("; ")[0]
        for good in ({"Authorization": f"Bearer {token}"}, {"Cookie": session}):
            with connect(address, additional_headers=good) as socket:
                assert socket.recv() == "hello"
        with connect(f"{address}?token={token}") as socket:
            assert socket.recv() == "hello"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LocalHost:8765", "[::1]:8765", "[::1]", "127.0.0.1:1"])
def test_without_a_token_this_machines_own_names_are_answered(leaking: Watched, get: httpx2.Client, host: str) -> None:
    with served(leaking.watch) as url:
        assert get.get(f"{url}/api/engines", headers={"host": host}).status_code == 200
        assert get.get(f"{url}/api/engines", headers={"host": host, "origin": f"http://{host}"}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example:8765", "[::1", ""])
def test_without_a_token_no_other_name_is(leaking: Watched, get: httpx2.Client, host: str) -> None:
    """A page elsewhere that points a name of its own at this machine asks under that name."""
    with served(leaking.watch, host="") as url:
        answer = get.get(f"{url}/api/engines", headers={"host": host})
        assert answer.status_code in (400, 403)
        assert ENGINE not in answer.text


def test_the_address_it_listens_on_is_a_name_of_its_own(leaking: Watched, get: httpx2.Client) -> None:
    with served(leaking.watch, host="127.0.0.7") as url:
        assert get.get(f"{url}/api/engines", headers={"host": "127.0.0.7:8765"}).status_code == 200
        assert get.get(f"{url}/api/engines", headers={"host": "127.0.0.8:8765"}).status_code == 403


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", "https://localhost"])
def test_without_a_token_a_script_from_elsewhere_is_refused(leaking: Watched, get: httpx2.Client, origin: str) -> None:
    with served(leaking.watch) as url:
        assert get.get(f"{url}/api/engines", headers={"origin": origin}).status_code == 403
        assert get.get(f"{url}/api/engines", headers={"origin": url}).status_code == 200
        address = url.replace("http:", "ws:") + "/hello"
        with pytest.raises((InvalidStatus, ConnectionClosed)), connect(address, origin=Origin(origin)) as socket:
            socket.recv()
        with connect(address, origin=Origin(url)) as socket:
            assert socket.recv() == "hello"
