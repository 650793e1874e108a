"""Work that is done over and over: exactly whom it hits, and what looks alike and is sound."""

from __future__ import annotations

import pytest

from kvscope.monitor.contract.kinds import Cause, Kind, Limit, Preempt, Release, Status
from kvscope.monitor.detectors.registry import THRESHOLDS
from tests.detectors import waste
from tests.detectors.scenes import Spoken, Watched, value

PREEMPTION, CASCADE, AFTER_RETRACT = "thrash.preemption", "thrash.cascade", "thrash.after-retract"


def preempted(scene: Watched) -> list[tuple[int, int]]:
    """Request and tokens lost of every preemption, by the engine's own words."""
    events = [event for frame in scene.lab.frames for event in frame.events()]
    return [(event.request, event.args[3]) for event in events if event.kind == Kind.PREEMPTED]


@pytest.mark.parametrize("build", [waste.preemption, waste.cascade])
def test_without_the_fault_the_same_load_gives_no_alarm(build: type[Watched]) -> None:
    scene = build(fault=False)
    scene.live(5)
    assert scene.alarms() == []


def test_prompts_that_throw_each_other_out() -> None:
    scene = waste.preemption()
    scene.watch.settle()
    finding = scene.only(PREEMPTION)
    reported = preempted(scene)
    assert finding.verdict == "confirmed"
    assert finding.culprits.requests == list(dict.fromkeys(f"r-{number}" for number, _ in reported))
    assert value(finding, "tokens_wasted") == sum(tokens for _, tokens in reported)
    assert value(finding, "tokens_computed") == scene.ledger.state.totals.computed_tokens
    affected = set(scene.lab.faults.on[PREEMPTION].affected)
    assert set(finding.culprits.requests) <= affected


def test_it_is_over_when_nobody_is_thrown_out_any_more() -> None:
    scene = waste.preemption()
    scene.live(scene.watch.settings(THRESHOLDS[f"{PREEMPTION}.window_s"]) + 5)
    assert not scene.firing(PREEMPTION)
    assert [f.code for f in scene.watch.findings("resolved")] == [PREEMPTION]


def test_a_full_pool_in_which_outputs_grow_is_no_thrash() -> None:
    """Requests are preempted, some more than once, and each time they had got on."""
    scene = waste.growth()
    assert len(preempted(scene)) > scene.watch.settings(THRESHOLDS[f"{PREEMPTION}.min_requests"])
    scene.watch.settle()
    assert scene.alarms() == []


def test_after_a_loss_it_is_likely() -> None:
    scene = waste.preemption()
    scene.lab.arrive(4)
    scene.lab.step()
    scene.skip()
    scene.beat(1)
    finding = scene.only(PREEMPTION)
    assert (finding.verdict, finding.missing) == ("likely", "the lost events")


def test_preemptions_that_free_nothing() -> None:
    scene = waste.cascade()
    scene.watch.settle()
    finding = scene.only(CASCADE)
    assert finding.verdict == "confirmed"
    assert value(finding, "blocks_freed_during_pass") == 0
    reported = dict.fromkeys(f"r-{number}" for number, _ in preempted(scene))
    assert set(finding.culprits.requests) <= set(reported)
    fewest = scene.watch.settings(THRESHOLDS[f"{CASCADE}.min_requests"])
    assert int(value(finding, "preempted_in_one_pass")) >= fewest
    scene.live(scene.watch.settings(THRESHOLDS[f"{CASCADE}.remember_s"]) + 5)
    assert not scene.firing(CASCADE)


def test_a_cascade_is_no_collapse_and_a_collapse_no_cascade() -> None:
    """In both a pass preempts all that run; in one their blocks are free at once."""
    for scene, code in ((waste.cascade(), CASCADE), (waste.preempt_all(), "collapse.preempt-all")):
        scene.watch.settle()
        assert set(scene.alarms()) == {code}


@pytest.mark.parametrize(("supplied", "alarms"), [(8, []), (0, [PREEMPTION])])
def test_blocks_that_the_prefix_cache_supplied_were_not_computed_in_vain(supplied: int, alarms: list[str]) -> None:
    """They are in the cache still. What these requests computed themselves is lost."""
    scene = Spoken(total=9)
    for turn in range(2):
        for number in range(4):
            blocks = [1 + 2 * number, 2 + 2 * number]
            if not turn:
                scene.log.arrived(number, f"r-{number}", 12, 8, 0, 3, 5)
            scene.log.allocated(number, blocks)
            scene.log.admitted(number, supplied)
            scene.log.progressed([number], [8], [0])
        scene.say()
        for number in range(4):
            scene.log.preempted(number, Preempt.KV_BLOCKS, -1, 2, 8)
            scene.log.released(number, [1 + 2 * number, 2 + 2 * number], Release.PREEMPTED)
        scene.say()
    assert [code for code in dict.fromkeys(scene.alarms()) if code == PREEMPTION] == alarms


