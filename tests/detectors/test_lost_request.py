"""stuck.lost-request, and what is no stall: a paused engine, one missed heartbeat. The stack of one that is."""

from __future__ import annotations

import pytest

from kvscope.monitor.base.text import timestamp
from kvscope.monitor.contract.kinds import EngineMode, Holder, Layer, Limit, Status
from kvscope.monitor.contract.wire import decode, encode
from kvscope.monitor.probes.packer import Vitals
from tests.detectors.scenes import Spoken, value

LOST = "stuck.lost-request"
STALLED = "stuck.engine-stalled"
HELD = "leak.finished-held"
NOT_POLLED = "leak.idle-not-polled"


class Served(Spoken):
    """An engine that beats once a second and counts its own queues. Request 1 progresses while steps go on."""

    passes = outputs = polls = 0

    def beats(self, seconds: int, queued: int, *, steps: bool = True, polled: bool = True) -> None:
        for _ in range(seconds):
            self.passes += 10 * steps
            self.polls += 10 * polled
            self.packer._vitals = lambda: Vitals(-1, 0, queued, 0, queued, self.polls, self.passes)
            if steps and 1 in self.packer.shadow.requests:
                self.outputs += 1
                self.log.step_launched(self.outputs, [1], [1])
                self.log.step_completed(self.outputs, 1000, Limit.NONE, -1, -1, -1)
                self.log.progressed([1], [16], [self.outputs])
            if steps:
                self.say()
            self.watch.feed([decode(encode(batch)) for batch in self.packer.pack()])
            self.watch.feed([decode(encode(self.packer.heartbeat()))])
            self.clock.sleep(1)
            self.watch.settle()


def test_a_request_that_the_engine_misses_in_its_queues_is_named_under_load() -> None:
    scene = Served()
    scene.arrive(1, [3, 4])
    scene.arrive(2, [5])
    scene.beats(3, queued=1)
    missed_ns = scene.clock.time_ns()
    scene.log.not_queued(2, Status.RUNNING)
    scene.beats(2, queued=1)
    finding = scene.only(LOST)
    assert finding.since == timestamp(missed_ns)  # until then it may have run like any other
    assert (finding.verdict, finding.culprits.requests, finding.culprits.blocks) == ("confirmed", ["r-2"], [5])
    scene.log.finished(2, Status.FINISHED_ABORTED)
    scene.beats(8, queued=1)
    assert not scene.firing(LOST)


@pytest.mark.parametrize("ends", [True, False])
def test_a_step_in_flight_may_give_a_request_that_no_queue_has_its_last_token(ends: bool) -> None:
    scene = Served()
    scene.arrive(1, [3, 4])
    scene.arrive(2, [5])
    scene.log.step_launched(1, [1, 2], [1, 1])
    scene.say()
    scene.log.not_queued(2, Status.RUNNING)
    scene.beats(8, queued=1, steps=False)
    assert not scene.firing(LOST)
    scene.log.step_completed(1, 8_000_000_000, Limit.NONE, -1, -1, -1)
    if ends:
        scene.log.finished(2, Status.FINISHED_LENGTH_CAPPED)
    scene.outputs = 1
    scene.beats(2, queued=1)
    assert [f.culprits.requests for f in scene.firing(LOST)] == ([] if ends else [["r-2"]])


def test_of_an_engine_that_reports_only_lengths_it_is_likely() -> None:
    scene = Served()
    scene.arrive(1, [3, 4])
    scene.arrive(2, [5])
    scene.beats(12, queued=1)
    finding = scene.only(LOST)
    assert (finding.verdict, finding.culprits.requests) == ("likely", ["r-2"])
    assert finding.missing


@pytest.mark.parametrize("in_flight", [3, -1])
def test_a_request_that_ended_in_a_long_step_is_reported_at_its_end(in_flight: int) -> None:
    """Its queues have dropped the request, and the stream has no event of a step that is still computed."""
    scene = Served()
    scene.arrive(1, [3, 4])
    scene.log.step_launched(3, [1], [1])
    scene.say()
    for _ in range(12):
        scene.passes += 1
        scene.packer._vitals = lambda: Vitals(in_flight, 0, 0, 0, 0, 0, scene.passes)
        scene.watch.feed([decode(encode(scene.packer.heartbeat()))])
        scene.clock.sleep(1)
        scene.watch.settle()
    assert bool(scene.firing(LOST)) is (in_flight < 0)


