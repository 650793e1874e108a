"""The page in a browser, over the real service and a real event stream."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path

import httpx2
import pytest
from playwright.sync_api import Browser, Page, expect

from kvscope.dashboards.web import pictures
from kvscope.dashboards.web.links import PagePlace
from tests.web.parts import ENGINE, LEAK, Account, Engine, address, fits, service

# By path, something that is there when the view is.
VIEWS = {
    "": "#engines tbody tr",
    "engine": "#history .scatterlayer .trace",
    "blocks": "#map",
    "requests": "#requests tbody tr",
    "findings": "#findings .finding",
}


def next_tick(page: Page) -> None:
    """Wait until the page has been told something new."""
    reported = page.locator("#page").get_attribute("data-received")
    expect(page.locator("#page")).not_to_have_attribute("data-received", reported or "")


def finding(page: Page, code: str):  # type: ignore[no-untyped-def]
    return page.locator(".finding").filter(has=page.get_by_text(code, exact=True))


@pytest.mark.parametrize(
    ("scheme", "width", "height"),
    [("light", 390, 844), pytest.param("dark", 1280, 800, marks=pytest.mark.slow)],
)
@pytest.mark.smoke
def test_the_page_during_the_leak(
    browser: Browser, leaking: tuple[Engine, str], tmp_path: Path, scheme: str, width: int, height: int
) -> None:
    engine, url = leaking
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
    page = context.new_page()
    account = Account(page)
    page.goto(url)
    card = finding(page, LEAK)
    expect(card).to_contain_text("Finished requests keep their blocks")
    held = engine.lab.faults.on[LEAK].affected[0]
    expect(card.locator(".culprits").get_by_role("link", name=held, exact=True)).to_be_visible()
    for words in ("confirmed", "Do now", "Change", "Won’t help"):
        expect(card).to_contain_text(words)
    expect(card.get_by_role("link", name="Runbook")).to_have_attribute("href", f"/docs/runbooks/{LEAK}.md")
    expect(page.locator(".chip.fault")).to_have_attribute("title", re.compile(re.escape(LEAK)))
    expect(page).to_have_title("(1) Overview · kvscope")
    shots = Path(os.environ.get("KVSCOPE_SCREENSHOTS") or tmp_path)
    shots.mkdir(parents=True, exist_ok=True)
    for view, there in VIEWS.items():
        page.locator(f'#views a[href="{address(view)}"]').click()
        expect(page.locator(there).first).to_be_attached()
        fits(page)
        (shots / f"{view or 'overview'}-{scheme}-{width}.png").write_bytes(page.screenshot(full_page=True))
    context.close()
    assert len(account.asked) > 5
    assert account.elsewhere(url) == []
    assert account.wrong == []


def test_a_culprit_leads_to_its_story_and_back(page: Page, leaking: tuple[Engine, str]) -> None:
    engine, url = leaking
    page.goto(url)
    held = engine.lab.faults.on[LEAK].affected[0]
    finding(page, LEAK).locator(".culprits").get_by_role("link", name=held, exact=True).click()
    history = page.get_by_role("complementary", name="Event history")
    expect(history.get_by_role("heading", name=f"Request {held}")).to_be_visible()
    expect(history).to_contain_text("kept for a transfer")
    assert page.url == url + address("request", id=held)
    page.keyboard.press("Escape")
    expect(history).to_be_hidden()
    page.go_back()
    expect(history).to_contain_text(held)
    history.get_by_role("link", name="Show them on the block map").click()
    expect(page.locator("#spotlight")).to_be_visible()


def test_pointing_at_a_block_tells_who_holds_it(page: Page, leaking: tuple[Engine, str]) -> None:
    engine, url = leaking
    held = engine.lab.faults.on[LEAK].affected[0]
    detail = httpx2.get(f"{url}/api/request", params={"engine": ENGINE, "id": held}, trust_env=False).json()
    block = detail["blocks"][0]
    page.goto(url + address("blocks"))
    frame = page.locator("#map-frame")
    expect(frame).to_have_attribute("data-total", str(engine.lab.pool.total))
    laid = pictures.grid(engine.lab.pool.total)
    box = page.locator("#map").bounding_box()
    assert box is not None
    position = {
        "x": box["width"] * (block % laid.columns + 0.5) / laid.columns,
        "y": box["height"] * (block // laid.columns + 0.5) / laid.rows,
    }
    frame.hover(position=position)  # type: ignore[arg-type]
    pointed = page.locator("#pointed-block")
    expect(pointed).to_contain_text(f"Block {block}")
    expect(pointed.get_by_role("link", name=held, exact=True)).to_be_visible()
    expect(pointed).to_contain_text("free deferred by the KV connector")
    frame.click(position=position)  # type: ignore[arg-type]
    expect(page.get_by_role("complementary", name="Event history")).to_contain_text(f"Block {block}")
    expect(page).to_have_url(url + address("block", id=str(block)))


def test_the_block_map_by_keyboard(page: Page, leaking: tuple[Engine, str]) -> None:
    engine, url = leaking
    page.goto(url + address("blocks"))
    expect(page.locator("#map-frame")).to_have_attribute("data-total", str(engine.lab.pool.total))
    page.locator("#map-frame").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft"):
        page.keyboard.press(key)
    expect(page.locator("#pointed-block")).to_contain_text("Block 1")
    page.keyboard.press("Enter")
    expect(page).to_have_url(url + address("block", id="1"))


def test_updates_leave_focus_and_what_was_unfolded_alone(page: Page, leaking: tuple[Engine, str]) -> None:
    engine, url = leaking
    page.goto(url)
    evidence = finding(page, LEAK).locator(".evidence")
    evidence.locator("summary").click()
    held = engine.lab.faults.on[LEAK].affected[0]
    link = finding(page, LEAK).locator(".culprits").get_by_role("link", name=held, exact=True)
    link.focus()
    next_tick(page)
    next_tick(page)
    expect(link).to_be_focused()
    expect(evidence.get_by_text("requests held")).to_be_visible()


def test_what_is_not_known_is_said(page: Page, leaking: tuple[Engine, str]) -> None:
    _, url = leaking
    page.goto(url + address("request", id="nobody"))
    expect(page.locator("#view")).to_contain_text("has no request 'nobody'")
    page.get_by_role("link", name="All requests").click()
    expect(page).to_have_url(url + address("requests"))
    page.goto(url + address("block", id=str(10**9)))
    expect(page.get_by_role("complementary", name="Event history")).to_contain_text("There is no block")
    page.goto(url + "/engine?engine=another")
    expect(page.locator("#alarms")).to_contain_text("No engine 'another' is known here")
    page.goto(url + address("engine", since="teatime"))
    expect(page.locator("#alarms")).to_contain_text("'teatime' is not a time")
    page.goto(url + address("nowhere"))
    expect(page.locator("#view")).to_contain_text("There is no page /nowhere")


@pytest.mark.slow
def test_no_engine_yet_then_one_then_a_finding_that_comes_and_goes(page: Page, tmp_path: Path) -> None:
    account = Account(page)
    events = f"ipc://{tmp_path}/events"
    with service("--events", events) as url:
        page.goto(url)
        empty = page.locator("#empty")
        expect(empty).to_contain_text("Waiting for an engine")
        expect(empty.locator("#sources")).to_have_text(f"{events} has sent nothing yet")
        expect(empty).to_contain_text("monitor serve --metrics http://127.0.0.1:8000/metrics")
        command = f"KVSCOPE_EVENTS={events} vllm serve MODEL"
        expect(empty.locator("#probe-command")).to_have_text(command)
        copy = empty.locator("[data-copy]").last
        copy.click()
        expect(copy).to_have_text("Copied")
        assert page.evaluate("getSelection().toString()") == command
        with Engine(tmp_path, total=100) as engine:
            expect(page.locator("#engines").get_by_role("link", name=ENGINE)).to_be_visible()
            expect(empty).to_be_hidden()
            expect(page.locator(".all-well")).to_be_visible()
            too_big = engine.lab.pool.total * engine.lab.manager.block_size + 1
            arrived = []
            engine.soon(lambda: arrived.append(engine.lab.arrive(too_big, name="too-big")))
            card = finding(page, "stuck.never-fits")
            expect(card.locator(".culprits")).to_contain_text("too-big")
            engine.soon(lambda: engine.lab.abort(arrived[0]))
            expect(card).to_have_count(0)
            expect(page.locator(".all-well")).to_be_visible()
        assert account.elsewhere(url) == []
        assert account.wrong == []


@pytest.mark.slow
def test_without_an_engine_each_source_has_its_state(page: Page) -> None:
    with service("--metrics", "http://127.0.0.1:9/metrics", "--events", "tcp://localhost:59") as url:
        page.goto(url)
        sources = page.locator("#empty #sources li")
        expect(sources).to_contain_text(["tcp://localhost:59 has sent nothing yet", "does not answer"])
        expect(page.locator("#probe-command")).to_have_text("KVSCOPE_EVENTS=tcp://127.0.0.1:59 vllm serve MODEL")


def test_one_of_several_engines_is_chosen(page: Page, tmp_path: Path) -> None:
    other = "other@127.0.0.1:0/0"
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with (
        Engine(tmp_path / "one", total=100) as one,
        Engine(tmp_path / "two", other, total=300) as two,
        service("--events", one.events, "--events", two.events) as url,
    ):
        page.goto(url)
        expect(page.locator("#engines tbody tr")).to_have_count(2)
        page.goto(url + address("blocks"))
        expect(page.locator("#map-frame")).to_have_attribute("data-total", str(one.lab.pool.total))
        picker = page.get_by_role("navigation", name="Engines")
        picker.locator("summary").click()
        picker.get_by_role("link", name=other).click()
        expect(page).to_have_url(url + PagePlace("blocks", other).but())
        expect(page.locator("#map-frame")).to_have_attribute("data-total", str(two.lab.pool.total))
        page.go_back()
        expect(page.locator("#map-frame")).to_have_attribute("data-total", str(one.lab.pool.total))


@pytest.mark.slow
def test_the_page_says_that_the_service_is_gone(page: Page, tmp_path: Path) -> None:
    with Engine(tmp_path, total=100) as engine:
        with service("--events", engine.events) as url:
            page.goto(url)
            expect(page.locator(".all-well")).to_be_visible()
            expect(page.locator("#stale")).to_be_hidden()
        expect(page.locator("#stale")).to_contain_text("No answer from the kvscope service")
        with service("--events", engine.events, "--port", url.rpartition(":")[2]):
            expect(page.locator("#stale")).to_be_hidden()
            next_tick(page)


def test_long_names_fit_into_narrow_windows_and_into_their_tables(page: Page, tmp_path: Path) -> None:
    name = f"a-family/{'a-model-with-a-long-name-' * 5}@{'a-node-with-a-long-name.' * 3}internal:8000/0"
    with Engine(tmp_path, name, total=100) as engine, service("--events", engine.events) as url:
        for one in range(3):
            engine.soon(partial(engine.lab.arrive, 1000, name=f"{'request-of-a-tenant-' * 6}{one}"))
        page.goto(url)
        expect(page.locator("#engines .brief-finding").first).to_be_visible()
        for path in ("", "requests", "findings"):
            page.goto(url + PagePlace(path, name).but())
            expect(page.locator("#view h1").first).to_be_visible()
            for width in (400, 768, 1280):
                page.set_viewport_size({"width": width, "height": 800})
                fits(page)
            tables = page.locator("#engines, .wide:not(#requests *)")
            assert tables.evaluate_all("all => all.every(one => one.scrollWidth <= one.clientWidth)"), path
            names = page.locator("#requests tbody th")
            assert names.evaluate_all("all => all.every(one => one.offsetWidth < innerWidth / 3)"), path


def test_a_page_keeps_nothing_of_what_it_has_shown(page: Page, leaking: tuple[Engine, str]) -> None:
    """Dash keeps what Inputs of callbacks were, to undo it; each second's page must not be one."""
    _, url = leaking
    page.goto(url + address("engine"))
    expect(page.locator("#history .scatterlayer .trace").first).to_be_attached()
    length = "window.store.getState().history.past.length"
    before = page.evaluate(length)
    for _ in range(3):
        next_tick(page)
    assert page.evaluate(length) == before
