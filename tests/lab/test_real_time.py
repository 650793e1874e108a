"""Three incidents on a real engine process, in real time: read off its live stream as the monitor does."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

import httpx2
import pytest

from kvscope.monitor.detectors.registry import parse_settings
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.sources.live_stream import LiveStream
from tests.engine.process import PATIENCE_S, EngineProcess

pytestmark = pytest.mark.slow
SETTINGS = (
    "leak.finished-held.grace_s=1",
    "leak.finished-held.unseen_times=0",
    "stuck.engine-stalled.grace_s=2",
    "stuck.engine-stalled.first_step_s=3",
)
THEN_S = 4.0
"""Of the stream's time, in which nothing else may be found."""


class Incident(NamedTuple):
    """A fault of an engine, what is asked of it, request by request, and whom it strikes."""

    fault: str
    flags: tuple[str, ...]
    asked: dict[str, dict[str, Any]]
    affected: set[str]


def ask(prompt_tokens: int, max_tokens: int) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "x" * prompt_tokens, "max_tokens": max_tokens, "ignore_eos": True}


INCIDENTS = (
    Incident(
        "leak.finished-held:limit=2",
        ("--kv-connector", "host"),
        {f"{n}": ask(60 + n, 5) for n in range(4)},
        {"cmpl-0", "cmpl-1"},
    ),
    Incident(
        "stuck.never-fits",
        ("--num-gpu-blocks-override", "33"),
        {"large": ask(700, 5), "behind": ask(20, 5)},
        {"cmpl-large"},
    ),
    Incident("stuck.engine-stalled:after=80:limit=1", (), {"long": ask(20, 200)}, {"cmpl-long"}),
)


@contextmanager
def clients(url: str, asked: dict[str, dict[str, Any]]) -> Iterator[dict[str, int]]:
    """They ask one after the other, the next when one is answered or has had to wait; what each got, by its id."""
    answered: dict[str, int] = {}
    came = threading.Condition()

    def one(name: str, body: dict[str, Any]) -> None:
        with httpx2.Client(base_url=url, timeout=None, trust_env=False) as client:
            try:
                status = client.post("/v1/completions", json=body, headers={"X-Request-Id": name}).status_code
            except httpx2.HTTPError:
                return  # the engine has ended, and has not answered
        with came:
            answered[name] = status
            came.notify_all()

    threads = [threading.Thread(target=one, args=each) for each in asked.items()]
    for thread, name in zip(threads, asked, strict=True):
        thread.start()
        with came:
            came.wait_for(lambda name=name: name in answered, timeout=1.0)  # type: ignore[misc]
    try:
        yield answered
    finally:
        for thread in threads:
            thread.join()


def follow(stream: LiveStream, watch: Pipeline, until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not until():
        assert time.monotonic() < deadline, f"it did not come to that; found {watch.findings()}"
        watch.feed(received.frame for received in stream.receive(0.05))


@pytest.mark.parametrize("fault", [True, False])
@pytest.mark.parametrize("incident", INCIDENTS, ids=lambda incident: incident.fault.partition(":")[0])
def test_it_is_found_and_nothing_else(incident: Incident, fault: bool) -> None:
    code = incident.fault.partition(":")[0]
    switched = ("--fault", incident.fault) if fault else ()
    watch = Pipeline(parse_settings(SETTINGS))

    def found() -> bool:
        return any(finding.code == code for finding in watch.findings("firing"))

    with (
        EngineProcess(*incident.flags, *switched) as engine,
        closing(LiveStream(engine.events, engine.replay)) as stream,
        clients(engine.url, incident.asked) as answered,
    ):
        try:
            follow(stream, watch, lambda: engine.engine in watch.fleet.engines)
            ledger = watch.fleet.engines[engine.engine]
            follow(stream, watch, lambda: found() if fault else len(answered) == len(incident.asked))
            then_ns = ledger.now_ns + THEN_S * 1e9
            follow(stream, watch, lambda: ledger.now_ns > then_ns)
            fired = [each.finding for each in watch.take_transitions() if each.to == "firing"]
            assert [f.judgement.code for f in fired if f.severity != "info"] == ([code] if fault else [])
            for finding in watch.findings("firing"):
                if finding.code == code:
                    assert set(finding.culprits.requests) == incident.affected
                    # A reader that joined late has not seen enough steps to know how long one takes.
                    joined_late = code == "stuck.engine-stalled" and "How long it should take" in finding.explanation
                    unbounded = code == "leak.finished-held"  # its connector states no lease
                    assert finding.verdict == ("likely" if joined_late or unbounded else "confirmed")
        finally:
            engine.stop(signal.SIGKILL)  # one that hangs does not end in good order
