"""A page of another origin in a real browser makes the service do nothing, but a link from it opens a page."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvloop
from playwright.sync_api import Browser, expect

from kvscope.dashboards.web.app import mount
from kvscope.monitor.base.bounded_server import bounded_server
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.service.http_api import SERVICE_LIMITS, create_app
from tests.web.test_content_policy import elsewhere

ATTEMPTS = 14
HOSTILE = """
<!doctype html><title>elsewhere</title><a id=link href="{service}/alerts">an alert</a>
<img src="{service}/api/compare?engine=a&other=b"><script src="{service}/api/explain?engine=a"></script>
<link rel=stylesheet href="{service}/api/engines"><iframe src="{service}/"></iframe>
<iframe src="{service}/api/findings"></iframe><embed src="{service}/api/requests">
<video src="{service}/metrics"></video>
<iframe name=inside></iframe>
<form id=get target=inside action="{service}/api/explain"></form>
<form id=post target=inside method=post action="{service}/api/alerts/test"></form>
<form id=data target=inside method=post enctype=text/plain action="{service}/_dash-update-component"></form>
<script>
for (const id of ["get", "post", "data"]) document.getElementById(id).submit();
fetch("{service}/api/timeline?engine=a", {{mode: "no-cors", credentials: "include"}}).catch(() => 0);
fetch("{service}/api/sql", {{mode: "no-cors", method: "POST", body: "{{}}"}}).catch(() => 0);
navigator.sendBeacon("{service}/api/alerts/silences", "x");
new EventSource("{service}/api/events");
new WebSocket("{service}/_dash-ws-callback".replace("http", "ws"));
window.open("{service}/api/compare?engine=a&other=c");
</script>
"""


@pytest.fixture(scope="module", autouse=True)
def signals_of_loops() -> None:
    """Make a first loop: libuv keeps a pipe from then on."""
    uvloop.new_event_loop().close()


@pytest.fixture
def watched() -> Iterator[tuple[str, list[str]]]:
    """The app with its page, and the paths of all requests that its guard let in."""
    admitted: list[str] = []
    watch = Pipeline()
    app = create_app(watch, list)
    mount(app, watch)

    class Recorder:
        """Counts WebSockets too."""

        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "lifespan":
                admitted.append(scope["path"])
            await self.app(scope, receive, send)

    app.add_middleware(Recorder)

    server = bounded_server(app, SERVICE_LIMITS, log_config=None, access_log=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", admitted
        server.should_exit = True
        thread.join()


@contextmanager
def hostile(service: str) -> Iterator[str]:
    with elsewhere(HOSTILE.format(service=service)) as page:
        yield page


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"], ids=["same-site", "cross-site"])
def test_a_page_of_another_origin_reaches_nothing(browser: Browser, watched: tuple[str, list[str]], host: str) -> None:
    service, admitted = watched
    context = browser.new_context()
    statuses: list[int] = []
    failed: list[str] = []
    context.on("response", lambda it: statuses.append(it.status) if it.url.startswith(service) else None)
    context.on("requestfailed", lambda it: failed.append(it.url) if it.url.startswith(service) else None)
    with hostile(service) as page:
        opened = context.new_page()
        admitted.clear()
        opened.goto(page.replace("127.0.0.1", host), wait_until="load")
        for _ in range(300):
            if len(statuses) + len(failed) >= ATTEMPTS:
                break
            opened.wait_for_timeout(50)
        assert len(statuses) + len(failed) >= ATTEMPTS, (statuses, failed)
        assert set(admitted) <= {"/favicon.ico"}  # of the tab that shows the refusal, which is of our origin
        assert set(statuses) <= {403}
        link = opened.locator("#link")
        link.click()
        expect(opened).to_have_url(f"{service}/alerts")
        expect(opened.get_by_role("heading", name="Waiting for an engine")).to_be_visible()
        assert "/alerts" in admitted
        assert any(path.startswith("/_dash-") for path in admitted)  # and the page's own requests are answered
    context.close()
