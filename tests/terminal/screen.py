"""`monitor top` under a pilot, and what stands on its screen."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from html import unescape

from textual.pilot import Pilot

from kvscope.monitor.questions.query import Query
from kvscope.monitor.terminal.top_screen import Looker, Top

SIZE = (80, 24)
CELL = 12.2
"""So wide is a character on a screenshot."""


class Still:
    """What is over, as something that goes on: it says nothing more."""

    engine = ""

    def __init__(self, query: Query) -> None:
        self.query = query

    def listen(self, timeout_s: float) -> str:
        time.sleep(timeout_s / 10)
        return ""

    def close(self) -> None:
        """Nothing is open."""


def screen_of(app: Top) -> str:
    """What stands on it, line by line."""
    lines: dict[float, list[tuple[float, str]]] = {}
    text = re.compile(r'<text class="[^"]*-r\d+" x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)</text>')
    for x, y, words in text.findall(app.export_screenshot()):
        lines.setdefault(float(y), []).append((float(x), unescape(words).replace("\xa0", " ")))
    shown = []
    for _, parts in sorted(lines.items()):
        line = ""
        for x, words in sorted(parts):
            line = line.ljust(round(x / CELL)) + words
        shown.append(line.rstrip())
    return "\n".join(shown) + "\n"


def drive(looker: Looker, steps: Callable[[Top, Pilot[None]], Awaitable[None]]) -> None:
    """The app under a pilot, as it would run in a terminal of that size."""

    async def run() -> None:
        app = Top(looker)
        async with app.run_test(size=SIZE) as pilot:
            await steps(app, pilot)

    asyncio.run(run())


async def until(pilot: Pilot[None], holds: Callable[[], object]) -> None:
    for _ in range(600):
        if holds():
            return
        await pilot.pause(0.05)
    raise AssertionError("it never came")


def shown(query: Query) -> str:
    """The screen as it is when all there is has been shown."""
    screens: list[str] = []

    async def look(app: Top, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "Listening" not in screen_of(app) and "Quit" in screen_of(app))
        screens.append("")
        while screen_of(app) != screens[-1]:
            screens.append(screen_of(app))
            await pilot.pause(0.2)

    looker = Looker(Still(query))
    looker.start()
    try:
        drive(looker, look)
    finally:
        looker.stop()
    return screens[-1]
