"""Debian's Chromium, headless, which looks at the page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from playwright.sync_api import Browser, sync_playwright

CHROMIUM_FLAGS: Final = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
NO_CHROMIUM: Final = "there is no Chromium here: apt-get install chromium"


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start the browser. Without one, end the command that asks."""
    path = shutil.which("chromium")
    if path is None:
        raise SystemExit(NO_CHROMIUM)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(CHROMIUM_FLAGS))
        try:
            yield browser
        finally:
            browser.close()
