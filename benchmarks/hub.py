"""A hub with a thousand engines: first paint, an update, memory, and deep questions beside a hundred others.

    python -m benchmarks.hub [--engines N] [--blocks N] [--requests N] [--repeats N] [--others N] [--seconds S]

A real nats-server, `monitor hub` in a process of its own, two real agents with four engines each, whose pools are full,
and a third process that sends the points of all other engines as agents would. Debian's Chromium on the same cores.
Aims: first paint of the fleet view 1.5 s, an update 250 ms, memory 1 GiB, a deep question 500 ms (p95).
"""

from __future__ import annotations

import argparse
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx2
import psutil
from playwright.sync_api import Browser

from benchmarks.machine import machine
from kvscope.dashboards.web.views.fleet_view import GROUPINGS
from kvscope.lab.chromium import chromium
from tests.fleet.nats_servers import bus_config_of, one_server, set_up

AGENTS = 2
ENGINES_EACH = 4
MIB = 1 << 20
QUESTIONS = ("block_map", "requests", "explain", "points")
GROUP = """async (by) => {
  const began = performance.now();
  window.dash_clientside.set_props("url", { pathname: "/fleet", search: `?by=${by}` });
  const there = () => { const form = document.querySelector("select[name=by]");
    return form && form.value === by && document.querySelectorAll(".cell").length >= %d; };
  while (!there()) await new Promise(requestAnimationFrame);
  return performance.now() - began;
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=1_000)
    parser.add_argument("--blocks", type=int, default=20_000)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--others", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    print(machine("dash", "nats-py", "playwright"))
    with ExitStack() as stack:
        server = stack.enter_context(one_server(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "nats"))
        set_up(bus_config_of([server]))
        names = []
        for number in range(AGENTS):
            sizes = map(str, (ENGINES_EACH, arguments.blocks, arguments.requests))
            stack.enter_context(fleet_process("answer", server.url, f"edge-{number}", *sizes))
            names += [f"edge-{number}-{engine}@10.0.0.1:8000/0" for engine in range(ENGINES_EACH)]
        stack.enter_context(fleet_process("replay", server.url, str(arguments.engines - len(names))))
        hub, url = stack.enter_context(hub_process(server.url))
        client = stack.enter_context(httpx2.Client(base_url=url, trust_env=False, timeout=30))
        while len(client.get("/api/engines").json()) < arguments.engines:
            time.sleep(0.2)
        print(f"{arguments.engines:,} engines; {len(names)} of them real, with {arguments.blocks:,} blocks each\n")
        print(f"{'':44}{'p50':>8}{'p95':>8}{'aim':>8}{'CPU':>8}   each, of the hub")
        process = psutil.Process(hub.pid)

        def show(name: str, measure: Callable[[], list[float]], aim: str = "") -> None:
            before = cpu_s(process)
            taken = measure()
            each_ms = (cpu_s(process) - before) * 1e3 / len(taken)
            p50, p95 = statistics.median(taken), statistics.quantiles(taken, n=20)[-1]
            print(f"{name:44}{p50:8.0f}{p95:8.0f}{aim:>8}{each_ms:8.0f}   {len(taken):,} measured", flush=True)

        with chromium() as browser:
            show("fleet view, first paint (ms)", lambda: paints(browser, url, arguments.repeats), "1500")
            show("fleet view, another grouping (ms)", lambda: updates(browser, url, arguments), "250")
        show("fleet_overview over HTTP (ms)", lambda: answers(client, 4 * arguments.repeats))
        show("deep question, alone (ms)", lambda: deep(url, names, 0, arguments.seconds))
        beside = f"deep question beside {arguments.others} others (ms)"
        show(beside, lambda: deep(url, names, arguments.others, arguments.seconds), "500")
        print(f"{'memory of the hub (MiB)':44}{process.memory_info().rss / MIB:8.0f}{'':8}{1024:8}")
        before = cpu_s(process)
        time.sleep(10)
        print(f"{'processor of the hub, no viewer (cores)':44}{(cpu_s(process) - before) / 10:8.2f}")
        print(f"load at the end: {os.getloadavg()[0]:.1f}")


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextmanager
def fleet_process(*arguments: str) -> Iterator[None]:
    command = [sys.executable, "-m", "benchmarks.fleet_process", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdin is not None
        assert started.stdout is not None
        try:
            assert started.stdout.readline() == "ready\n"
            yield
        finally:
            started.stdin.close()


@contextmanager
def hub_process(nats: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "kvscope.monitor", "hub", "--nats", nats, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as started:
        try:
            assert started.stderr is not None
            address = re.search(r"http://127\.0\.0\.1:\d+", started.stderr.readline())
            assert address is not None
            yield started, address[0]
        finally:
            started.terminate()


def paints(browser: Browser, url: str, repeats: int) -> list[float]:
    taken = []
    for _ in range(repeats):
        page = browser.new_page()
        began = time.perf_counter()
        page.goto(url, wait_until="commit")
        page.wait_for_selector("#engines tbody tr")
        taken.append((time.perf_counter() - began) * 1e3)
        page.close()
    return taken


def updates(browser: Browser, url: str, arguments: argparse.Namespace) -> list[float]:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{url}/fleet")
    page.wait_for_selector("#engines tbody tr")
    groupings = [by for by in GROUPINGS if by != GROUPINGS[0]]
    chosen = (groupings[number % len(groupings)] for number in range(arguments.repeats * 2))
    taken = [page.evaluate(GROUP % arguments.engines, by) for by in chosen]
    page.close()
    return taken


def answers(client: httpx2.Client, repeats: int) -> list[float]:
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        client.get("/api/fleet_overview").raise_for_status()
        taken.append((time.perf_counter() - began) * 1e3)
    return taken


def deep(url: str, names: list[str], others: int, seconds: float) -> list[float]:
    """Milliseconds of each question of one client, while others ask, each a second after its last answer."""
    ended = threading.Event()
    threads = [threading.Thread(target=_ask, args=(url, names, number, ended, 1.0, [])) for number in range(others)]
    for thread in threads:
        thread.start()
    taken: list[float] = []
    measured = threading.Thread(target=_ask, args=(url, names, -1, ended, 0.1, taken))
    time.sleep(min(2.0, seconds / 4))
    measured.start()
    time.sleep(seconds)
    ended.set()
    for thread in (*threads, measured):
        thread.join()
    return taken


def _ask(url: str, names: list[str], seed: int, ended: threading.Event, pause_s: float, taken: list[float]) -> None:
    drawn = random.Random(seed)
    with httpx2.Client(base_url=url, trust_env=False, timeout=30) as client:
        while not ended.wait(drawn.uniform(0.5, 1.5) * pause_s):
            began = time.perf_counter()
            answer = client.get(f"/api/{drawn.choice(QUESTIONS)}", params={"engine": drawn.choice(names)})
            taken.append((time.perf_counter() - began) * 1e3)
            answer.raise_for_status()


if __name__ == "__main__":
    main()
