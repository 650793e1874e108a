"""How quick the web app is, in a browser and of the server's own time, and what viewers cost the reading of events.

    python -m benchmarks.web [--blocks N] [--requests N] [--repeats N] [--viewers N] [--turns N]

One engine with that many blocks, and requests over four system prompts that they share. The service and its pages run
in one process, as in `monitor serve`. Debian's Chromium runs on the same two cores, and viewers without a browser
(benchmarks.viewers) separate the cost of the push from a browser's. Aims, as medians: first paint of the overview 1.5
s, a random moment on the block map 250 ms, another window over time 400 ms. `--turns 0` leaves out what viewers cost.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext

import uvicorn
from playwright.sync_api import Browser, Page

from benchmarks.machine import machine
from kvscope.dashboards.web.app import mount
from kvscope.dashboards.web.links import place_of, rfc3339
from kvscope.dashboards.web.rendering import Pages
from kvscope.lab.chromium import chromium
from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.base.process_limits import collect_rarely
from kvscope.monitor.contract.event_log import count_events
from kvscope.monitor.contract.wire import Batch
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.service.http_api import create_app

PAST_STEPS = 60
STEP_S = 0.5
TURN_STEPS = 60
PAUSE_S = 0.08
SETTLED_S = 3.0
AIMS_MS = {"overview, first paint": 1500, "block map, a random moment": 250, "over time, another window": 400}
SCRUB = """async (to) => {
  const scrub = document.getElementById("scrub"), began = performance.now();
  scrub.value = to;
  scrub.dispatchEvent(new Event("input", { bubbles: true }));
  scrub.dispatchEvent(new Event("change", { bubbles: true }));
  const there = () => Math.abs(scrub.parentElement.dataset.at - scrub.value) <= %d
    && document.getElementById("map").complete;
  while (!there()) await new Promise(requestAnimationFrame);
  return performance.now() - began;
}"""
WINDOW = """async (address) => {
  const began = performance.now(), search = new URL(address, location.href).search;
  const from = Date.parse(new URLSearchParams(search).get("from"));
  window.dash_clientside.set_props("url", { pathname: "/engine", search });
  const there = () => { const chart = document.getElementById("history");
    return chart && chart.layout && Math.abs(new Date(chart.layout.xaxis.range[0]) - from) < 2; };
  while (!there()) await new Promise(requestAnimationFrame);
  return performance.now() - began;
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--viewers", type=int, default=10)
    parser.add_argument("--turns", type=int, default=4)
    arguments = parser.parse_args()
    print(machine("dash", "playwright"))
    lab, watch = full(arguments.blocks, arguments.requests)
    collect_rarely()
    (engine,) = watch.engines()
    print(f"{arguments.blocks:,} blocks, {engine.running:,} requests running, {engine.waiting:,} waiting\n")
    print(f"{'ms':30}{'p50':>8}{'p95':>8}{'aim':>8}   CPU of the server: {'p50':>6}{'p95':>8}")
    with served(watch) as url, chromium() as browser:
        latencies(browser, url, watch, arguments.repeats)
        if arguments.turns:
            ingest(browser, url, lab, watch, arguments.viewers, arguments.turns)


def full(blocks: int, requests: int) -> tuple[Lab, Pipeline]:
    """Return an engine, and a service's state for it."""
    lab = Lab(total=blocks, block_size=16, max_num_seqs=requests * 9 // 10, max_num_batched_tokens=65_536, seed=5)
    systems = [[lab.rng.randrange(1000) for _ in range(320)] for _ in range(4)]
    length = min(560, 8 * blocks // requests)
    for number in range(requests):
        lab.arrive(systems[number % 4] + [number] * length, max_tokens=1000)
    for _ in range(PAST_STEPS):
        lab.step(STEP_S)
    watch = Pipeline()
    watch.feed(lab.frames)
    lab.frames.clear()
    return lab, watch


@contextmanager
def served(watch: Pipeline) -> Iterator[str]:
    app = create_app(watch, list)
    mount(app, watch)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


# -------------------------------------------------------------------- how quick


def latencies(browser: Browser, url: str, watch: Pipeline, repeats: int) -> None:
    rng = random.Random(7)
    (engine,) = watch.engines()
    points = watch.points(engine.engine)
    first, last = points[0].at_ns, points[-1].at_ns
    past = f"from={rfc3339(first)}&to={rfc3339(last)}"
    moments = [rng.randrange(first, last) // 1_000_000 for _ in range(repeats)]
    windows = []
    for _ in range(repeats):
        since = rng.randrange(first, last - 2_000_000_000)
        windows.append(f"/engine?from={rfc3339(since)}&to={rfc3339(rng.randrange(since + 10**9, last))}")

    def paint() -> list[float]:
        taken = []
        for _ in range(repeats):
            page = browser.new_page()
            began = time.perf_counter()
            page.goto(url, wait_until="commit")
            page.wait_for_selector("#engines tbody tr")
            taken.append((time.perf_counter() - began) * 1e3)
            page.close()
        return taken

    def scrub() -> list[float]:
        page = opened(browser, f"{url}/blocks?{past}", "#scrub")
        step = int(page.locator("#scrub").get_attribute("step") or 1)
        taken = [page.evaluate(SCRUB % (step + 1), moment) for moment in moments]
        page.close()
        return taken

    def change() -> list[float]:
        page = opened(browser, f"{url}/engine?{past}", "#history .plot-container, #history.js-plotly-plot")
        taken = [page.evaluate(WINDOW, window) for window in windows]
        page.close()
        return taken

    alone: dict[str, list[str]] = {
        "overview, first paint": ["/"] * repeats,
        "block map, a random moment": [f"/blocks?{past}&at={rfc3339(moment * 1_000_000)}" for moment in moments],
        "over time, another window": windows,
    }
    measures: dict[str, Callable[[], list[float]]] = dict(zip(alone, (paint, scrub, change), strict=True))
    for name, measure in measures.items():
        seen, rendered = measure(), [render_ms(watch, address) for address in alone[name]]
        p50, p95 = figures(seen)
        print(f"{name:30}{p50:8.0f}{p95:8.0f}{AIMS_MS[name]:8}{'':22}{'{:6.0f}{:8.0f}'.format(*figures(rendered))}")


def opened(browser: Browser, address: str, there: str) -> Page:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(address)
    page.wait_for_selector(there, timeout=120_000)  # ten at once, of a million blocks, while a stream is read
    return page


def render_ms(watch: Pipeline, address: str) -> float:
    """Measure the server's rendering for the first viewer: processor time, which other work on the machine does not
    slow.
    """

    async def make() -> float:
        began = time.process_time()
        await Pages(watch).page(place_of(address))
        return (time.process_time() - began) * 1e3

    with ThreadPoolExecutor(1) as thread:  # Playwright has a loop of its own in this one
        return thread.submit(asyncio.run, make()).result()


def figures(taken: list[float]) -> tuple[float, float]:
    return statistics.median(taken), statistics.quantiles(taken, n=20)[-1]


# -------------------------------------------------------------------- what viewers cost


def ingest(browser: Browser, url: str, lab: Lab, watch: Pipeline, viewers: int, turns: int) -> None:
    """Measure events a second that are entered as fast as may be, a step at a time with a pause between, without
    viewers and with some, in turns.
    """
    requests = len(lab.scheduler.requests)
    looks: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "no page": nullcontext,
        f"{viewers} viewers of one view": lambda: connected(url, ["/engine"] * viewers),
        f"{viewers} viewers of different views": lambda: connected(url, [f"/{view}" for view in VIEWS[:viewers]]),
        f"{viewers} tabs of a browser": lambda: tabs(browser, url, viewers),
    }
    rates: dict[str, list[float]] = {name: [] for name in looks}
    for _ in range(turns):
        for name, look in looks.items():
            steps = more(lab, requests)
            events, took = 0, 0.0
            with look():
                time.sleep(SETTLED_S)
                for batches in steps:
                    began = time.perf_counter()
                    watch.feed(batches)
                    took += time.perf_counter() - began
                    events += sum(count_events(batch.runs.cast("i")) for batch in batches)
                    time.sleep(PAUSE_S)
            rates[name].append(events / took)
    unwatched = rates["no page"]
    print(f"\n{'entered as fast as may be':34}{'events/s':>10}{'ratio':>8}{'from':>8}{'to':>6}")
    for name, seen in rates.items():
        ratios = [some / alone for some, alone in zip(seen, unwatched, strict=True)]
        most, least = max(ratios), min(ratios)
        print(f"{name:34}{statistics.median(seen):10,.0f}{statistics.median(ratios):8.2f}{least:8.2f}{most:6.2f}")


def more(lab: Lab, requests: int) -> list[list[Batch]]:
    """Return the engine's events in its next steps, where each request that ends makes room for another."""
    steps = []
    for _ in range(TURN_STEPS):
        for number in range(requests - len(lab.scheduler.requests)):
            lab.arrive([number] * 400, max_tokens=1000)
        lab.step(STEP_S)
        steps.append([frame for frame in lab.frames if isinstance(frame, Batch)])
        lab.frames.clear()
    return steps


@contextmanager
def connected(url: str, paths: list[str]) -> Iterator[None]:
    """Connect viewers without a browser, and wait until all of them have received something."""
    command = [sys.executable, "-m", "benchmarks.viewers", url, *paths]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if not process.stdout.readline():
            raise SystemExit("the viewers could not connect")
        yield
        process.stdin.close()


@contextmanager
def tabs(browser: Browser, url: str, viewers: int) -> Iterator[None]:
    """Viewers in one browser, which has the same two cores."""
    pages = [opened(browser, f"{url}/{view}", "#view h1") for view in VIEWS[:viewers]]
    yield
    for page in pages:
        page.close()


VIEWS = (
    "",
    "engine",
    "blocks",
    "held",
    "requests",
    "prefixes",
    "memory",
    "findings",
    "engine?from=now-1m",
    "blocks?colour=owner",
)


if __name__ == "__main__":
    main()
