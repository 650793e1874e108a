"""References of something other than a request, the engine's mode, its stack, and requests in no queue."""

from __future__ import annotations

import pytest

from kvscope.monitor.contract.event_log import EventLog
from kvscope.monitor.contract.kinds import Cause, EngineMode, Holder, Layer, Release, Status
from kvscope.monitor.contract.wire import PINS
from kvscope.monitor.ledger import keyframe_codec
from kvscope.monitor.ledger.balance import balance_of
from kvscope.monitor.ledger.engine_state import EngineState
from kvscope.monitor.probes.packer import Packer, Vitals


class Engine:
    """A log whose events are folded at once."""

    def __init__(self) -> None:
        self.log = EventLog()
        self.packer = Packer(self.log, "e@h:1/0", lambda: Vitals(-1, 0, 0, 0, 0, 0, 0))
        self.log.started(20, 1, 16, "")

    def state(self) -> EngineState:
        self.log.flush(0, 0, (-1, -1, -1, -1))
        self.packer.pack()
        return self.packer.shadow

    def run(self, number: int, blocks: list[int]) -> None:
        self.log.arrived(number, f"r-{number}", 16, 16, 0, 1, 2)
        self.log.queued(number, Cause.NEW)
        self.log.allocated(number, blocks)
        self.log.admitted(number, 0)


def test_pinned_blocks_stay_accounted_after_their_request_ended() -> None:
    engine = Engine()
    engine.run(1, [3, 4])
    engine.log.pinned([3])
    engine.log.finished(1, Status.FINISHED_STOPPED)
    engine.log.released(1, [3, 4], Release.FINISHED)
    state = engine.state()
    assert (state.refs[3], state.refs[4], state.used) == (1, 0, 1)
    assert (balance_of(state).finished, balance_of(state).unaccounted, balance_of(state).holds) == (1, 0, True)
    assert not state.unexplained_references()
    engine.log.unpinned([3])
    state = engine.state()
    assert (state.refs[3], state.used, state.deferrals, state.detached) == (0, 0, {}, {})


def test_a_cached_idle_block_that_is_pinned_twice_is_in_use_until_both_pins_are_gone() -> None:
    engine = Engine()
    engine.run(1, [5])
    engine.log.cached(1, [5], [77])
    engine.log.finished(1, Status.FINISHED_STOPPED)
    engine.log.released(1, [5], Release.FINISHED)
    engine.log.pinned([5])
    engine.log.pinned([5])
    engine.log.unpinned([5])
    state = engine.state()
    assert (state.used, state.cached_idle, balance_of(state).finished) == (1, 0, 1)
    engine.log.unpinned([5])
    state = engine.state()
    assert (state.used, state.cached_idle) == (0, 1)


def test_the_end_of_a_fence_leaves_an_older_pin_in_place() -> None:
    engine = Engine()
    engine.run(1, [3, 4])
    engine.log.pinned([3])
    engine.log.finished(1, Status.FINISHED_ABORTED)
    engine.log.free_deferred(1, [3, 4], Holder.FENCE, fence=7)
    engine.log.detached(1, [3, 4])
    engine.log.reclaimed([3, 4], Release.ABORTED)
    state = engine.state()
    assert (state.refs[3], state.refs[4], state.detached) == (1, 0, {3: [PINS]})
    assert [deferral.holder for deferral in state.deferrals.values()] == [Holder.PIN]
    engine.log.reclaimed([3], Release.ABORTED)
    state = engine.state()
    assert (state.refs[3], state.detached) == (1, {3: [PINS]})


@pytest.mark.parametrize("progress", [False, True])
def test_a_request_in_no_queue_is_known_until_it_moves(progress: bool) -> None:
    engine = Engine()
    engine.run(1, [3])
    engine.state()
    engine.log.not_queued(1, Status.RUNNING)
    engine.log.progressed([1], [16], [1 if progress else 0])
    record = engine.state().requests[1]
    assert bool(record.not_queued_ns) is not progress


def test_a_keyframe_carries_mode_and_stack() -> None:
    engine = Engine()
    engine.log.engine_mode(EngineMode.PAUSED_ALL)
    engine.log.stack(7, 5, Layer.MODEL, "forward model.py:3\nstep core.py:9")
    state = keyframe_codec.load_state(keyframe_codec.dump_state(engine.state()))
    assert (state.mode, state.mode_since_ns > 0) == (EngineMode.PAUSED_ALL, True)
    assert state.stack is not None
    assert (state.stack.step, state.stack.layer) == (7, Layer.MODEL)
    assert state.stack.frames.splitlines()[0] == "forward model.py:3"
    assert -3 not in state.requests
