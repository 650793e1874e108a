"""How quick the web app is, in a browser and of the server's own time, and what viewers cost the reading of events.

    python -m benchmarks.web [--blocks N] [--requests N] [--repeats N] [--viewers N]

One engine with so many blocks, and requests over four system prompts that they share; the service and its pages in one
process, as `monitor serve` has them; Debian's Chromium on the same two cores. Aims, as medians: first paint of the
overview 1.5 s, a random moment on the block map 250 ms, another window over time 400 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import uvicorn
from playwright.sync_api import Browser, Page, sync_playwright

from benchmarks.machine import machine
from dashboards.web.app import mount
from dashboards.web.links import place_of, rfc3339
from dashboards.web.rendering import Pages
from monitor.api import create_app
from monitor.events.log import count_events
from monitor.events.wire import Batch
from monitor.service import collect_rarely
from monitor.watch import Watch
from tests.lab import Lab

FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
PAST_STEPS = 60
STEP_S = 0.5
INGEST_S = 5.0
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
    arguments = parser.parse_args()
    path = shutil.which("chromium")
    if path is None:
        raise SystemExit("there is no chromium here: apt-get install chromium")
    print(machine("dash", "playwright"))
    lab, watch = full(arguments.blocks, arguments.requests)
    collect_rarely()
    (engine,) = watch.engines()
    print(f"{arguments.blocks:,} blocks, {engine.running:,} requests running, {engine.waiting:,} waiting\n")
    print(f"{'ms':30}{'p50':>8}{'p95':>8}{'aim':>8}   CPU of the server: {'p50':>6}{'p95':>8}")
    with served(watch) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        latencies(browser, url, watch, arguments.repeats)
        ingest(browser, url, lab, watch, arguments.viewers)
        browser.close()


def full(blocks: int, requests: int) -> tuple[Lab, Watch]:
    """An engine, and what a service knows of it."""
    lab = Lab(total=blocks, block_size=16, max_num_seqs=requests * 9 // 10, max_num_batched_tokens=65_536, seed=5)
    systems = [[lab.rng.randrange(1000) for _ in range(320)] for _ in range(4)]
    length = min(560, 8 * blocks // requests)
    for number in range(requests):
        lab.arrive(systems[number % 4] + [number] * length, max_tokens=1000)
    for _ in range(PAST_STEPS):
        lab.step(STEP_S)
    watch = Watch()
    watch.feed(lab.frames)
    lab.frames.clear()
    return lab, watch


@contextmanager
def served(watch: Watch) -> Iterator[str]:
    app = create_app(watch, list)
    mount(app, watch)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


# -------------------------------------------------------------------- how quick


def latencies(browser: Browser, url: str, watch: Watch, repeats: int) -> None:
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
    page.wait_for_selector(there)
    return page


def render_ms(watch: Watch, address: str) -> float:
    """By the server, for whoever is the first to ask: of a processor, which other work on the machine does not slow."""

    async def make() -> float:
        began = time.process_time()
        await Pages(watch).page(place_of(address))
        return (time.process_time() - began) * 1e3

    with ThreadPoolExecutor(1) as thread:  # Playwright has a loop of its own in this one
        return thread.submit(asyncio.run, make()).result()


def figures(taken: list[float]) -> tuple[float, float]:
    return statistics.median(taken), statistics.quantiles(taken, n=20)[-1]


# -------------------------------------------------------------------- what viewers cost


def ingest(browser: Browser, url: str, lab: Lab, watch: Watch, viewers: int) -> None:
    """Events a second that are entered as fast as may be, by nobody looking on and by so many, in turns."""
    said: list[Batch] = []
    while sum(count_events(batch.runs.cast("i")) for batch in said) < 400_000:
        lab.step(STEP_S)
        said += [frame for frame in lab.frames if isinstance(frame, Batch)]
        lab.frames.clear()
    share = len(said) // 4
    rates: dict[int, list[float]] = {0: [], viewers: []}
    pages: list[Page] = []
    for turn in range(4):
        looking = viewers if turn % 2 else 0
        pages = [opened(browser, f"{url}/{view}", "#view h1") for view in VIEWS[:looking]] if looking else []
        batches = said[turn * share : (turn + 1) * share]
        events = sum(count_events(batch.runs.cast("i")) for batch in batches)
        began = time.perf_counter()
        for batch in batches:
            watch.feed([batch])
        rates[looking].append(events / (time.perf_counter() - began))
        for page in pages:
            page.close()
    nobody, some = (statistics.mean(rates[looking]) for looking in (0, viewers))
    print(
        f"\nentered as fast as may be: {nobody:,.0f} events/s with nobody looking on, {some:,.0f} with {viewers}"
        f" viewers, {some / nobody:.2f} times as many"
    )


VIEWS = ("", "engine", "blocks", "held", "requests", "prefixes", "memory", "findings", "engine", "blocks") * 3


if __name__ == "__main__":
    main()
