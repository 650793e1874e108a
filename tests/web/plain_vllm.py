"""A vLLM without the probe under load, and the service that reads its metrics page."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

import httpx2

from tests.probes.test_vllm_live import PATIENCE_S, Server
from tests.web.parts import service

TEMPLATE: Final = [7] * 96
"""Three blocks that all prompts share."""


class Clients:
    """Some clients who ask one completion after another, with a pause between."""

    def __init__(self, url: str, count: int, pause_s: float) -> None:
        self.url, self.pause_s = url, pause_s
        self.answered = 0
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,), daemon=True) for number in range(count)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_raised: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        rng = random.Random(number)
        with httpx2.Client(timeout=PATIENCE_S, trust_env=False) as client:
            while not self._stopping.is_set():
                prompt = TEMPLATE + [rng.randrange(10, 100) for _ in range(rng.randrange(32, 400))]
                body = {"model": "tiny", "prompt": prompt, "max_tokens": rng.randrange(20, 120), "ignore_eos": True}
                with suppress(httpx2.HTTPError):  # the engine stops, and who asks with it
                    client.post(f"{self.url}/v1/completions", json=body).raise_for_status()
                    self.answered += 1
                self._stopping.wait(rng.uniform(0, 2 * self.pause_s))


class PlainVllm(NamedTuple):
    """The address of the service, the engine, and its clients."""

    url: str
    server: Server
    clients: Clients


@contextmanager
def served_plain(directory: Path, count: int = 4, pause_s: float = 1.0) -> Iterator[PlainVllm]:
    """vLLM without the probe, with so many clients, and `monitor serve --metrics` beside it."""
    server = Server(directory, probe=False)
    try:
        server.wait()
        metrics = f"{server.url}/metrics"
        with Clients(server.url, count, pause_s) as clients, service("--metrics", metrics) as url:
            yield PlainVllm(url, server, clients)
    finally:
        server.stop()
