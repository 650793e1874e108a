"""A reader of the page: opens it in a browser, goes through its views, looks into the past, and closes it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Final

from playwright.sync_api import Browser, TimeoutError, expect

from kvscope.dashboards.web.links import PagePlace

from ..chromium import chromium

LOOKS_MS: Final = 300
"""At each view, once it is drawn: the page is pushed again each second."""
AGO_S: Final = (30, 300, 1800, 5400)
"""Past moments that are looked at, one a view in turn: in memory and, of a long run, in closed segments."""
NOW_VIEWS: Final = ("", "engine", "blocks", "held", "requests", "prefixes", "memory", "findings")
DRAWN_MS: Final = 60_000


class PageReader:
    """Views the page at `url` of one engine. `failed`: views that were not drawn."""

    def __init__(self, browser: Browser, url: str, engine: str) -> None:
        self._browser = browser
        self._url = url
        self._engine = engine
        self._began_s = time.time()
        self.viewed = 0
        self.failed = 0

    def view(self) -> None:
        """Go through the views in a tab of their own."""
        page = self._browser.new_context(viewport={"width": 1280, "height": 800}).new_page()
        try:
            for place in self._places():
                try:
                    page.goto(self._url + place, timeout=DRAWN_MS)
                    expect(page.locator("#view h1, #view h2").first).to_be_visible(timeout=DRAWN_MS)
                except (AssertionError, TimeoutError):
                    self.failed += 1
                page.wait_for_timeout(LOOKS_MS)
        finally:
            page.context.close()
        self.viewed += 1

    def _places(self) -> Iterator[str]:
        """Yield the addresses: what is now, a moment of the past, and a window up to there."""
        for name in NOW_VIEWS:
            yield PagePlace(name, self._engine).but()
        now_s = time.time()
        age_s = now_s - self._began_s
        ago_s = AGO_S[self.viewed % len(AGO_S)]
        then_s = now_s - min(ago_s, age_s / 2)
        then = str(round(then_s * 1000))
        yield PagePlace("blocks", self._engine, at=then).but()
        yield PagePlace("requests", self._engine, at=then).but()
        yield PagePlace("engine", self._engine, since=str(round((then_s - ago_s) * 1000)), until=then).but()


class PageViews:
    """A thread that views the page of one engine every so many seconds, until it is closed."""

    def __init__(self, url: str, engine: str, every_s: float) -> None:
        self.viewed = self.failed = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(url, engine, every_s), daemon=True)
        self._thread.start()

    def _run(self, url: str, engine: str, every_s: float) -> None:
        with chromium() as browser:
            reader = PageReader(browser, url, engine)
            while not self._stopping.is_set():
                began_s = time.monotonic()
                reader.view()
                self.viewed, self.failed = reader.viewed, reader.failed
                self._stopping.wait(max(0.0, began_s + every_s - time.monotonic()))

    def close(self) -> None:
        """Finish the view that is open, and stop."""
        self._stopping.set()
        self._thread.join()