class InLongSteps(Spoken):
    """An engine with steps of 3 s and three heartbeats in each. Its events come at the end of each step."""

    step = 0
    client = 10

    def steps(self, count: int, *, aborted: bool, lost: int = 0) -> None:
        """Run requests 1 and 2, while one waits longer. aborted: at the start of each step, a client is replaced."""
        for _ in range(count):
            self.step += 1
            self.log.step_launched(self.step, [1, 2], [1, 1])
            self.say()
            queued = len(self.packer.shadow.requests) - lost - aborted
            for _ in range(3):
                self.packer._vitals = lambda queued=queued: Vitals(self.step, 0, queued, 0, queued, 0, self.step)
                self.clock.sleep(0.5)
                self.watch.feed([decode(encode(self.packer.heartbeat()))])
                self.watch.settle()
                self.clock.sleep(0.5)
            self.log.step_completed(self.step, 3_000_000_000, Limit.NONE, -1, -1, -1)
            self.log.progressed([1, 2], [16, 16], [self.step, self.step])
            if aborted:
                self.log.finished(self.client, Status.FINISHED_ABORTED)
                self.wait_in_queue(self.client + 1)
            self.say()

    def wait_in_queue(self, number: int) -> None:
        self.client = number
        self.log.arrived(number, f"r-{number}", 8, 8, 0, 2, 4)

    @classmethod
    def with_requests(cls) -> InLongSteps:
        scene = cls()
        scene.arrive(1, [3, 4])
        scene.arrive(2, [5, 6])
        scene.arrive(3, [7])
        scene.wait_in_queue(10)
        scene.say()
        return scene


def test_requests_that_leave_in_each_of_the_long_steps_are_not_lost() -> None:
    scene = InLongSteps.with_requests()
    scene.steps(12, aborted=True)
    assert LOST not in scene.alarms()


@pytest.mark.parametrize("aborted", [False, True])
def test_a_request_that_several_long_steps_miss_is_lost(aborted: bool) -> None:
    scene = InLongSteps.with_requests()
    scene.steps(2, aborted=aborted)
    assert LOST not in scene.alarms()
    scene.steps(7, aborted=aborted, lost=1)
    (finding,) = scene.firing(LOST)
    assert finding.verdict == "likely"


def test_the_report_of_a_long_step_may_follow_the_next_heartbeat() -> None:
    """Its client left before the step, and the engine's pass waited for the step before it reported that."""
    scene = Served()
    scene.arrive(1, [3, 4])
    scene.log.step_launched(3, [1], [1])
    scene.say()
    for in_flight in (*[3] * 12, -1):
        scene.packer._vitals = lambda step=in_flight: Vitals(step, 0, 0, 0, 0, 0, 1)
        scene.watch.feed([decode(encode(scene.packer.heartbeat()))])
        scene.watch.settle()
        scene.clock.sleep(1)
    scene.log.finished(1, Status.FINISHED_ABORTED)
    scene.log.step_completed(3, 13_000_000_000, Limit.NONE, -1, -1, -1)
    scene.say()
    scene.beats(6, queued=0, steps=False)
    assert LOST not in scene.alarms()


def test_queues_that_agree_or_differ_for_a_moment_are_no_loss() -> None:
    scene = Served()
    scene.arrive(1, [3, 4])
    scene.arrive(2, [5])
    for _ in range(4):
        scene.beats(4, queued=1)
        scene.beats(1, queued=2)
    assert LOST not in scene.alarms()


def test_an_engine_that_has_lost_all_its_requests_is_not_stalled() -> None:
    scene = Served()
    scene.arrive(1, [3, 4])
    scene.beats(2, queued=0)
    scene.log.not_queued(1, Status.RUNNING)
    scene.beats(12, queued=0, steps=False)
    assert {finding.code for finding in scene.firing()} == {LOST}


@pytest.mark.parametrize("mode", list(EngineMode))
def test_a_paused_engine_is_not_stalled(mode: EngineMode) -> None:
    scene = Served()
    scene.arrive(1, [3, 4])
    scene.beats(3, queued=1)
    if mode:
        scene.log.engine_mode(mode)
        scene.say()
    scene.beats(15, queued=1, steps=False)
    assert bool(scene.firing(STALLED)) is (mode == EngineMode.UNPAUSED)
    if mode:
        scene.log.engine_mode(EngineMode.UNPAUSED)
        scene.say()
        scene.beats(12, queued=1, steps=False)
        assert scene.firing(STALLED)


