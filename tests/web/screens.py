"""Pictures of every view during two incidents, in light and dark, for docs/screens: python -m tests.web.screens [NAME…]

A picture is replaced only if it has changed to the eye: letters are not drawn alike everywhere, to the last pixel.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

from PIL import Image, ImageChops, ImageStat
from playwright.sync_api import Page, expect

from kvscope.dashboards.web.view_registry import TABLE
from tests.web.incidents import Incident, served
from tests.web.parts import chromium

SCREENS: Final = Path(__file__).parent.parent.parent / "docs" / "screens"
SHOWN: Final = {"leak": "leak.finished-held:every=3 busy", "thrash": "thrash.preemption:every=2 half"}
SCHEMES: Final = ("light", "dark")
SIZE: Final = {"width": 1440, "height": 900}
COLOURS: Final = 256
SAME_WITHIN: Final = 2.0
"""Of 255, on average over a picture."""


def take(page: Page, incident: Incident, path: str) -> Image.Image:
    """The view at that path, as it stands when it has been drawn."""
    page.goto(incident.address(path))
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


def main(wanted: list[str]) -> None:
    """Take those of the incidents that are named, or all."""
    expect.set_options(timeout=30_000)
    SCREENS.mkdir(exist_ok=True)
    with chromium() as browser, tempfile.TemporaryDirectory() as folder:
        for name in wanted or SHOWN:
            with served(SHOWN[name], Path(folder) / name) as incident:
                for scheme in SCHEMES:
                    page = browser.new_page(viewport=SIZE, color_scheme=scheme)
                    for entry in (entry for entry in TABLE if "stream" in entry.signals):
                        file = SCREENS / f"{name}-{entry.path or 'overview'}-{scheme}.png"
                        keep(take(page, incident, entry.path), file)
                    page.close()


if __name__ == "__main__":
    if shutil.which("chromium") is None:
        sys.exit("docs/screens is left as it is: there is no chromium (apt-get install chromium)")
    main(sys.argv[1:])