@pytest.mark.parametrize(("kept", "verdict"), [(8, "likely"), (0, "confirmed")])
def test_work_that_the_prefix_cache_may_have_kept_is_not_surely_wasted(kept: int, verdict: str) -> None:
    """Requests lose their blocks before a token, and find what they had computed in the cache when they come back."""
    scene = Spoken(total=9)
    for number in range(4):
        blocks = [1 + 2 * number, 2 + 2 * number]
        scene.log.arrived(number, f"r-{number}", 12, 8, 0, 3, 5)
        scene.log.allocated(number, blocks)
        scene.log.admitted(number, 0)
        scene.log.progressed([number], [8], [0])
    scene.say()
    for number in range(4):
        scene.log.preempted(number, Preempt.KV_BLOCKS, -1, 2, 8)
        scene.log.released(number, [1 + 2 * number, 2 + 2 * number], Release.PREEMPTED)
    scene.say()
    (finding,) = scene.firing(PREEMPTION)
    assert finding.verdict == "likely"
    assert "prefix cache" in finding.missing
    assert "may be wasted" in finding.explanation
    for number in range(4):
        scene.log.allocated(number, [1 + 2 * number, 2 + 2 * number])
        scene.log.admitted(number, kept)
    scene.say()
    (finding,) = scene.firing(PREEMPTION)
    assert finding.verdict == verdict


def test_a_request_that_computed_nothing_is_not_among_those_whose_work_was_wasted() -> None:
    scene = Spoken(total=13)
    blocks = {number: [1 + 2 * number, 2 + 2 * number] for number in range(6)}
    for turn in range(2):
        for number, own in blocks.items():
            if not turn:
                scene.log.arrived(number, f"r-{number}", 12, 8, 0, 3, 5)
            scene.log.allocated(number, own)
            scene.log.admitted(number, 8 if number == 5 else 0)
            scene.log.progressed([number], [8], [0])
        scene.say()
        for number, own in blocks.items():
            scene.log.preempted(number, Preempt.KV_BLOCKS, -1, 2, 8)
            scene.log.released(number, own, Release.PREEMPTED)
        scene.say()
    (finding,) = scene.firing(PREEMPTION)
    assert finding.culprits.requests == [f"r-{number}" for number in range(5)]
    assert value(finding, "preemptions") == 12
    assert value(finding, "preemptions_without_output") == 10


def test_a_reset_of_all_that_run_is_asked_for() -> None:
    """Who resets the prefix cache of a busy engine has all preempted."""
    scene = Spoken()
    for number in range(8):
        scene.arrive(number, [1 + 2 * number, 2 + 2 * number])
    scene.say()
    for number in range(8):
        scene.log.preempted(number, Preempt.RESET, -1, 2, 8)
        scene.log.released(number, [1 + 2 * number, 2 + 2 * number], Release.RESET)
    scene.say()
    assert scene.alarms() == []


def test_far_fewer_run_long_after_a_preemption() -> None:
    scene = waste.after_retract()
    enough_s = scene.watch.settings(THRESHOLDS[f"{AFTER_RETRACT}.quiet_s"])

    def quiet_s() -> float:
        return scene.ledger.age_s(scene.ledger.preempted[-1].at_ns)

    while quiet_s() < enough_s - 1:
        scene.live(0.5, every=0.1)
        assert not scene.firing(AFTER_RETRACT)
    assert AFTER_RETRACT in [f.code for f in scene.watch.findings("pending")]
    scene.live(3, every=0.1)
    finding = scene.only(AFTER_RETRACT)
    assert finding.verdict == "likely"
    waiting = [r.id for r in scene.ledger.state.requests.values() if r.status == Status.WAITING]
    assert finding.culprits.requests == waiting
    before, now = value(finding, "output_tokens_per_step_before"), value(finding, "output_tokens_per_step_now")
    assert float(before) > 2 * float(now) > 0


def test_an_engine_that_recovers_from_a_preemption() -> None:
    scene = waste.after_retract(fault=False)
    scene.live(60, every=0.1)
    assert scene.alarms() == []