@pytest.mark.parametrize(("seconds", "fires"), [(3, False), (8, True)])
def test_a_heartbeat_may_overtake_the_end_of_a_long_step(seconds: int, fires: bool) -> None:
    """Steps take 18 s. After one of them the engine makes no pass, which is no stall until a step is overdue."""
    scene = Served()
    scene.arrive(1, [3, 4])

    def beat(step: int) -> None:
        scene.clock.sleep(1)
        scene.packer._vitals = lambda: Vitals(step, launched_ns if step >= 0 else 0, 1, 0, 1, 0, 1)
        scene.watch.feed([decode(encode(scene.packer.heartbeat()))])
        scene.watch.settle()

    for step in range(1, 4):
        launched_ns = scene.clock.monotonic_ns()
        scene.log.step_launched(step, [1], [1])
        scene.say()
        for _ in range(18):
            beat(step)
        if step < 3:
            scene.log.step_completed(step, 18_000_000_000, Limit.NONE, -1, -1, -1)
            scene.log.progressed([1], [8 + step], [step])
            scene.say()
    for _ in range(seconds):
        beat(-1)
    assert [f.code for f in scene.firing() if f.code == STALLED] == [STALLED] * fires


def test_one_second_without_a_pass_is_no_stall() -> None:
    """Its age counts from the last pass, not from the last event."""
    scene = Served()
    scene.arrive(1, [3, 4])
    scene.beats(2, queued=1)
    for _ in range(6):
        for advance in (10,) * 9 + (0,):  # passes go on without an event: the request waits for blocks
            scene.passes += advance
            scene.packer._vitals = lambda: Vitals(-1, 0, 1, 0, 1, 0, scene.passes)
            scene.watch.feed([decode(encode(scene.packer.heartbeat()))])
            scene.clock.sleep(1)
            scene.watch.settle()
            assert STALLED not in scene.alarms()


def test_a_stall_names_the_layer_and_the_calls_in_which_the_thread_stands() -> None:
    scene = Served()
    scene.arrive(1, [3, 4])
    scene.beats(3, queued=1)
    scene.beats(4, queued=1, steps=False)
    scene.log.stack(-1, 0, Layer.CONNECTOR, "wait (nixl/connector.py:7)\nschedule (scheduler.py:9)\nprocess 3 W: D")
    scene.beats(6, queued=1, steps=False)
    finding = scene.only(STALLED)
    assert value(finding, "stalled_layer") == "CONNECTOR"
    frames = [each.value for each in finding.evidence if each.name == "stack_frame"]
    assert frames == ["wait (nixl/connector.py:7)", "schedule (scheduler.py:9)"]
    assert value(finding, "worker_process_state") == "process 3 W: D"
    assert "the KV connector, in wait (nixl/connector.py:7)" in finding.explanation


def test_a_stack_of_an_earlier_stall_is_not_that_of_this_one() -> None:
    scene = Served()
    scene.arrive(1, [3, 4])
    scene.log.stack(-1, 0, Layer.MODEL, "forward (model.py:7)")
    scene.beats(5, queued=1)
    scene.beats(15, queued=1, steps=False)
    assert not [each for each in scene.only(STALLED).evidence if each.name == "stack_frame"]


def kept(scene: Served, lease_ns: int = 0) -> None:
    scene.arrive(7, [13, 14])
    scene.log.finished(7, Status.FINISHED_STOPPED)
    scene.log.free_deferred(7, [13, 14], Holder.CONNECTOR, lease_deadline_ns=lease_ns)


def test_blocks_kept_by_a_connector_that_is_not_asked_though_requests_wait_are_reported() -> None:
    scene = Served()
    scene.arrive(1, [3, 4])
    kept(scene)
    scene.beats(2, queued=1)
    scene.beats(14, queued=1, polled=False)
    finding = scene.only(HELD)
    assert (finding.verdict, finding.culprits.requests) == ("likely", ["r-7"])
    assert "does not poll it" in finding.missing


def test_what_was_kept_for_too_long_while_asked_stays_so_when_the_engine_goes_idle() -> None:
    scene = Served()
    kept(scene)
    scene.beats(15, queued=0)
    (firing,) = scene.firing(HELD)
    scene.beats(30, queued=0, steps=False, polled=False)
    assert [finding.id for finding in scene.firing()] == [firing.id]


def test_under_a_lease_that_is_not_known_it_is_likely() -> None:
    scene = Served()
    kept(scene, lease_ns=-1)
    scene.beats(15, queued=0)
    finding = scene.only(HELD)
    assert finding.verdict == "likely"
    assert "lease" in finding.missing
