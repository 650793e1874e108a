"""harm.*: a client suffers and no other finding says why. Scenes of a real vLLM, and of an engine's words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvscope.monitor.contract.kinds import Cause, EngineMode, Release, Status
from kvscope.monitor.detectors.detector import Settings
from kvscope.monitor.detectors.findings import FindingReport, severity_at_least
from kvscope.monitor.sources.recording import Recording
from tests.detectors.spoken import Observer, recorded, value
from tests.detectors.test_lost_request import Served
from tests.detectors.test_step_time import StepCost, Timed


def graver(observer: Observer) -> list[FindingReport]:
    """Those of warning or above that ever fired."""
    return [each for each in observer.watch.findings() if severity_at_least(each.severity, "warning")]


@pytest.mark.parametrize(
    ("name", "code", "culprits"),
    [
        ("run-slots-leak", "harm.unserved", ["q40", "q41", "q42", "q43", "q44", "q45"]),
        ("sent-back-to-token-0", "harm.computed-again", ["loop"]),
        ("priority-starves-60s", "harm.overtaken", ["low0"]),
    ],
)
def test_clients_of_a_real_engine_that_suffer_for_no_known_cause_are_named(
    tmp_path: Path, name: str, code: str, culprits: list[str]
) -> None:
    observer = recorded(name, tmp_path)
    (finding,) = graver(observer)
    assert (finding.code, finding.verdict, finding.culprits.requests) == (code, "confirmed", culprits)
    assert all(each.excluded_by for each in finding.alternatives)


def test_a_prompt_that_a_real_engine_computes_alone_for_75_s_harms_nobody(tmp_path: Path) -> None:
    assert not graver(recorded("prefill-of-75s-alone", tmp_path))


def test_the_policy_is_named_where_all_that_overtook_are_more_urgent(tmp_path: Path) -> None:
    (finding,) = graver(recorded("priority-starves-60s", tmp_path))
    assert finding.severity == "warning"
    assert value(finding, "overtakers") == value(finding, "more_urgent_overtakers") > 0
    assert "the policy starves it" in finding.explanation
    assert "not known" not in finding.explanation


def test_harm_is_told_in_seconds(tmp_path: Path) -> None:
    recorded("run-slots-leak", tmp_path)
    watch = Observer().watch
    for record in Recording(tmp_path / "rec"):
        watch.feed([record])
        fired = [each for each in watch.findings("firing") if each.code == "harm.unserved"]
        if fired:
            break
    assert value(fired[0], "longest_harm_s") < 10


def left_out(scene: Served) -> None:
    scene.arrive(1, [3, 4])
    scene.arrive(2, [5])
    scene.beats(25, queued=2)  # request 1 progresses in each step


def test_a_request_that_no_step_computes_is_harmed() -> None:
    scene = Served()
    left_out(scene)
    finding = scene.only("harm.no-progress")
    assert (finding.culprits.requests, finding.culprits.blocks) == (["r-2"], [5])


def test_the_harm_ends_when_a_cause_claims_it() -> None:
    scene = Served()
    left_out(scene)
    assert scene.firing("harm.no-progress")
    scene.log.not_scheduled(2, Cause.ZERO_TOKENS, 8)
    for _ in range(15):
        scene.beats(1, queued=2)
    assert scene.only("stuck.zero-token").culprits.requests == ["r-2"]


def test_a_cause_that_is_pending_is_told_first() -> None:
    """The scheduler reports from the start that it leaves the request out: no moment for the harm alone."""
    scene = Served()
    scene.arrive(1, [3, 4])
    scene.beats(22, queued=1)
    scene.arrive(2, [5])
    scene.log.not_scheduled(2, Cause.ZERO_TOKENS, 1)
    scene.beats(15, queued=2)
    assert scene.only("stuck.zero-token").culprits.requests == ["r-2"]
    assert not [each for each in scene.watch.findings("resolved") if each.code.startswith("harm.")]


@pytest.mark.parametrize(
    ("step_s", "steps", "bound_s"),
    [(0.05, 60, 5), (3.0, 36, 9), (0.05, 19, 20), (0.05, 2, 20)],
)
def test_a_step_that_does_not_end_is_in_a_finding_within_the_bound(step_s: float, steps: int, bound_s: float) -> None:
    """Five seconds, or three times the slowest step: 20 s among the first 20 steps."""
    scene = Timed(StepCost(step_s))
    scene.enter(1, 100)
    for _ in range(steps):
        scene.run({1: 1})
    scene.launch({1: 1})
    for _ in range(round(bound_s / 2)):
        scene.hang(1)
    assert not scene.watch.lifecycle.firing()
    for _ in range(round(bound_s / 2) + 4):
        scene.hang(1)
    for _ in range(40):  # and it stays in one, while a cause takes over
        assert ("r-1",) in [finding.judgement.requests for finding in scene.watch.lifecycle.firing()]
        scene.hang(1)


def larger_step(seconds: float = 50) -> Served:
    """A step computes far more than any before, for so long."""
    scene = Served()
    scene.arrive(1, [3, 4])
    scene.beats(22, queued=1)
    scene.arrive(2, [5])
    scene.log.step_launched(scene.outputs + 1, [1, 2], [1, 4])
    scene.say()
    scene.beats(seconds, queued=2, steps=False)
    return scene


def test_while_a_step_larger_than_any_before_computes_nobody_is_harmed() -> None:
    assert not [each for each in larger_step().alarms() if each.startswith("harm.")]


def test_while_the_first_step_computes_nobody_is_harmed_though_the_scheduler_goes_on() -> None:
    """With asynchronous scheduling the next step is launched before that one ends."""
    scene = Served()
    scene.arrive(2, [3, 4])
    scene.log.step_launched(1, [2], [8])
    scene.say()
    for _ in range(80):
        scene.passes += 10
        scene.beats(1, queued=1, steps=False)
    assert not [each for each in scene.alarms() if each.startswith("harm.")]


@pytest.mark.parametrize(("priority", "found"), [(0, True), (5, True), (-1, False)])
def test_one_that_is_more_urgent_may_overtake(priority: int, found: bool) -> None:
    scene = Served()
    scene.arrive(1, [1])
    scene.log.arrived(2, "r-2", 8, 8, 0, 2, 4)
    scene.beats(1, queued=2)
    scene.log.arrived(3, "r-3", 4, 8, priority, 1, 3)
    scene.log.allocated(3, [4])
    scene.log.admitted(3, 0)
    scene.beats(90, queued=3)
    assert bool(scene.firing("harm.overtaken")) == found


def test_a_paused_engine_harms_nobody() -> None:
    scene = Served()
    left_out(scene)
    scene.log.engine_mode(EngineMode.PAUSED_ALL)
    scene.say()
    scene.beats(5, queued=2, steps=False)
    assert not [each for each in scene.firing() if each.code.startswith("harm.")]


def waits_with_blocks(total: int, seconds: int = 75) -> Served:
    """Request 1 gets tokens, request 2 waits and has two blocks."""
    scene = Served(total=total)
    scene.arrive(1, [1])
    scene.log.arrived(2, "r-2", 8, 8, 0, 2, 4)
    scene.log.allocated(2, [2, 3])
    scene.beats(seconds, queued=2)
    return scene


def passed_by(seconds: int, settings: Settings | None = None) -> Served:
    """Request 2 waits, and request 3, which arrived later, is admitted."""
    scene = Served(settings=settings or Settings())
    scene.arrive(1, [1])
    scene.log.arrived(2, "r-2", 8, 8, 0, 2, 4)
    scene.beats(1, queued=2)
    scene.arrive(3, [4])
    scene.beats(seconds, queued=3)
    return scene


def left_waiting(seconds: int) -> Served:
    """One of two places is free, and the engine says that all are taken."""
    scene = Served(max_num_seqs=2)
    scene.arrive(1, [1])
    scene.log.arrived(2, "r-2", 8, 8, 0, 2, 4)
    scene.log.not_scheduled(2, Cause.MAX_NUM_SEQS, 1)
    scene.beats(seconds, queued=2)
    return scene


@pytest.mark.parametrize(
    ("code", "begin", "grace_s"),
    [
        ("harm.overtaken", passed_by, 30),
        ("harm.unserved", left_waiting, 30),
        ("harm.held-blocks", lambda seconds: waits_with_blocks(9, seconds), 60),
    ],
)
def test_harm_is_told_once_it_has_lasted(code: str, begin: Callable[[int], Served], grace_s: int) -> None:
    assert not begin(grace_s - 3).firing(code)
    (finding,) = begin(grace_s + 5).firing(code)
    assert finding.culprits.requests == ["r-2"]


@pytest.mark.parametrize(("total", "fires"), [(9, True), (10, False)])
def test_a_quarter_of_the_pool_that_nobody_who_gets_tokens_has_is_harm(total: int, fires: bool) -> None:
    found = waits_with_blocks(total).firing("harm.held-blocks")
    assert [(each.culprits.blocks, each.culprits.requests) for each in found] == [([2, 3], ["r-2"])] * fires


def test_blocks_that_another_finding_names_are_not_told_again() -> None:
    scene = Served(total=9)
    scene.arrive(1, [1])
    scene.arrive(2, [2, 3])
    scene.beats(75, queued=2)
    assert [each.culprits.requests for each in scene.firing("harm.no-progress")] == [["r-2"]]
    assert not scene.firing("harm.held-blocks")


IMPOSSIBLE: list[tuple[Cause, str]] = [
    (Cause.KV_BLOCKS, "100.0 % of the pool is free"),
    (Cause.BEHIND_HEAD, "no other request waits"),
    (Cause.MAX_NUM_SEQS, "0 requests of 4 run"),
    (Cause.PAUSED, "the engine's mode is unpaused"),
    (Cause.TOKEN_BUDGET, "no request runs"),
    (Cause.PREEMPTION_IN_STEP, "no request runs"),
    (Cause.STEP_IN_FLIGHT, "no request runs"),
    (Cause.LORA, "no request runs"),
]


def idle_with_one_waiting(cause: Cause, seconds: int = 40) -> Served:
    """An engine of four places has served one request; another waits for `cause`, and the passes go on."""
    scene = Served(max_num_seqs=4)
    scene.arrive(1, [1, 2])
    scene.beats(22, queued=1)
    scene.log.released(1, [1, 2], Release.FINISHED)
    scene.log.finished(1, Status.FINISHED_STOPPED)
    scene.log.arrived(2, "r-2", 8, 8, 0, 2, 4)
    scene.log.not_scheduled(2, cause, 1)
    scene.say()
    passes(scene, seconds)
    return scene


def passes(scene: Served, seconds: int) -> None:
    """The scheduler makes passes that run nothing new."""
    for _ in range(seconds):
        scene.passes += 10
        scene.beats(1, queued=1, steps=False)


@pytest.mark.parametrize(("cause", "text"), IMPOSSIBLE)
def test_a_cause_that_the_state_contradicts_is_the_finding(cause: Cause, text: str) -> None:
    finding = idle_with_one_waiting(cause).only("harm.unserved")
    assert (finding.verdict, finding.culprits.requests) == ("confirmed", ["r-2"])
    assert f"That cannot be: {text}." in finding.explanation


def test_every_cause_of_a_wait_is_checked_or_is_not_in_the_state() -> None:
    """A cause that is new needs a decision here."""
    of_others = {Cause.ENCODER, Cause.REMOTE_KV, Cause.GRAMMAR, Cause.STREAMING_INPUT, Cause.CONNECTOR}
    no_reason = {Cause.NONE, Cause.NEW, Cause.PREEMPTED, Cause.UNKNOWN}
    own_code = {Cause.ZERO_TOKENS}  # stuck.zero-token
    assert {cause for cause, _ in IMPOSSIBLE} == set(Cause) - of_others - no_reason - own_code


def two_run(cause: Cause, max_num_seqs: int, blocks: list[int]) -> Served:
    """Request 1 gets tokens and has these blocks; request 3 waits for `cause` for a minute."""
    scene = Served(max_num_seqs=max_num_seqs)
    scene.arrive(1, blocks)
    scene.log.arrived(3, "r-3", 8, 8, 0, 2, 4)
    scene.log.not_scheduled(3, cause, 1)
    scene.beats(60, queued=2)
    return scene


@pytest.mark.parametrize(("blocks", "found"), [(range(1, 33), False), (range(1, 16), False), (range(1, 5), True)])
def test_blocks_that_an_engine_keeps_free_for_those_that_run_contradict_nothing(blocks: range, found: bool) -> None:
    """vLLM keeps a watermark while others run. It is a small part of the pool."""
    assert bool(two_run(Cause.KV_BLOCKS, 4, [*blocks]).firing("harm.unserved")) == found


@pytest.mark.parametrize("others", [0, 1])
def test_a_place_that_became_free_since_the_last_pass_contradicts_nothing(others: int) -> None:
    """The engine tells the end of a step, and its next pass admits the request."""
    scene = Served(max_num_seqs=1 + others)
    scene.arrive(1, [1])
    for number in range(3, 3 + others):
        scene.arrive(number, [number])
    scene.log.arrived(2, "r-2", 8, 8, 0, 2, 4)
    scene.log.not_scheduled(2, Cause.MAX_NUM_SEQS, 1)
    scene.beats(60, queued=2)
    scene.log.released(1, [1], Release.FINISHED)
    scene.log.finished(1, Status.FINISHED_STOPPED)
    scene.say()
    assert not scene.firing("harm.unserved")
    passes(scene, 35)  # and if it is not admitted, it is harmed from here on
    assert 30 < float(value(scene.firing("harm.unserved")[0], "longest_harm_s")) < 40


def test_a_pause_that_an_earlier_probe_does_not_report_is_no_harm() -> None:
    """The engine's reason is all that shows it."""
    scene = idle_with_one_waiting(Cause.PAUSED, seconds=0)
    scene.ledger.description = msgspec.structs.replace(scene.ledger.description, engine="vllm", reports_modes=False)
    passes(scene, 40)
    assert not scene.firing("harm.unserved")


def test_a_session_that_waits_for_its_input_takes_a_place() -> None:
    scene = Served(max_num_seqs=2)
    scene.arrive(1, [1])
    scene.arrive(2, [2])
    scene.log.waiting_on(2, Status.WAITING_FOR_STREAMING_REQ)
    scene.log.arrived(3, "r-3", 8, 8, 0, 2, 4)
    scene.log.not_scheduled(3, Cause.MAX_NUM_SEQS, 1)
    scene.beats(60, queued=3)
    assert not scene.firing("harm.unserved")


def test_requests_that_wait_for_no_reason_are_not_claimed_by_a_leak() -> None:
    """The engine says that the head of its queue waits for blocks. Nearly all are free, and a few are lost."""
    scene = idle_with_one_waiting(Cause.KV_BLOCKS, seconds=1)
    scene.log.allocated(9, [8])
    scene.log.finished(9, Status.FINISHED_STOPPED)
    scene.say()
    passes(scene, 40)
    assert {each.code for each in scene.firing()} >= {"harm.unserved", "leak.unaccounted"}
