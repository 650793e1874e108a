"""A long mixed load on a real engine process: `make prove` runs it for 20 minutes, SOAK_SECONDS=N for N seconds.

Clients send prompts short and long, some of them with a shared beginning; some go away in the middle, some give up
after a moment. The pool is small enough that requests are preempted. At the end the engine is left alone.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import threading
import time

import httpx2
import psutil
import pytest

from kvscope.monitor.detectors.findings import severity_at_least
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.sources.live_stream import LiveStream
from tests.engine.process import EngineProcess

CLIENTS = 12
TRUE = {"sizing.kv-too-small"}
"""May be found: the pool is too small on purpose, and how much that costs varies from minute to minute."""
SECONDS = float(os.environ.get("SOAK_SECONDS", "1200"))
MEMORY_EVERY_S = 5.0
WARM_UP = 0.5
"""The share of the soak in which what is bounded still fills up: the events kept for replay take the longest."""
MAX_GROWTH = 0.02
"""Resident memory may drift by this share of itself over the soak: allocators are not still."""


class Client(threading.Thread):
    """Asks, and is a poor listener: reads to the end, goes away in the middle, or gives up early."""

    def __init__(self, url: str, seed: int, stopping: threading.Event) -> None:
        super().__init__()
        self.rng = random.Random(seed)
        self.client = httpx2.Client(base_url=url, trust_env=False)
        self.stopping = stopping
        self.ends = {"answered": 0, "went away": 0, "gave up": 0}

    def run(self) -> None:
        while not self.stopping.is_set():
            self.ask()
        self.client.close()

    def ask(self) -> None:
        rng = self.rng
        shared = "the same beginning for everybody " * 8 if rng.random() < 0.5 else ""
        length = rng.choice((20, 60, 200, 700))
        prompt = shared + "".join(rng.choices("abcdefgh ", k=rng.randint(1, length)))
        asked = {"prompt": prompt, "max_tokens": rng.randint(1, 120), "ignore_eos": True}
        body = {"model": "tiny", "stream": True, **asked}
        patience = rng.choice((0.05, 0.5)) if rng.random() < 0.2 else 60.0
        goes_away = rng.random() < 0.2
        try:
            with self.client.stream("POST", "/v1/completions", json=body, timeout=patience) as response:
                for number, _ in enumerate(response.iter_lines()):
                    if goes_away and number > 6:
                        self.ends["went away"] += 1
                        return
            self.ends["answered"] += 1
        except httpx2.TimeoutException:
            self.ends["gave up"] += 1


@pytest.mark.prove
def test_a_long_mixed_load_leaves_nothing_behind(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        EngineProcess(
            "--num-gpu-blocks-override", "181", "--max-num-seqs", "16", "--kv-connector", "host", "--replay-mib", "4"
        ) as engine,
        contextlib.ExitStack() as stack,
    ):
        stream, watch = LiveStream(engine.events, engine.replay), Pipeline()
        stack.callback(stream.close)
        stopping = threading.Event()
        clients = [Client(engine.url, seed, stopping) for seed in range(CLIENTS)]
        process = psutil.Process(engine.process.pid)
        memory: list[tuple[float, int]] = []
        for client in clients:
            client.start()
        started = time.monotonic()
        while (now := time.monotonic() - started) < SECONDS:
            watch.feed(received.frame for received in stream.receive(0.1))
            if not memory or now - memory[-1][0] >= MEMORY_EVERY_S:
                memory.append((now, process.memory_info().rss))
        stopping.set()
        for client in clients:
            client.join()
        at_rest = time.monotonic() + 5
        while time.monotonic() < at_rest:
            watch.feed(received.frame for received in stream.receive(0.1))
        watch.settle()
        (view,) = watch.engines()
        found = [f.code for f in watch.findings() if severity_at_least(f.severity, "warning")]
        balance = view.balance
        assert balance is not None
        late = [(at, size) for at, size in memory if at >= WARM_UP * SECONDS]
        slope = statistics.linear_regression([at for at, _ in late], [size for _, size in late]).slope
        ends = {end: sum(client.ends[end] for client in clients) for end in clients[0].ends}
        with capsys.disabled():
            print(
                f"\nsoak of {SECONDS:.0f} s: {ends}, {view.preemptions} preemptions, {view.step} steps,"
                f" {view.batches_lost} batches lost; resident memory {late[-1][1] / 2**20:.1f} MiB,"
                f" slope {slope * 3600 / 2**20:+.2f} MiB an hour; at rest {balance}; found {set(found) or 'nothing'}"
            )
        assert all(ends.values())
        assert view.preemptions
        assert view.batches_lost == view.events_dropped == 0
        assert balance.free + balance.cached_idle + balance.reserved == balance.total
        assert (balance.unaccounted, balance.unexplained_references) == (0, 0)
        assert set(found) <= TRUE
        assert abs(slope) * SECONDS <= MAX_GROWTH * late[-1][1]
