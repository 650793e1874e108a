"""What the page's tests are made of: an engine in real time, the real service, and a browser that keeps account."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Page, Response

from kvscope.dashboards.web.links import PagePlace
from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.probes.publisher import Publisher

ENGINE = "lab@127.0.0.1:0/0"
LEAK = "leak.finished-held"


def address(view: str, **fields: str) -> str:
    """Of a view of the engine."""
    return PagePlace(view, ENGINE, **fields).but()


class Engine:
    """A lab in real time that publishes, stepped by a thread of its own under whatever load it is given."""

    def __init__(self, path: Path, name: str = ENGINE, **lab: Any) -> None:
        self.lab = Lab(clock=time, pack=False, engine=name, **lab)
        self.events = f"ipc://{path}/events"
        self.publisher = Publisher(
            self.lab.log,
            name,
            self.lab.vitals,
            events=self.events,
            replay=f"ipc://{path}/events-replay",
            heartbeat_s=0.2,
        )
        self.live = 6
        """How many requests are kept under way."""
        self._rng = random.Random(1)
        self._calls: list[Callable[[], Any]] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Engine:
        self.publisher.start()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stopping.set()
        self._thread.join()
        self.publisher.close()

    def soon(self, call: Callable[[], Any]) -> None:
        """Do this to the lab between two steps."""
        self._calls.append(call)

    def _run(self) -> None:
        while not self._stopping.is_set():
            while self._calls:
                self._calls.pop(0)()
            under_way = len(self.lab.scheduler.running) + len(self.lab.scheduler.waiting)
            if under_way < self.live and self._rng.random() < 0.3:
                self.lab.arrive(self._rng.randint(4, 40), max_tokens=self._rng.randint(20, 120))
            self.lab.step()
            self._stopping.wait(0.02)


@contextmanager
def service(*arguments: str) -> Iterator[str]:
    """`monitor serve` with these arguments, on a free port of this machine; its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kvscope.monitor", "serve", "--port", "0", *arguments],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    stated = []
    try:
        for line in process.stderr:
            stated.append(line)
            if found := re.search(r"serves (http://\S+),", line):
                break
        else:
            raise AssertionError(f"monitor serve did not start: {''.join(stated)}")
        drain = threading.Thread(target=process.stderr.read, daemon=True)
        drain.start()
        try:
            yield found[1]
        finally:
            process.terminate()
            drain.join()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


class Account:
    """Everything that a page asked for, and everything that went wrong in it."""

    def __init__(self, page: Page) -> None:
        self.asked: list[str] = []
        self.wrong: list[str] = []
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("websocket", lambda socket: self.asked.append(socket.url))
        page.on("requestfailed", lambda request: self.wrong.append(f"failed: {request.url}"))
        page.on("response", self._answered)
        page.on("console", lambda line: self.wrong.append(line.text) if line.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.wrong.append(str(error)))

    def _answered(self, response: Response) -> None:
        if response.status >= 400:
            self.wrong.append(f"{response.status}: {response.url}")

    def elsewhere(self, address: str) -> list[str]:
        """What was asked of anybody but the service at `address`; what is inside the page itself is asked of nobody."""
        home = urlsplit(address).netloc
        parts = [urlsplit(url) for url in self.asked]
        return [part.geturl() for part in parts if part.scheme not in ("data", "blob") and part.netloc != home]


def fits(page: Page) -> None:
    """Waits until the page is no wider than its window: a chart follows a change of that a moment later."""
    for _ in range(100):  # the page's policy allows no wait_for_function: that would evaluate a text in the page
        if page.evaluate("document.documentElement.scrollWidth <= innerWidth"):
            return
        page.wait_for_timeout(50)
    wide = "e => e.getBoundingClientRect().right > innerWidth"
    raise AssertionError(page.evaluate(f"[...document.querySelectorAll('*')].filter({wide}).map(e => e.outerHTML)")[:5])
