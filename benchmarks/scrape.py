"""The cost of a scrape of /metrics beside a full engine: collecting under the ledgers' lock, and writing the page.

    python -m benchmarks.scrape [--repeats N]

The engine has 100,000 blocks and 2,000 requests over four system prompts that they share. Most run, and the rest wait.
The aim is a median below 20 ms.
"""

from __future__ import annotations

import argparse
import statistics
import time

from prometheus_client import CollectorRegistry, generate_latest

from benchmarks.machine import machine
from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.outputs.prometheus import WatchCollector
from kvscope.monitor.questions.pipeline import Pipeline

BLOCKS = 100_000
REQUESTS = 2_000
AIM_MS = 20.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200)
    repeats = parser.parse_args().repeats
    print(machine("prometheus-client"))
    watch = full()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(WatchCollector(watch))
    collector = WatchCollector(watch)
    times, locked = [], []
    for _ in range(repeats):
        began = time.perf_counter()
        page = generate_latest(registry)
        times.append((time.perf_counter() - began) * 1e3)
        began = time.perf_counter()
        list(collector.collect())
        locked.append((time.perf_counter() - began) * 1e3)
    series = sum(not line.startswith(b"#") for line in page.splitlines())
    (engine,) = watch.engines()
    assert engine.balance is not None
    print(f"{engine.balance.total} blocks, {engine.running} requests running, {engine.waiting} waiting")
    for name, taken in (("scrape", times), ("of which collecting", locked)):
        p95 = statistics.quantiles(taken, n=20)[-1]
        print(f"{name:20} p50 {statistics.median(taken):6.1f} ms   p95 {p95:6.1f} ms")
    print(f"{series} series; aim p50 {AIM_MS:g} ms")


def full() -> Pipeline:
    """Return a service's state for such an engine."""
    lab = Lab(total=BLOCKS, block_size=16, max_num_seqs=REQUESTS - 200, max_num_batched_tokens=65_536, seed=5)
    systems = [[lab.rng.randrange(1000) for _ in range(320)] for _ in range(4)]
    for number in range(REQUESTS):
        lab.arrive(systems[number % 4] + [number] * 560, max_tokens=1000)
    for _ in range(40):
        lab.step()
    watch = Pipeline()
    watch.feed(lab.frames)
    return watch


if __name__ == "__main__":
    main()
