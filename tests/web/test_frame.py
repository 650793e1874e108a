"""The frame around every view: addresses, time, keys; and that everybody can use it."""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import Any

import httpx2
import pytest
from playwright.sync_api import Browser, Page, expect

from kvscope.dashboards.web.header import VIEW_KEYS
from kvscope.dashboards.web.links import place_of, wall_ns
from kvscope.dashboards.web.view_registry import views_of
from tests.web.parts import ENGINE, Engine, address

Leaking = tuple[Engine, str]
TABS = views_of("stream")


def ask(url: str, path: str, **params: Any) -> Any:
    return httpx2.get(f"{url}/api/{path}", params={"engine": ENGINE, **params}, trust_env=False).json()


def chart(page: Page, url: str) -> dict[str, float]:
    """The chart's place, once there is something in it."""
    page.goto(url + address("engine"))
    expect(page.locator("#history .scatterlayer .trace").first).to_be_attached()
    page.locator("#history").scroll_into_view_if_needed()
    box = page.locator("#history .nsewdrag").first.bounding_box()
    assert box is not None
    return box  # type: ignore[return-value]


def test_a_window_is_chosen_by_dragging_and_told_in_words(page: Page, leaking: Leaking) -> None:
    _, url = leaking
    box = chart(page, url)
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 0.2 * box["width"], y)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.7 * box["width"], y, steps=5)
    page.mouse.up()
    expect(page).to_have_url(re.compile("from=.*&to="))
    place = place_of(page.url)
    expect(page.locator("#time")).to_contain_text("as it was")
    reported = ask(url, "explain", since=place.since, until=place.until)
    expect(page.locator("#explanation")).to_contain_text(reported["sentences"][0])
    page.keyboard.press("l")
    expect(page).to_have_url(url + address("engine"))
    expect(page.locator("#time .live")).to_be_visible()


def test_a_moment_is_chosen_by_a_click_and_is_kept_in_other_views(page: Page, leaking: Leaking) -> None:
    _, url = leaking
    box = chart(page, url)
    page.mouse.click(box["x"] + 0.6 * box["width"], box["y"] + box["height"] / 2)
    expect(page).to_have_url(re.compile("at="))
    place = place_of(page.url)
    expect(page.locator("#time")).to_contain_text(f"at {place.at[11:19]}")
    page.mouse.move(0, 0)
    points = ask(url, "points", since=place.since, until=place.until, limit=300)
    then = [point for point in points if point["at_ns"] <= wall_ns(place.at, 0)][-1]
    for label, field in (("finished, held", "finished"), ("cached-idle", "cached_idle"), ("free", "free")):
        row = page.locator("#history-legend li").filter(has=page.get_by_text(label, exact=True))
        expect(row.locator(".count")).to_have_text(f"{then[field]:,}")
    page.get_by_role("navigation", name="Views").get_by_role("link", name="Blocks", exact=True).click()
    expect(page).to_have_url(url + place.to("blocks"))
    expect(page.locator("#time")).to_contain_text("as it was")


def test_times_can_be_typed(page: Page, leaking: Leaking) -> None:
    _, url = leaking
    page.goto(url + address("engine"))
    page.locator("#time summary").click()
    page.locator("#time").get_by_label("From").fill("2026-11-21T14:02:11")
    page.locator("#time").get_by_label("To", exact=True).fill("2026-11-21T14:05:01")
    page.get_by_role("button", name="Show").click()
    expect(page).to_have_url(re.compile(re.escape("from=2026-11-21T14%3A02%3A11&to=2026-11-21T14%3A05%3A01")))
    expect(page.locator("#time")).to_contain_text("14:02:11 – ")


def test_times_are_in_the_zone_that_is_chosen_and_links_in_utc(browser: Browser, leaking: Leaking) -> None:
    _, url = leaking
    context = browser.new_context(timezone_id="Asia/Kolkata", viewport={"width": 1280, "height": 800})
    page = context.new_page()
    past = address("engine", since="2026-11-21T14:00:00Z", until="2026-11-21T14:30:00Z")
    page.goto(url + past)
    expect(page.locator("#time")).to_contain_text("14:00:00 – 14:30:00 UTC")
    page.locator("#time summary").click()
    expect(page.get_by_role("button", name="UTC")).to_have_attribute("aria-pressed", "true")
    page.get_by_role("button", name="this browser's zone").click()
    expect(page.locator("#time")).to_contain_text("19:30:00 – 20:00:00 GMT+5:30")
    expect(page.locator("#time").get_by_label("From")).to_have_value("2026-11-21 19:30:00")
    page.reload()
    expect(page.locator("#time")).to_contain_text("19:30:00 – 20:00:00 GMT+5:30")
    page.locator("#time summary").click()
    page.locator("#time").get_by_label("From").fill("19:45")
    page.locator("#time").get_by_label("To", exact=True).fill("2026-11-21 19:50:00")
    page.get_by_role("button", name="Show").click()
    expect(page).to_have_url(re.compile(re.escape("from=2026-11-21T14%3A15%3A00Z&to=2026-11-21T14%3A20%3A00Z")))
    context.close()