def test_as_many_requests_that_give_fewer_tokens_a_step_are_no_caution() -> None:
    """Speculative decoding after a preemption, with every place taken throughout: acceptance falls from 4 to 1.5."""
    scene = Spoken(total=400, max_num_seqs=8)
    for number in range(1, 9):
        scene.arrive(number, [number])
    scene.log.arrived(9, "r-9", 4, 8, 0, 1, 3)
    outputs = 0.0

    def speculate(seconds: int, accepted: float) -> None:
        nonlocal outputs
        for _ in range(seconds * 10):
            scene.clock.sleep(0.1)
            outputs += accepted
            scene.log.step_launched(round(outputs), list(range(1, 9)), [4] * 8)
            scene.log.step_completed(round(outputs), 100_000_000, Limit.SEQUENCES, -1, -1, -1)
            scene.log.progressed(list(range(1, 9)), [8] * 8, [round(outputs)] * 8)
            scene.log.not_scheduled(9, Cause.MAX_NUM_SEQS, 1)
            scene.say()

    speculate(15, 4)
    scene.log.preempted(8, Preempt.KV_BLOCKS, 1, 1, 4)
    scene.log.admitted(8, 0)
    speculate(60, 1.5)
    assert not [f for f in scene.watch.findings() if f.code == AFTER_RETRACT]


@pytest.mark.parametrize(("head_needs", "fires"), [(9, True), (10, False)])
def test_a_head_without_room_is_not_held_back_by_a_caution(head_needs: int, fires: bool) -> None:
    """Six of eight are preempted, and two run with nine of eleven blocks free."""
    scene = retracted(head_needs, 2, 35)
    assert scene.ledger.state.free == 9
    assert [code for code in dict.fromkeys(scene.alarms()) if code == AFTER_RETRACT] == [AFTER_RETRACT] * fires


@pytest.mark.parametrize(("seconds", "pending"), [(8, False), (12, True)])
def test_a_preemption_of_some_seconds_ago_is_no_caution_that_lasts(seconds: int, pending: bool) -> None:
    """Ten seconds of steps after it are compared with those before."""
    scene = retracted(9, 2, seconds)
    assert [f.code for f in scene.watch.findings("pending") if f.code == AFTER_RETRACT] == [AFTER_RETRACT] * pending


@pytest.mark.parametrize(("running", "fires"), [(4, True), (5, False)])
def test_steps_of_more_than_half_as_many_tokens_are_no_caution(running: int, fires: bool) -> None:
    assert bool(retracted(5, running, 35).firing(AFTER_RETRACT)) is fires


@pytest.mark.parametrize(("running", "grows", "fires"), [(2, False, True), (4, False, False), (1, True, False)])
def test_a_slow_engine_has_the_steps_in_which_it_could_let_more_run(running: int, grows: bool, fires: bool) -> None:
    """Steps take 10 s, so that four have passed: a limit that was raised by one in each is five or more."""
    scene = retracted(5, running, 40, step_s=10.0, grows=grows)
    assert bool(scene.firing(AFTER_RETRACT)) is fires


def retracted(head_needs: int, running: int, seconds: int, step_s: float = 0.2, grows: bool = False) -> Spoken:
    """All but so many of eight are preempted, and those run for so long beside free blocks and a head of the queue. If
    the engine recovers, it `grows`, one more runs with each step.
    """
    scene = Spoken(total=12, max_num_seqs=8)
    log, step = scene.log, 0

    def decode(seconds: float, running: list[int]) -> None:
        nonlocal step
        for _ in range(round(seconds / step_s)):
            scene.clock.sleep(step_s)
            step += 1
            log.step_launched(step, running, [1] * len(running))
            log.step_completed(step, round(step_s * 1e9), Limit.SEQUENCES, -1, -1, -1)
            log.progressed(running, [4 + step] * len(running), [step] * len(running))
            log.not_scheduled(9, Cause.MAX_NUM_SEQS, step)
            scene.say()

    for number in range(1, 9):
        scene.arrive(number, [number])
    log.arrived(9, "r-9", 4 * head_needs, 8, 0, head_needs, head_needs + 2)
    decode(15 if step_s < 1 else 60, list(range(1, 9)))
    for number in range(1 + running, 9):
        log.preempted(number, Preempt.KV_BLOCKS, 1, 1, 4)
        log.released(number, [number], Release.PREEMPTED)
    for more in range(round(seconds / step_s)):
        if grows and more:
            log.admitted(running + more, 0)
        decode(step_s, list(range(1, 1 + running + grows * more)))
    return scene


def test_a_load_that_goes_away_after_a_preemption() -> None:
    """Fewer run because fewer come: nobody waits."""
    scene = waste.growth()
    for _ in range(50):
        scene.lab.arrive(4, max_tokens=10)
        scene.live(2, every=0.1)
    assert scene.alarms() == []
