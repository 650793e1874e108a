"""The watchdog says who does not move, why and since when, once, and does so while the engine's thread hangs."""

from __future__ import annotations

import logging
import threading

import pytest

from kvscope.engine.bench.clock import VirtualClock
from kvscope.engine.config import EngineConfig
from kvscope.engine.core.engine_core import EngineCore
from kvscope.engine.core.watchdog import Watchdog
from kvscope.engine.models import load_model
from kvscope.engine.requests.request import Output, SamplingParams
from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.contract.kinds import Cause, Kind, Status
from tests.engine.before import with_before
from tests.engine.process import wait_for

STALL_S = 30.0


class WatchedLab(Lab):
    """A lab with a watchdog that looks after every step and every second of rest."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]
        self.watchdog = Watchdog(self.scheduler, self.log, lambda: self.launched, STALL_S, self.clock)

    def rest(self, seconds: int) -> None:
        """Passes go on for so long, looked at each second."""
        for _ in range(seconds):
            self.step(seconds=1.0)
            self.watchdog.look()

    def stated(self) -> list[tuple[int, int, int, int]]:
        """Every `stalled` on the stream: request, status, since step, cause."""
        self.flush()
        events = [event for frame in self.frames for event in frame.events()]
        return [(e.request, *e.args[1:4]) for e in events if e.kind == Kind.STALLED]  # type: ignore[misc]


def test_a_request_that_can_never_fit_and_those_behind_it_stall_once() -> None:
    lab = WatchedLab(total=9, block_size=4)
    too_large = lab.arrive(40)
    behind = lab.arrive(4)
    lab.rest(round(STALL_S) - 1)
    assert lab.stated() == []
    assert lab.watchdog.engine_stalled_s == 0
    lab.rest(2 * round(STALL_S))
    assert lab.stated() == [
        (too_large.number, Status.WAITING, -1, Cause.KV_BLOCKS),
        (behind.number, Status.WAITING, -1, Cause.BEHIND_HEAD),
    ]
    assert lab.watchdog.engine_stalled_s >= STALL_S
    lab.abort(too_large)
    lab.rest(1)
    assert lab.watchdog.stalled == {}
    assert lab.watchdog.engine_stalled_s == 0


def test_an_engine_does_not_stall_for_longer_than_any_request_has_waited() -> None:
    lab = WatchedLab(total=9, block_size=4)
    too_large = lab.arrive(40)
    lab.rest(round(STALL_S) - 1)
    lab.abort(too_large)
    lab.arrive(40)  # between two looks, so that the engine was never seen empty
    lab.rest(2)
    assert lab.watchdog.engine_stalled_s == 0
    lab.rest(round(STALL_S) - 1)
    assert lab.watchdog.engine_stalled_s >= STALL_S
    assert len(lab.watchdog.stalled) == 1


def test_who_moves_however_slowly_does_not_stall() -> None:
    lab = WatchedLab(total=65)
    request = lab.arrive(4, max_tokens=10)
    while not request.is_finished:
        lab.clock.sleep(STALL_S - 2)
        lab.rest(1)
    assert lab.stated() == []


def test_a_stall_that_ended_can_begin_again() -> None:
    lab = WatchedLab(total=65, block_size=4, max_num_seqs=1)
    first, second = lab.arrive(4, max_tokens=200), lab.arrive(4, max_tokens=200)
    lab.rest(40)
    first_stall = [(second.number, Status.WAITING, -1, Cause.MAX_NUM_SEQS)]
    assert lab.stated() == first_stall
    lab.abort(first)
    lab.rest(5)
    assert lab.watchdog.stalled == {}
    since = second.progressed_step
    for _ in range(40):
        lab.clock.sleep(1.0)
        lab.watchdog.look()
    # No pass was made in all that time: nobody looked at it.
    assert lab.stated() == [*first_stall, (second.number, Status.RUNNING, since, Cause.ZERO_TOKENS)]


def test_a_step_that_does_not_return_is_the_cause() -> None:
    lab = WatchedLab(total=65)
    request = lab.arrive(4)
    plan = lab.scheduler.schedule()
    lab.launched = (plan.step, lab.clock.monotonic_ns())
    for _ in range(40):
        lab.clock.sleep(1.0)
        lab.watchdog.look()
    assert lab.stated() == [(request.number, Status.RUNNING, -1, Cause.STEP_IN_FLIGHT)]
    assert lab.watchdog.engine_stalled_s >= STALL_S


def test_an_idle_engine_never_stalls() -> None:
    lab = WatchedLab()
    lab.rest(100)
    lab.arrive(4)
    lab.watchdog.look()
    assert lab.watchdog.engine_stalled_s == 0
    assert isinstance(lab.clock, VirtualClock)


def test_it_speaks_while_the_engines_thread_hangs_in_a_step(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(num_gpu_blocks_override=20)
    go = threading.Event()
    core = EngineCore(config, with_before(load_model(config), go.wait), stall_s=0.1)
    outputs: list[Output] = []
    core.start(outputs.extend)
    try:
        with caplog.at_level(logging.WARNING, "kvscope.engine.core.watchdog"):
            number = core.submit("r-hangs", [1, 2, 3], SamplingParams(max_tokens=1))
            wait_for(lambda: number in core.watchdog.stalled)
        assert core.watchdog.stalled[number].cause == Cause.STEP_IN_FLIGHT
        assert "r-hangs" in caplog.text
        go.set()
        wait_for(lambda: bool(outputs))
    finally:
        go.set()
        core.close()
    assert [output.status for output in outputs] == [Status.FINISHED_LENGTH_CAPPED]
