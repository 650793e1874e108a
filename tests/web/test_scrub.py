"""The slider of the block map, in a browser: the pool as it was, for whoever moves it, by pointer or by keys."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from kvscope.dashboards.web.app import mount
from kvscope.dashboards.web.palette import PALETTE_SHADES
from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.contract.wire import Batch
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.service.http_api import create_app
from tests.web.parts import ENGINE, Account
from tests.web.test_service import serving


@pytest.fixture(scope="module")
def lab() -> Lab:
    """Half a minute of an engine."""
    lab = Lab(total=80)
    for number in range(60):
        if number % 3 == 0:
            lab.arrive(10 + number, max_tokens=10)
        lab.step(0.5)
    lab.flush()
    return lab


@pytest.fixture
def url(lab: Lab) -> Iterator[str]:
    watch = Pipeline()
    watch.feed(lab.frames)
    app = create_app(watch, list)
    mount(app, watch)
    with serving(app) as url:
        yield url


def as_it_was(lab: Lab, at_ms: int) -> dict[str, int]:
    """The balance by all that was sent until then."""
    ledger = EngineLedger(ENGINE)
    for frame in lab.frames:
        if isinstance(frame, Batch) and frame.wall_ns <= at_ms * 1_000_000:
            ledger.apply(frame)
    balance = ledger.balance()
    return {shade.label: getattr(balance, shade.field) for shade in PALETTE_SHADES}


def shown(page: Page) -> dict[str, int]:
    items = page.locator(".map-and-events .legend li:not(.total)")
    reported = (text.split("\n") for text in items.all_inner_texts())
    return {label: int(count.replace(",", "")) for label, count, *_ in reported}


def test_moving_it_shows_the_pool_as_it_was(browser: Browser, url: str, lab: Lab) -> None:
    page = browser.new_page()
    account = Account(page)
    page.goto(f"{url}/blocks?from=now-30s")
    scrub = page.locator("#scrub")
    expect(scrub).to_be_visible()
    first, last = (int(scrub.get_attribute(end) or 0) for end in ("min", "max"))
    for share in (0.2, 0.7, 0.45):
        at = round(first + share * (last - first))
        scrub.fill(str(at))
        stood = int(scrub.input_value())
        expect(page).to_have_url(re.compile(r"at="))
        expect(page.locator(f"label[data-at='{stood}']")).to_be_attached()
        assert shown(page) == as_it_was(lab, stood)
    page.close()
    assert account.wrong == []


def test_a_step_goes_to_the_event_before_and_after(browser: Browser, url: str) -> None:
    page = browser.new_page()
    page.goto(f"{url}/blocks?from=now-30s")
    looked_at = page.locator(".events [aria-current='step']")
    expect(looked_at).to_have_count(1)
    latest = looked_at.get_attribute("href")
    page.keyboard.press(",")
    expect(looked_at).not_to_have_attribute("href", latest or "")
    before = looked_at.get_attribute("href")
    expect(page).to_have_url(re.compile(re.escape((before or "").partition("at=")[2])))
    page.keyboard.press(".")
    expect(looked_at).not_to_have_attribute("href", before or "")
    expect(looked_at).to_be_in_viewport()
    page.close()


def test_an_event_of_the_list_is_a_moment(browser: Browser, url: str) -> None:
    page = browser.new_page()
    page.goto(f"{url}/blocks?from=now-30s")
    event = page.locator(".events a").nth(3)
    text = event.inner_text()
    event.click()
    expect(page.locator(".past")).to_be_visible()
    expect(page.locator(".events [aria-current='step']")).to_have_text(re.compile(re.escape(text.split("\n")[-1])))
    page.close()
