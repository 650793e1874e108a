"""collapse.preempt-all, told apart from the collapse that looks the same in any figure."""

from __future__ import annotations

from kvscope.monitor.detectors.registry import THRESHOLDS
from tests.detectors import waste
from tests.detectors.scenes import lockstep, value

CODE = "collapse.preempt-all"


def test_all_that_run_are_preempted_at_once() -> None:
    scene = waste.preempt_all()
    scene.watch.settle()
    finding = scene.only(CODE)
    assert (finding.severity, finding.verdict) == ("error", "confirmed")
    assert value(finding, "preempted_in_one_pass") == value(finding, "running_before")
    # A pass strikes once: the first victim. The others go with it.
    struck = set(scene.lab.faults.on[CODE].struck)
    assert struck <= set(finding.culprits.requests)
    assert value(finding, "collapses_seen") == len(scene.lab.faults.on[CODE].struck)
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
