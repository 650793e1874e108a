"""Six incidents are diagnosed by who reads only what is on the page, which is there for all who may see it."""

from __future__ import annotations

import http.client
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from kvscope.dashboards.web.view import FLEET_PATH
from kvscope.dashboards.web.view_registry import TABLE
from tests.terminal.golden import TOLD
from tests.web.incidents import TOKEN, Incident, served
from tests.web.parts import ENGINE, Account, address, fits

MOST_CLICKS = 3
MOST_TABS = 300
# What whoever is behind it is seen to be, or to have gone through, where the finding leads to.
SEEN = {
    "leak.finished-held": "kept for a transfer",
    "stuck.never-fits": "for KV blocks, needs",
    "collapse.lockstep": "finished",
    "thrash.preemption": "preempted",
    "stuck.engine-stalled": "STEP_IN_FLIGHT",
    "corrupt.double-free": "released",
}


@pytest.fixture(scope="module")
def incident(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Incident]:
    with served(TOLD[request.param].scenario, tmp_path_factory.mktemp("incident")) as incident:
        yield incident


class Reader:
    """Follows links, and counts how many."""

    def __init__(self, page: Page, incident: Incident) -> None:
        self.page = page
        self.clicks = 0
        page.goto(incident.url)

    def follow(self, link: Locator) -> None:
        link.first.click()
        self.clicks += 1


@pytest.mark.parametrize(
    "incident",
    [code if code == "leak.finished-held" else pytest.param(code, marks=pytest.mark.slow) for code in TOLD],
    indirect=True,
)
def test_from_the_overview_to_the_culprit(page: Page, incident: Incident) -> None:
    account = Account(page)
    reader = Reader(page, incident)
    reader.follow(page.locator("#engines .brief-finding"))
    found = page.locator("#finding")
    expect(found.locator(".marks code")).to_have_text(incident.code)
    expect(found.locator(".advice")).to_contain_text("Do now")
    expect(page.locator("#meanwhile .scatterlayer .trace").first).to_be_attached()
    reader.follow(found.locator(".culprits a.id"))
    history = page.get_by_role("complementary", name="Event history")
    expect(history).to_contain_text(SEEN[incident.code])
    expect(page).to_have_url(re.compile("/(request|block)[?]"))
    where = urlsplit(page.url)
    (culprit,) = parse_qs(where.query)["id"]
    assert culprit in incident.requests if where.path == "/request" else int(culprit) in incident.blocks
    assert reader.clicks <= MOST_CLICKS
    assert account.wrong == []
    assert account.elsewhere(incident.url) == []


def tab_to(page: Page, link: Locator) -> None:
    """Press Tab until it has the focus."""
    wanted = link.first.element_handle()
    for _ in range(MOST_TABS):
        page.keyboard.press("Tab")
        if page.evaluate("wanted => document.activeElement === wanted", wanted):
            return
    raise AssertionError(f"not reached by {MOST_TABS} times Tab: {link}")


LEAK = pytest.mark.parametrize("incident", ["leak.finished-held"], indirect=True)


@LEAK
def test_the_same_without_a_mouse(page: Page, incident: Incident) -> None:
    page.goto(incident.url)
    links = (page.locator("#engines .brief-finding"), page.locator("#finding .culprits a.id"))
    for link in links:
        expect(link.first).to_be_visible()
        tab_to(page, link)
        page.keyboard.press("Enter")
    expect(page.get_by_role("complementary", name="Event history")).to_contain_text(SEEN[incident.code])
    page.keyboard.press("Escape")
    expect(page).to_have_url(re.compile("/requests"))


def go(page: Page, there: str) -> None:
    """Follow a link to there, as the page itself does once it is there, and wait until that is shown."""
    page.wait_for_selector("#page[data-received]", state="attached")
    page.evaluate(
        "href => document.body.append(Object.assign(document.createElement('a'), { href, id: 'way' }))", there
    )
    page.evaluate("() => { const way = document.getElementById('way'); way.click(); way.remove(); }")
    for _ in range(2):  # what is told next may be of where one was
        reported = page.locator("#page").get_attribute("data-received")
        expect(page.locator("#page")).not_to_have_attribute("data-received", reported or "")
    expect(page.locator("#view h1, #view h2").first).to_be_visible()


@pytest.mark.slow
@LEAK
def test_every_view_is_for_everybody(page: Page, incident: Incident) -> None:
    """Light and dark, on a small screen and a large one; by axe-core: names, roles, contrast, and what else a program
    can check.
    """
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install axe-playwright-python").Axe()
    account = Account(page)
    wrong: dict[str, Any] = {}
    page.goto(incident.url)
    for path in (entry.path for entry in TABLE):
        page.emulate_media(color_scheme="light")
        go(page, incident.address(path))
        found = axe.run(page).response["violations"]
        page.emulate_media(color_scheme="dark")
        found += axe.run(page, options={"runOnly": ["color-contrast"]}).response["violations"]
        wrong[path] = [(one["id"], [node["html"] for node in one["nodes"]][:3]) for one in found]
        for width in (1920, 1280):
            page.set_viewport_size({"width": width, "height": 800})
            fits(page)
    assert {path: faults for path, faults in wrong.items() if faults} == {}
    assert account.wrong == []
    assert account.elsewhere(incident.url) == []


@LEAK
def test_every_view_is_led_to(page: Page, incident: Incident) -> None:
    """From the overview, over links and forms alone."""
    unseen = {f"/{entry.path}" for entry in TABLE if "stream" in entry.signals}
    unseen.discard(f"/{FLEET_PATH}")  # leads from many engines to one: see tests/fleet
    ways = [address("")]
    page.goto(incident.url)
    while unseen:
        way = next(way for way in ways if urlsplit(way).path in unseen)
        unseen.discard(urlsplit(way).path)
        go(page, incident.url + way)
        ways += page.locator("#page a[href^='/']").evaluate_all("links => links.map((one) => one.getAttribute('href'))")
        ways += page.locator("form[action^='/']").evaluate_all("all => all.map((one) => one.getAttribute('action'))")


def handshake(url: str, path: str) -> tuple[int, bytes]:
    """What a WebSocket is answered with."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    asked = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        "Origin": url,
    }
    try:
        connection.request("GET", path, headers=asked)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_who_has_no_token_hears_nothing_of_engines(browser: Browser, tmp_path: Path) -> None:
    with served(TOLD["leak.finished-held"].scenario, tmp_path, "--token", TOKEN) as incident:
        asked = [*(entry.path for entry in TABLE), "api/engines", "api/findings", "metrics", "_dash-layout", "alerts"]
        for given in ("", "not-this", TOKEN[:-1]):
            for path in asked:
                answer = httpx2.get(f"{incident.url}/{path}", params={"token": given}, trust_env=False, timeout=60)
                assert answer.status_code == 401, path
                assert ENGINE not in answer.text
            status, stated = handshake(incident.url, f"/_dash-ws-callback?token={given}")
            assert status == 403
            assert ENGINE.encode() not in stated
            page = browser.new_page()
            page.goto(f"{incident.url}/?token={given}")
            expect(page.locator("body")).to_have_text(re.compile("^A token is needed"))
            page.close()
        page = browser.new_page()
        page.goto(f"{incident.url}/?token={TOKEN}")
        page.locator("#engines .brief-finding").first.click()
        expect(page.locator("#finding")).to_contain_text(incident.code)
        page.close()
