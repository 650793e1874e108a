"""An engine that hangs in a step, or is frozen whole, seen through its stream as the monitor sees it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest

from kvscope.engine.config import EngineConfig
from kvscope.engine.core.assembly import EventStream
from kvscope.engine.core.engine_core import EngineCore
from kvscope.engine.models import load_model
from kvscope.engine.requests.request import SamplingParams
from kvscope.monitor.detectors.findings import FindingReport
from kvscope.monitor.detectors.registry import parse_settings
from kvscope.monitor.detectors.stuck.engine_stalled import NO_ACTIVITY
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.sources.live_stream import LiveStream
from tests.engine.before import with_before
from tests.engine.process import EngineProcess
from tests.waiting import PATIENCE_S

QUICK = ("stuck.engine-stalled.grace_s=1", "stuck.engine-stalled.first_step_s=1")
# Longer than three heartbeats: only then is it silence.
SILENCE = ("stuck.engine-stalled.grace_s=4", "stuck.engine-stalled.first_step_s=4")


def watch_until(stream: LiveStream, watch: Pipeline, done: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"not after {seconds} s; found {watch.findings()}"
        watch.feed(received.frame for received in stream.receive(0.05))


def stalled(watch: Pipeline) -> list[FindingReport]:
    return [finding for finding in watch.findings("firing") if finding.code == "stuck.engine-stalled"]


def test_a_first_step_that_hangs_is_likely(tmp_path: Path) -> None:
    go = threading.Event()
    events = f"ipc://{tmp_path}/events"
    core = EngineCore(
        EngineConfig(num_gpu_blocks_override=20),
        with_before(load_model(EngineConfig(num_gpu_blocks_override=20)), go.wait),
        EventStream("hangs@127.0.0.1:0/0", events, f"{events}-replay"),
        stall_s=0.5,
    )
    stream, watch = LiveStream(events), Pipeline(parse_settings(QUICK))
    core.start(lambda _: None)
    try:
        core.submit("r-hangs", [1, 2, 3], SamplingParams(max_tokens=1))
        watch_until(stream, watch, lambda: stalled(watch))
        watch_until(stream, watch, lambda: core.watchdog.stalled)
        watch_until(stream, watch, lambda: "reports it too" in str(stalled(watch)[0].evidence))
        (finding,) = stalled(watch)
        assert finding.verdict == "likely"
        assert finding.culprits.requests == ["r-hangs"]
        evidence = {item.name: item.value for item in finding.evidence}
        assert (evidence["step_in_flight"], evidence["tokens_in_flight"], evidence["running"]) == (0, 3, 1)
        go.set()
        watch_until(stream, watch, lambda: not stalled(watch))
    finally:
        go.set()
        core.close()
        stream.close()


@pytest.mark.slow
def test_a_frozen_process_is_likely_until_it_is_heard_again() -> None:
    """Its HTTP server hangs with it; silence and a cut network look the same from here.

    On busy cores a step may take too long while heartbeats arrive, which is another finding: wait for the silence.
    """
    with EngineProcess("--stall-seconds", "1") as engine:
        stream, watch = LiveStream(engine.events, engine.replay), Pipeline(parse_settings(SILENCE))
        client = httpx2.Client(base_url=engine.url, timeout=None, trust_env=False)
        body = {"model": "tiny", "prompt": "freeze", "max_tokens": 3000, "ignore_eos": True}
        asking = threading.Thread(target=lambda: client.post("/v1/completions", json=body))
        asking.start()
        try:
            watch_until(stream, watch, lambda: any(view.running for view in watch.engines()))
            engine.process.send_signal(signal.SIGSTOP)
            watch_until(stream, watch, lambda: any(each.missing == NO_ACTIVITY for each in stalled(watch)))
            assert stalled(watch)[0].verdict == "likely"
            engine.process.send_signal(signal.SIGCONT)
            watch_until(stream, watch, lambda: not stalled(watch))
        finally:
            engine.process.send_signal(signal.SIGCONT)
            asking.join()
            client.close()
            stream.close()
