"""Pictures of every view during two incidents, in light and dark, in build/screens.

    python -m tests.web.screens [NAME…]

The name `demo` is of docs/page.png: the timeline of `make demo`. A picture is replaced only if it has changed to the
eye: letters are not drawn alike everywhere, to the last pixel.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx2
from PIL import Image, ImageChops, ImageStat
from playwright.sync_api import Browser, Page, expect

from kvscope.dashboards.web.view_registry import TABLE
from kvscope.lab.chromium import chromium
from scripts.demo import EXPECTED
from tests.web.incidents import served

ROOT: Final = Path(__file__).parents[2]
SCREENS: Final = ROOT / "build" / "screens"
SHOWN: Final = {"leak": "leak.finished-held:every=3 busy", "thrash": "thrash.preemption:every=2 half"}
DEMO: Final = "demo"
SCHEMES: Final = ("light", "dark")
SIZE: Final = {"width": 1440, "height": 900}
COLOURS: Final = 256
SAME_WITHIN: Final = 0.3
"""Of 255, on average over a picture: a sentence that changed is more."""
DEMO_PICTURE: Final = ROOT / "docs" / "page.png"
DEMO_SIZE: Final = {"width": 1280, "height": 900}
DEMO_SECONDS: Final = 240
STUCK_MS: Final = 20_000
"""How long the demo goes on after both incidents are found, so that their effect is in the picture."""


def drawn_at(page: Page, address: str) -> Image.Image:
    """The view at that address, as it stands when it has been drawn."""
    page.goto(address)
    expect(page.locator("#view h1, #view h2").first).to_be_visible()
    for chart in page.locator(".plot").all():
        expect(chart.locator(".scatterlayer .trace").first).to_be_attached()
    page.wait_for_timeout(300)  # until what fades has faded
    drawn = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
    return drawn.quantize(COLOURS, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)


def keep(picture: Image.Image, path: Path) -> None:
    """Write it, unless what is there looks the same."""
    if path.exists():
        before = Image.open(path).convert("RGB")
        if before.size == picture.size:
            difference = ImageChops.difference(before, picture.convert("RGB"))
            if max(ImageStat.Stat(difference).mean) <= SAME_WITHIN:
                return
    picture.save(path, optimize=True)


@contextmanager
def demo() -> Iterator[str]:
    """`make demo`, once both of its incidents are found; the address of its page."""
    command = [sys.executable, "-u", "-m", "scripts.demo"]
    environment = os.environ | {"DEMO_SECONDS": str(DEMO_SECONDS)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            url = next(found[0] for line in process.stdout if (found := re.search(r"http://[\d.:]+", line)))
            found_codes: set[str] = set()
            while not found_codes >= EXPECTED:
                time.sleep(1)
                findings = httpx2.get(f"{url}/api/findings", params={"state": "firing"}, trust_env=False).json()
                found_codes = {finding["code"] for finding in findings}
            yield url
        finally:
            process.terminate()


def take_demo(browser: Browser) -> None:
    """The timeline of the demo, for the README."""
    with demo() as url:
        page = browser.new_page(viewport=DEMO_SIZE, color_scheme="light")
        page.wait_for_timeout(STUCK_MS)
        keep(drawn_at(page, f"{url}/engine"), DEMO_PICTURE)
        page.close()


def main(wanted: list[str]) -> None:
    """Take those that are named, or all."""
    expect.set_options(timeout=30_000)
    SCREENS.mkdir(parents=True, exist_ok=True)
    with chromium() as browser, tempfile.TemporaryDirectory() as folder:
        if not wanted or DEMO in wanted:
            take_demo(browser)
        for name in [name for name in wanted if name != DEMO] if wanted else SHOWN:
            with served(SHOWN[name], Path(folder) / name) as incident:
                for scheme in SCHEMES:
                    page = browser.new_page(viewport=SIZE, color_scheme=scheme)
                    for entry in (entry for entry in TABLE if "stream" in entry.signals):
                        file = SCREENS / f"{name}-{entry.path or 'overview'}-{scheme}.png"
                        keep(drawn_at(page, incident.address(entry.path)), file)
                    page.close()


if __name__ == "__main__":
    main(sys.argv[1:])
