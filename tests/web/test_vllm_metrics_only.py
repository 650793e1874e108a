"""A real vLLM without the probe: each view in its navigation shows data of it, at three widths and in both themes."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import httpx2
import pytest
from playwright.sync_api import Browser, Page, expect

from kvscope.dashboards.web.view_registry import TABLE, views_of
from kvscope.lab.vllm_python import needs_vllm
from tests.web.parts import Account, fits
from tests.web.plain_vllm import PlainVllm, served_plain

pytestmark = [needs_vllm, pytest.mark.prove]

FEWEST_POINTS = 4
SIZES = ((390, 844), (1440, 900), (1920, 1080))
OVERFLOWING = """() => [...document.querySelectorAll("#view section")]
  .filter((one) => getComputedStyle(one).overflowY === "visible" && one.scrollHeight > one.clientHeight + 2)
  .map((one) => one.id || one.textContent.slice(0, 60))"""
FIGURES = {
    "": r"running, \d+ waiting",
    "engine": r"Pool in use",
    "memory": r"200 blocks of 32 tokens, 6,400 tokens in total",
    "plan": r"longest request that fits has 1,024 tokens",
    "findings": r"No finding open|findings? open",
    "compare": r"tokens generated ?[\d.]+ /s",
    "alerts": r"\d+ thresholds",
    "stream": r"vllm serve MODEL",
}
"""What each view shows of this engine."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainVllm]:
    with served_plain(tmp_path_factory.mktemp("plain")) as plain:
        (engine,) = ask(plain, "engines")
        while len(ask(plain, "points", engine=engine["engine"])) < FEWEST_POINTS:
            time.sleep(0.5)
        yield plain


def ask(plain: PlainVllm, path: str, **params: str) -> list[dict[str, object]]:
    for _ in range(600):
        answer = httpx2.get(f"{plain.url}/api/{path}", params=params, trust_env=False, timeout=30)
        if answer.status_code == httpx2.codes.OK and answer.json():
            found: list[dict[str, object]] = answer.json()
            return found
        time.sleep(0.1)
    raise AssertionError(f"{path}: {answer.text}")


def opened(page: Page, url: str) -> str:
    """What the view reads, once its charts are drawn."""
    page.goto(url)
    expect(page.locator("#view h1, #view h2").first).to_be_visible()
    for chart in page.locator(".plot").all():
        expect(chart.locator(".scatterlayer .trace").first).to_be_attached()
    return page.locator("#view").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_view_in_the_navigation_shows_data_of_this_engine(browser: Browser, plain: PlainVllm, scheme: str) -> None:
    assert set(FIGURES) == {entry.path for entry in views_of("metrics")}
    for width, height in SIZES:
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
        account = Account(page)
        for entry in views_of("metrics"):
            shown = re.sub(r"\s+", " ", opened(page, f"{plain.url}/{entry.path}"))
            assert re.search(FIGURES[entry.path], shown), (entry.path, shown)
            assert page.locator("#view :is(table, .plot, .tiles, form, .pool-bar)").count(), entry.path
            assert "could not be rendered" not in shown
            fits(page)
            assert not page.evaluate(OVERFLOWING), (entry.path, width)
            tab = page.locator('#views a[aria-current="page"]')
            expect(tab).to_be_in_viewport()
        # What was under way when a page was left has failed, and nothing else may.
        assert not [line for line in account.wrong if not line.startswith("failed: ")]
        page.close()


def test_views_that_need_the_stream_are_not_offered(browser: Browser, plain: PlainVllm) -> None:
    page = browser.new_page()
    opened(page, plain.url)
    links = [link.get_attribute("href") or "" for link in page.locator("#bar a, #view a").all()]
    for entry in TABLE:
        if "metrics" not in entry.signals:
            assert not [href for href in links if re.match(rf"/{entry.path}(\?|$)", href)], entry.path
    assert not page.locator("[role=search] input[name=q]").count()
    page.close()


def test_an_engine_that_answers_between_scrapes_is_serving(plain: PlainVllm) -> None:
    """Its requests end within milliseconds: most scrapes find none."""
    for _ in range(3):
        (engine,) = ask(plain, "engines")
        assert engine["status"] == "serving"
        time.sleep(1)