@pytest.mark.parametrize("zone", ["utc", "browser"])
def test_a_chart_chooses_its_window_in_any_zone(browser: Browser, leaking: Leaking, zone: str) -> None:
    """Also where times are in UTC and the browser is not."""
    _, url = leaking
    context = browser.new_context(timezone_id="Asia/Kolkata", viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.add_init_script(f"localStorage.setItem('kvscope.zone', '{zone}')")
    box = chart(page, url)
    axis = page.evaluate("document.getElementById('history').layout.xaxis.range[1]")
    hours = (datetime.fromisoformat(axis).timestamp() - time.time()) / 3600
    assert hours == pytest.approx(5.5 if zone == "browser" else 0, abs=0.1)
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 0.2 * box["width"], y)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.7 * box["width"], y, steps=5)
    page.mouse.up()
    expect(page).to_have_url(re.compile("from=.*&to="))
    window = place_of(page.url).window(time.time_ns())
    assert 0 <= time.time() - window.until_ns / 1e9 < 300
    context.close()


def test_a_page_without_its_charts_has_no_red_zero(page: Page, leaking: Leaking) -> None:
    """On a slow link, and in print before Plotly is there: the legend has its moment, and a 0 is no alarm."""
    _, url = leaking
    page.route("**/plotly*.js", lambda route: route.abort())
    page.goto(url + address("engine"))
    legend = page.locator("#history-legend")
    expect(legend.locator("[data-moment]")).to_have_text(re.compile(r"^\d\d:\d\d:\d\d$"))
    row = legend.locator("li").filter(has=page.get_by_text("UNACCOUNTED", exact=True))
    expect(row.locator(".count")).to_have_text("0")
    expect(row.locator(".count")).to_have_class(re.compile(r"\bzero\b"))


def test_a_screen_reader_gets_the_sliders_value_in_words(page: Page, leaking: Leaking) -> None:
    _, url = leaking
    page.goto(url + address("blocks"))
    slider = page.locator("#scrub")
    expect(slider).to_have_attribute(
        "aria-valuetext", re.compile(r"^\d\d:\d\d:\d\d UTC, (the end|\d+ s before the end)$")
    )
    slider.focus()
    page.keyboard.press("Home")
    expect(slider).to_have_attribute("aria-valuetext", re.compile("before the end$"))


def test_a_dark_page_stays_dark(page: Page, leaking: Leaking) -> None:
    _, url = leaking
    page.goto(url)
    ground = "getComputedStyle(document.body).backgroundColor"
    page.locator("#time summary").click()
    expect(page.locator("#theme-button")).to_have_attribute("title", "Colours: auto")
    light = page.evaluate(ground)
    page.locator("#theme-button").click()
    expect(page.locator("#theme-button")).to_have_attribute("title", "Colours: dark")
    dark = page.evaluate(ground)
    assert dark != light
    page.reload()
    expect(page.locator("#theme-button")).to_have_attribute("title", "Colours: dark")
    assert page.evaluate(ground) == dark


def test_keys_lead_everywhere(page: Page, leaking: Leaking) -> None:
    _, url = leaking
    page.goto(url)
    expect(page.locator("#engines tbody tr")).to_have_count(1)
    assert len(TABS) <= len(VIEW_KEYS)
    for name, entry in zip(VIEW_KEYS, TABS, strict=False):
        page.keyboard.press(name)
        expect(page).to_have_url(url + address(entry.path))
        expect(page.locator("#views [aria-current=page]")).to_contain_text(entry.label)
    page.keyboard.press("[")
    expect(page).to_have_url(re.compile("from=.*&to="))
    expect(page.locator("#time .past")).to_be_visible()
    page.keyboard.press("l")
    expect(page).to_have_url(url + address(TABS[-1].path))
    expect(page.locator("#time .live")).to_be_visible()
    page.keyboard.press("t")
    expect(page.locator("#time form")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#time form")).to_be_hidden()
    expect(page.locator("#time summary")).to_be_focused()
    page.keyboard.press("?")
    keys = page.get_by_role("dialog", name="Keys")
    for entry in TABS:
        expect(keys).to_contain_text(entry.label)
    page.keyboard.press("Escape")
    expect(keys).to_be_hidden()


def test_the_first_tab_stop_leads_past_the_bar(page: Page, leaking: Leaking) -> None:
    _, url = leaking
    page.goto(url)
    expect(page.locator("#engines tbody tr")).to_have_count(1)
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#main")).to_be_focused()


def test_old_links_lead_to_the_same_thing(page: Page, leaking: Leaking) -> None:
    engine, url = leaking
    held = next(iter(engine.lab.faults.on.values())).affected[0]
    page.goto(f"{url}/request?engine={ENGINE}&id={held}")
    expect(page.locator("#page")).to_contain_text("kept for a transfer")
    page.goto(f"{url}/?engine={ENGINE}&from=1763733600000&to=1763737200000")  # as Grafana's links have it
    expect(page.locator("#time")).to_contain_text("2025-11-21 14:00:00 – 15:00:00 UTC")
