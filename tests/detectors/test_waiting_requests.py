"""What the codes of requests that do not move share, and where they part.

The rules are in stuck/waiting_requests.py and grammar_wait.py.
"""

from __future__ import annotations

import pytest

from kvscope.monitor.contract.kinds import Cause, Limit, Release, Status
from kvscope.monitor.contract.wire import decode, encode
from kvscope.monitor.probes.packer import Vitals
from tests.detectors import stuck
from tests.detectors.scenes import Spoken

GRAMMAR, ZERO_TOKEN = "stuck.grammar", "stuck.zero-token"
LEFT_OUT = "Request r-2 waits and is given 0 tokens at every pass, since "


def steps(scene: Spoken, seconds: int, cause: Cause) -> Spoken:
    """Request 1 runs in steps of a second, and each time request 2 is left out for this cause."""
    for step in range(seconds):
        scene.log.step_launched(step, [1], [1])
        scene.log.progressed([1], [8 + step], [1 + step])
        scene.log.step_completed(step, 1_000_000_000, Limit.NONE, -1, -1, -1)
        if cause != Cause.NONE:
            scene.log.not_scheduled(2, cause, step + 1)
        scene.wait(1)
    return scene


def waits_for_its_grammar(cause: Cause) -> Spoken:
    """One request runs for a minute, and another has waited for its grammar since it came."""
    scene = Spoken()
    scene.arrive(1, [3])
    scene.log.arrived(2, "r-2", 4, 8, 0, 1, 3)
    scene.log.waiting_on(2, Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)
    return steps(scene, 60, cause)


@pytest.mark.parametrize(("cause", "stuck"), [(Cause.NONE, True), (Cause.TOKEN_BUDGET, False)])
def test_a_request_that_is_left_out_for_another_cause_does_not_wait_for_its_grammar(cause: Cause, stuck: bool) -> None:
    assert bool(waits_for_its_grammar(cause).firing(GRAMMAR)) is stuck


class Passing(Spoken):
    """An engine with a request that waits, and so many others that run. It launches no step."""

    def __init__(self, others: int) -> None:
        super().__init__()
        self.passes, self.others = 0, others
        for number in range(10, 10 + others):
            self.arrive(number, [number])
        self.log.arrived(2, "r-2", 4, 8, 0, 1, 3)
        self.packer._vitals = lambda: Vitals(-1, 0, others, 1, 0, 0, self.passes)

    def give_nothing(self, seconds: int) -> None:
        """Each second the scheduler goes over its queue, and the request gets no token."""
        for _ in range(seconds):
            self.passes += 1
            self.log.not_scheduled(2, Cause.ZERO_TOKENS, self.passes)
            self.wait(1)
            self.watch.feed([decode(encode(self.packer.heartbeat()))])
            self.watch.settle()


@pytest.mark.parametrize("others", [0, 1])
def test_a_waiting_request_is_at_zero_only_where_no_other_has_the_budget(others: int) -> None:
    scene = Passing(others)
    scene.give_nothing(20)
    assert [(f.verdict, f.missing) for f in scene.firing(ZERO_TOKEN)] == [("confirmed", "")] * (not others)
    assert all(f.explanation.startswith(LEFT_OUT) for f in scene.firing(ZERO_TOKEN))


def test_after_a_loss_the_lost_events_may_include_the_end_of_the_wait() -> None:
    scene = Passing(0)
    scene.give_nothing(2)
    scene.log.arrived(3, "r-3", 4, 8, 0, 1, 3)
    scene.log.tick()
    scene.log.flush(-1, -1, (-1, -1, -1, -1))
    assert scene.packer.pack()  # a batch that nobody receives
    scene.give_nothing(40)
    (finding,) = scene.firing(ZERO_TOKEN)
    assert finding.verdict == "likely"
    assert finding.missing.startswith("the lost events")
    (lost,) = [one for one in finding.alternatives if one.name == "events that were lost"]
    assert lost.excluded_by == "", "as measured_harm.py has it of a verdict that is not confirmed"


@pytest.mark.parametrize(("seconds", "found"), [(24, False), (48, True)])
def test_in_slow_steps_a_request_is_at_zero_once_three_have_left_it_out(seconds: int, found: bool) -> None:
    """Steps take 8 s, so that the grace of 10 s has passed long before."""
    scene = Spoken()
    for number in (1, 2):
        scene.arrive(number, [number])
    for step in range(seconds // 8):
        scene.log.step_launched(step, [1], [1])
        scene.wait(8)
        scene.log.progressed([1], [8 + step], [1 + step])
        scene.log.step_completed(step, 8_000_000_000, Limit.NONE, -1, -1, -1)
        scene.log.not_scheduled(2, Cause.ZERO_TOKENS, step + 1)
        scene.say()
    assert bool(scene.firing(ZERO_TOKEN)) is found


@pytest.mark.parametrize(("seconds", "pending"), [(2.0, False), (3.0, True)])
def test_parked_loads_are_pending_from_half_of_their_grace_on(seconds: float, pending: bool) -> None:
    """The grace of stuck.parked-loads is five seconds."""
    scene = stuck.parked_loads()
    since_ns = scene.ledger.looked_ns
    while scene.ledger.looked_ns < since_ns + seconds * 1e9:
        scene.live(0.25, every=0.25)
    assert [f.code for f in scene.watch.findings("pending")] == ["stuck.parked-loads"] * pending


@pytest.mark.parametrize(("free", "computed", "fires"), [(0, 8, False), (0, 7, True), (1, 8, True)])
def test_a_request_that_lacks_a_block_is_not_at_zero(free: int, computed: int, fires: bool) -> None:
    """vLLM 0.33 gives it and those after it nothing while each block it could take is of a step in flight (#49674)."""
    scene = Spoken(total=4 + free)
    scene.arrive(1, [1, 2])
    scene.arrive(2, [3])
    for step in range(60):
        scene.log.step_launched(step, [2], [1])
        scene.log.progressed([1, 2], [computed, 8 + step], [1, 1 + step])
        scene.log.step_completed(step, 1, Limit.NONE, -1, -1, -1)
        scene.log.not_scheduled(1, Cause.ZERO_TOKENS, step + 1)
        scene.wait(0.5)
    findings = scene.firing(ZERO_TOKEN)
    assert bool(findings) is fires
    if free == 0 and computed == 8:  # as a block comes free, the next pass may give it one
        scene.log.released(2, [3], Release.FINISHED)
        scene.wait(1)
        assert not scene.firing(ZERO_TOKEN)
    assert all(("No block is free" in finding.explanation) == (not free) for finding in findings)
