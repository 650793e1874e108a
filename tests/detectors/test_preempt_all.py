"""collapse.preempt-all, told apart from the collapse that looks the same in any figure."""

from __future__ import annotations

import pytest

from kvscope.monitor.contract.kinds import Preempt, Release
from kvscope.monitor.detectors.registry import THRESHOLDS
from tests.detectors import waste
from tests.detectors.scenes import lockstep, value
from tests.detectors.spoken import Spoken

CODE = "collapse.preempt-all"


def test_all_that_run_are_preempted_at_once() -> None:
    scene = waste.preempt_all()
    scene.watch.settle()
    finding = scene.only(CODE)
    assert (finding.severity, finding.verdict) == ("error", "confirmed")
    assert value(finding, "preempted_in_one_pass") == value(finding, "running_before")
    # A pass strikes once: the first victim. The others go with it.
    affected = set(scene.lab.faults.on[CODE].affected)
    assert affected <= set(finding.culprits.requests)
    assert value(finding, "collapses_seen") == len(scene.lab.faults.on[CODE].affected)
    scene.live(scene.watch.settings(THRESHOLDS[f"{CODE}.remember_s"]) + 5)
    assert [f.code for f in scene.watch.findings("resolved")] == [CODE]


def test_one_or_two_that_make_room_are_no_collapse() -> None:
    scene = waste.preempt_all(fault=False)
    assert scene.lab.scheduler.num_preemptions > 0
    scene.watch.settle()
    assert scene.alarms() == []


def test_usage_falls_as_far_when_alike_requests_end() -> None:
    """The two side by side: the fall is the same, and each is called by its own name."""
    ended, thrown_out = lockstep(waves=2), waste.preempt_all()
    for scene, code in ((ended, "collapse.lockstep"), (thrown_out, CODE)):
        scene.watch.settle()
        assert scene.only(code).code == code
        usable = scene.lab.pool.usable
        used = [usable - point.balance.free for point in scene.ledger.points]
        assert max(used) > 0.8 * usable


def one_pass(
    running: int,
    preempted: int,
    *,
    reason: Preempt = Preempt.KV_BLOCKS,
    frees: bool = True,
    usable: int = 200,
    settings: tuple[str, ...] = (),
) -> Spoken:
    """So many of those that run are preempted in one pass; their blocks come back, unless a step still uses them."""
    scene = Spoken(total=usable + 1, settings=settings)
    each = usable // running
    held = {number: list(range(1 + each * (number - 1), 1 + each * number)) for number in range(1, running + 1)}
    for number, blocks in held.items():
        scene.arrive(number, blocks)
    scene.wait(1)
    for number, blocks in list(held.items())[:preempted]:
        scene.log.preempted(number, reason, 0, each, 4 * each)
        if frees:
            scene.log.released(number, blocks, Release.PREEMPTED)
    scene.wait(1)
    return scene


@pytest.mark.parametrize(
    ("running", "preempted", "fires"),
    [(4, 4, True), (3, 3, False), (10, 9, True), (10, 8, False), (20, 18, True), (20, 17, False)],
)
def test_four_requests_and_nine_tenths_of_those_that_run_are_all(running: int, preempted: int, fires: bool) -> None:
    found = one_pass(running, preempted).firing(CODE)
    assert bool(found) == fires
    for finding in found:
        assert len(finding.culprits.requests) == value(finding, "preempted_in_one_pass") == preempted
        assert value(finding, "running_before") == running


def test_a_reset_that_preempts_all_is_no_collapse() -> None:
    assert not one_pass(8, 8, reason=Preempt.RESET).firing(CODE)


def test_a_pass_that_frees_nothing_is_no_fall_of_usage() -> None:
    assert not one_pass(8, 8, frees=False).firing(CODE)


def test_one_request_is_all_where_one_is_set_to_be_enough() -> None:
    """The least that can be set, in the smallest pool: the first of a pass is its last."""
    scene = one_pass(1, 1, usable=1, settings=(f"{CODE}.min_requests=1",))
    finding = scene.only(CODE)
    assert (value(finding, "preempted_in_one_pass"), value(finding, "usage_before")) == (1, 100.0)


def test_a_collapse_is_remembered_for_two_minutes() -> None:
    scene = one_pass(8, 8)
    scene.wait(115)
    assert scene.only(CODE)
    scene.wait(10)
    assert not scene.firing(CODE)


def test_a_finding_begins_with_the_first_request_that_was_preempted() -> None:
    scene = one_pass(8, 8)
    first = scene.ledger.preempted[0]
    (finding,) = scene.firing(CODE)
    assert finding.position == scene.ledger.at(first.at)
