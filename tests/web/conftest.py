"""What tests of the page share: a browser, a page of it, and an engine that leaks with the service that watches it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.waiting import PATIENCE_S
from tests.web.parts import LEAK, Engine, service

PATIENCE_MS = 1e3 * PATIENCE_S
expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def leaking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, str]]:
    """An engine whose connector never hears of every third completion, and the service that watches it."""
    path = tmp_path_factory.mktemp("leaking")
    with Engine(path, total=800, connector_share=1.0, faults=[f"{LEAK}:every=3"]) as engine:
        # Enough to see, then no more: the engine stays as it is while tests look at it.
        fault = engine.lab.faults.on[LEAK]
        fault.limit = 6
        with service("--events", engine.events, "--set", f"{LEAK}.grace_s=1") as url:
            yield engine, url


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.set_default_timeout(PATIENCE_MS)
    yield context.new_page()
    context.close()
