"""A real engine and `monitor serve` whose wall clocks libfaketime moves: the leak is found on time all the same.

The monotonic clocks stay right, as they do where NTP or a person steps the time of day. Each process reads its offset
from a file at every call, so a test moves one clock while the other is right.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx2
import pytest

from kvscope.lab.faked_clock import LIBRARY, FakedClock
from kvscope.monitor.questions.client import ServiceClient
from kvscope.monitor.questions.schema import EngineView
from tests.engine.process import EngineProcess
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.skipif(LIBRARY is None, reason="libfaketime is not installed: apt-get install libfaketime")
LEAK, CLOCK_JUMP = "leak.finished-held", "blind.clock-jump"
PENDING = f"{LEAK}.grace_s=2"
FALSE_ALARMS = {"stuck.engine-stalled", "blind.name-clash", "blind.reader-failed"}
MOVED = [
    *(pytest.param(offset, marks=pytest.mark.slow) for offset in ("+1d", "-1h", "+0 x1.0005")),
    *(pytest.param(offset, marks=pytest.mark.prove) for offset in ("+1h", "-1d")),
]
"""Forwards, backwards and too fast; how far makes little difference."""


@contextmanager
def leaking_engine(clock: FakedClock, path: Path) -> Iterator[EngineProcess]:
    """An engine whose connector loses every second completion, and clients that keep asking it."""
    arguments = ("--kv-connector", "host", "--fault", f"{LEAK}:every=2:limit=20", "--num-gpu-blocks-override", "500")
    with EngineProcess(
        *arguments, "--events", f"ipc://{path}/events", engine_id="faked", environment=clock.environment
    ) as engine:
        stopping = threading.Event()

        def ask() -> None:
            with httpx2.Client(base_url=engine.url, timeout=60, trust_env=False) as client:
                for number in range(10_000):
                    if stopping.wait(0.1):
                        return
                    prompt = f"request {number % 7} " * 8
                    client.post("/v1/completions", json={"model": "tiny", "prompt": prompt, "max_tokens": 8})

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            yield engine
        finally:
            stopping.set()
            asking.join()


@contextmanager
def monitor(clock: FakedClock, path: Path) -> Iterator[ServiceClient]:
    command = [sys.executable, "-m", "kvscope.monitor", "serve", "--port", "0"]
    with subprocess.Popen(
        [*command, "--events", f"ipc://{path}/events", "--set", PENDING],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=os.environ | clock.environment,
    ) as process:
        assert process.stderr is not None
        lines = threading.Thread(target=process.stderr.read)
        try:
            address = re.search(r"http://127\.0\.0\.1:\d+", process.stderr.readline())
            assert address is not None
            lines.start()
            with closing(ServiceClient(address[0])) as service:
                yield service
        finally:
            process.kill()
            if lines.ident is not None:
                lines.join()


def engine_view(service: ServiceClient) -> EngineView | None:
    return next(iter(service.engines()), None)


def found_on_time(service: ServiceClient, since: str = "", *more: str) -> set[str]:
    """Wait for a leak that began `since` then, and for `more`; the codes that fire then, none of them a false alarm."""
    deadline = time.monotonic() + PATIENCE_S
    codes: set[str] = set()
    while not codes >= {LEAK, *more}:
        assert time.monotonic() < deadline, f"found only {codes} of {engine_view(service)}"
        time.sleep(0.2)
        firing = service.findings("firing")
        codes = {found.code for found in firing if found.code != LEAK or (found.since or "") >= since}
        assert not FALSE_ALARMS & codes, [found.explanation for found in firing]
    at_work = ("serving", "degraded", "idle")
    while (view := engine_view(service)) is None or view.status not in at_work or view.last_seen_s_ago > 5:
        assert time.monotonic() < deadline, f"not heard of just now: {view}"
        time.sleep(0.2)
    return codes


def wait_until_silent(service: ServiceClient) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        view = engine_view(service)
        if view is not None and view.status in ("silent", "stopped"):
            return
        assert time.monotonic() < deadline, view
        time.sleep(0.2)


@pytest.mark.parametrize("offset", MOVED)
def test_the_engines_wall_clock_moves(tmp_path: Path, offset: str) -> None:
    its, ours = FakedClock(tmp_path / "its"), FakedClock(tmp_path / "ours")
    with monitor(ours, tmp_path) as service:
        with leaking_engine(its, tmp_path):
            while engine_view(service) is None:
                time.sleep(0.1)
            its.move(offset)
            jumps = "x" not in offset  # the others drift
            codes = found_on_time(service, "", *([CLOCK_JUMP] if jumps else []))
            assert (CLOCK_JUMP in codes) == jumps
        wait_until_silent(service)


@pytest.mark.parametrize("offset", MOVED)
def test_the_monitors_wall_clock_moves(tmp_path: Path, offset: str) -> None:
    its, ours = FakedClock(tmp_path / "its"), FakedClock(tmp_path / "ours")
    with monitor(ours, tmp_path) as service:
        with leaking_engine(its, tmp_path):
            while engine_view(service) is None:
                time.sleep(0.1)
            ours.move(offset)
            found_on_time(service)
        wait_until_silent(service)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["+1h", "+1d"])
def test_an_engine_restarts_into_the_past(tmp_path: Path, first: str) -> None:
    its, ours = FakedClock(tmp_path / "its"), FakedClock(tmp_path / "ours")
    its.move(first)
    with monitor(ours, tmp_path) as service:
        with leaking_engine(its, tmp_path):
            found_on_time(service)
        before = engine_view(service)
        assert before is not None
        its.move("+0")
        with leaking_engine(its, tmp_path):
            deadline = time.monotonic() + PATIENCE_S
            while (after := engine_view(service)) is None or after.epoch == before.epoch:
                assert time.monotonic() < deadline, "the engine that restarted is ignored"
                time.sleep(0.2)
            assert after.epoch < before.epoch
            assert after.restarts == 1
            found_on_time(service, before.at or "")
