"""Faults switched on in a real engine: the monitor finds what they break, and nobody can miss that they are on."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing

import httpx2
import pytest

from kvscope.monitor.detectors.detector import Settings
from kvscope.monitor.detectors.findings import FindingReport
from kvscope.monitor.questions.pipeline import Pipeline
from tests.engine.process import PATIENCE_S, EngineProcess

QUICK = Settings(
    {"leak.finished-held.grace_s": 0.5, "leak.finished-held.unseen_times": 0, "leak.unaccounted.grace_s": 0.5}
)


def complete(engine: EngineProcess, name: str, max_tokens: int = 4, timeout: float = PATIENCE_S) -> None:
    httpx2.post(
        f"{engine.url}/v1/completions",
        json={"prompt": f"the prompt of {name}, some blocks long", "max_tokens": max_tokens, "ignore_eos": True},
        headers={"X-Request-Id": name},
        timeout=timeout,
    ).raise_for_status()


def find(engine: EngineProcess, code: str, enough: Callable[[FindingReport], bool]) -> list[FindingReport]:
    """All that fires by the time that a finding of this code is enough."""
    watch = Pipeline(QUICK)
    deadline = time.monotonic() + PATIENCE_S
    with closing(engine.stream()) as stream:
        while not any(found.code == code and enough(found) for found in watch.findings("firing")):
            assert time.monotonic() < deadline, watch.findings()
            watch.feed(received.frame for received in stream.receive(0.1))
        return watch.findings("firing")


@pytest.mark.slow
@pytest.mark.usefixtures("real_parts")
def test_a_completion_that_is_not_delivered_is_found_with_its_requests() -> None:
    with EngineProcess("--kv-connector", "host", "--fault", "leak.finished-held:every=2") as engine:
        names = [f"r-{index}" for index in range(6)]
        for name in names:
            complete(engine, name)
        # Completions come in the order of the ends, so every second request is struck.
        affected = {f"cmpl-{name}" for name in names[::2]}
        found = find(engine, "leak.finished-held", lambda f: set(f.culprits.requests) == affected)
        assert [(f.code, f.verdict) for f in found if f.severity != "info"] == [("leak.finished-held", "likely")]


@pytest.mark.slow
@pytest.mark.usefixtures("real_parts")
def test_a_free_that_is_skipped_is_found_with_its_request() -> None:
    with EngineProcess("--fault", "leak.unaccounted") as engine:
        complete(engine, "r-well")
        with pytest.raises(httpx2.ReadTimeout):
            complete(engine, "r-gone", max_tokens=100_000, timeout=0.3)
        found = find(engine, "leak.unaccounted", lambda f: f.verdict == "confirmed")
        (leak,) = [f for f in found if f.severity != "info"]
        assert list(leak.culprits.requests) == ["cmpl-r-gone"]


@pytest.mark.usefixtures("real_parts")
def test_a_fault_that_is_on_is_said_everywhere() -> None:
    fault = "leak.unaccounted:every=3"
    with EngineProcess("--fault", fault) as engine:
        assert f"FAULT ON: --fault {fault}" in engine.log()
        assert httpx2.get(f"{engine.url}/health").json()["faults"] == [fault]
        assert f'fault="{fault}"' in httpx2.get(f"{engine.url}/metrics").text
        ledger = engine.ledger(lambda ledger: bool(ledger.description.engine))
        assert ledger.description.faults == [fault]
