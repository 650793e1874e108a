"""Follows a page of docs/start word for word.

The page's own text is the script. A `console` block is run: what serves stays in the background until the page is over,
everything else must exit with 0 or, for the doctor, with 1 or 3. Each line of a `text` block must be in the output of
the command before it, whatever its numbers and line breaks are. `<!-- open URL -->` and `<!-- click TEXT -->` are done
in a browser, and the picture below is what it shows.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from playwright.sync_api import Page, expect

ROOT: Final = Path(__file__).parent.parent
STEP: Final = re.compile(r"```(console|text)\n(.*?)```|<!-- (open|click) (.+?) -->\n!\[[^\]]*\]\(([^)]+)\)", re.DOTALL)
BACKGROUND: Final = re.compile(r"^make demo$| serve ")
PATIENCE_S: Final = 300.0


class Step(NamedTuple):
    """kind: console, text, open or click. text: the commands, lines, address or link. picture: its path, if any."""

    kind: str
    text: str
    picture: str = ""


def steps_of(page: str) -> list[Step]:
    """Return the steps of a page, in its order."""
    return [Step(found[1] or found[3], (found[2] or found[4]).strip(), found[5] or "") for found in STEP.finditer(page)]


def plain(text: str) -> str:
    """Return a text with each number as `#` and without its line breaks and bars."""
    return " ".join(re.sub(r"\d[\d,.]*", "#", re.sub(r"[█▏▎▍▌▋▊▉]+", " ", text)).split())


def missing_lines(expected: str, printed: str) -> list[str]:
    """Return the lines of a `text` block that the output does not have. A line ends at `…`."""
    shown = plain(printed)
    return [line for line in expected.splitlines() if plain(line.partition("…")[0]) not in shown]


class Follower:
    """Follows a page. replace: what stands for a text of a command, such as a port that is taken here."""

    def __init__(self, folder: Path, replace: Mapping[str, str], environment: Mapping[str, str]) -> None:
        self.folder, self.replace = folder, dict(replace)
        self.environment = {**os.environ, "COLUMNS": "80", **environment}
        self.printed = ""
        self._background: list[tuple[subprocess.Popen[bytes], Path]] = []

    def own(self, text: str) -> str:
        """Return a command or an address of the page as it is run here."""
        stated = "|".join(re.escape(each) for each in sorted(self.replace, key=len, reverse=True))
        return re.sub(stated, lambda found: self.replace[found[0]], text)

    def run(self, command: str) -> None:
        """Run one command of the page, in the checkout."""
        own = self.own(command)
        assert "pip install" not in own or "--target" in own, f"{own}: would change the environment of the tests"
        if BACKGROUND.search(command):
            log = self.folder / f"background-{len(self._background)}.log"
            with log.open("wb") as out:
                process = subprocess.Popen(
                    own, shell=True, cwd=ROOT, env=self.environment, stdout=out, stderr=out, start_new_session=True
                )
            self._background.append((process, log))
            return
        done = subprocess.run(own, shell=True, cwd=ROOT, env=self.environment, capture_output=True, text=True)
        allowed = (0, 1, 3) if " doctor " in f"{own} " else (0,)
        assert done.returncode in allowed, f"{own}\n{done.stdout}{done.stderr}"
        self.printed = done.stdout

    def log(self) -> str:
        """Return what the last program in the background has printed."""
        process, path = self._background[-1]
        text = path.read_text(errors="replace")
        assert process.poll() is None, text
        return text

    def until(self, holds: Callable[[str], bool]) -> None:
        """Wait until that is so of what the last program in the background has printed."""
        ends = time.monotonic() + PATIENCE_S
        while not holds(self.log()):
            assert time.monotonic() < ends, self.log()
            time.sleep(0.5)

    def check(self, expected: str) -> None:
        """Compare a `text` block with what the command before it printed."""
        printed = self.printed or self.log()
        assert missing_lines(expected, printed) == [], printed

    def look(self, page: Page, step: Step) -> None:
        """Open an address, or follow a link, and wait for the view."""
        if step.kind == "open":
            page.goto(self.own(step.text))
        else:
            page.get_by_role("link", name=step.text).first.click()
        expect(page.locator("#view h1, #view h2").first).to_be_visible()
        page.wait_for_timeout(500)

    def stop_last(self) -> None:
        """End the program that was started last, as Ctrl-C in its terminal does."""
        process, _ = self._background.pop()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.printed = ""

    def stop(self) -> None:
        """End everything."""
        while self._background:
            self.stop_last()
