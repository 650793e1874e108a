"""A real browser obeys the service's headers: every view works without a violation, no frame, and no token remains."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from playwright.sync_api import Browser, expect

from kvscope.dashboards.web.view_registry import TABLE
from tests.terminal.golden import TOLD
from tests.web.incidents import TOKEN, Incident, served
from tests.web.parts import Account

COUNT_VIOLATIONS = """
window.violations = [];
document.addEventListener("securitypolicyviolation",
    event => window.violations.push(event.violatedDirective + " " + event.blockedURI));
"""


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Incident]:
    scenario = TOLD["leak.finished-held"].scenario
    with served(scenario, tmp_path_factory.mktemp("guarded"), "--token", TOKEN) as incident:
        yield incident


class _Framing(BaseHTTPRequestHandler):
    server: _Elsewhere

    def do_GET(self) -> None:
        body = self.server.page.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: object) -> None:
        """Nothing."""


class _Elsewhere(ThreadingHTTPServer):
    page = ""


@contextmanager
def elsewhere(page: str) -> Iterator[str]:
    """A page on another port of this machine, which browsers regard as the same site."""
    with _Elsewhere(("127.0.0.1", 0), _Framing) as server:
        server.page = page
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_every_view_works_within_the_policy(browser: Browser, guarded: Incident) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.add_init_script(COUNT_VIOLATIONS)
    account = Account(page)
    page.goto(f"{guarded.url}/?token={TOKEN}")
    assert page.url == f"{guarded.url}/"
    for entry in TABLE:
        page.goto(guarded.address(entry.path))
        expect(page.locator("#view h1, #view h2").first).to_be_visible()
        for chart in page.locator(".plot").all():
            expect(chart.locator(".scatterlayer .trace").first).to_be_attached()
        assert page.evaluate("window.violations") == [], entry.path
    page.goto(f"{guarded.url}/alerts")
    assert page.evaluate("window.violations") == []
    assert [line for line in account.wrong if "failed: " not in line] == []
    # The policy is in force, not merely sent: an inline script does not run.
    page.evaluate("document.body.append(Object.assign(document.createElement('script'), {text: 'window.ran = true'}))")
    assert page.evaluate("window.ran") is None
    assert page.evaluate("window.violations.length") == 1
    context.close()


def test_the_cookie_is_a_session_that_scripts_do_not_see(browser: Browser, guarded: Incident) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{guarded.url}/?token={TOKEN}")
    (cookie,) = context.cookies()
    assert TOKEN not in cookie["value"]
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    assert page.evaluate("document.cookie") == ""
    assert TOKEN not in page.evaluate("history.length + location.href + document.referrer")
    context.close()


def test_no_page_elsewhere_frames_or_posts(browser: Browser, guarded: Incident) -> None:
    """Another port of this host gets the cookie with its requests, since browsers call it the same site."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{guarded.url}/?token={TOKEN}")
    hostile = f"""<iframe src="{guarded.url}/alerts"></iframe>
        <form method="post" action="{guarded.url}/api/alerts/silences"><button>win</button></form>"""
    with elsewhere(hostile) as address:
        asked: list[int] = []
        page.on("response", lambda answer: asked.append(answer.status) if "/api/alerts" in answer.url else None)
        page.goto(address)
        page.wait_for_load_state("networkidle")
        assert "Alerts" not in (page.frames[1].content() if len(page.frames) > 1 else "")
        page.get_by_role("button").click()
        expect(page.locator("body")).to_have_text("This request came from a page of another origin.")
        assert asked == [403]
    context.close()
