"""A lost batch puts only what it touched in doubt: the rest is judged, and what may have ended in it is not accused."""

from __future__ import annotations

import pytest

from kvscope.monitor.contract.kinds import Holder, Release, Status
from tests.detectors.scenes import Watched
from tests.detectors.spoken import Spoken, value

LARGE = 9_001
"""Blocks: an audit of so many takes about a thousand steps."""


def lose_a_batch(scene: Watched) -> None:
    """A step's events are lost for good; the next frame shows the gap."""
    scene.lab.step()
    scene.skip()
    scene.steps(1)
    assert scene.ledger.state.damaged


def test_a_leak_before_the_loss_is_found_on_an_idle_engine_without_an_audit() -> None:
    scene = Watched(faults=["leak.unaccounted"], total=LARGE, max_num_batched_tokens=1_024)
    request = scene.lab.arrive(9_000, max_tokens=100)
    scene.steps(20)
    scene.lab.abort(request)
    scene.steps(1)
    lose_a_batch(scene)
    scene.beat(5)
    assert scene.ledger.uncertain_since_ns
    finding = scene.only("leak.unaccounted")
    assert finding.verdict == "likely"
    assert "audit" in finding.missing
    assert finding.culprits.requests == [request.id]
    assert value(finding, "unaccounted_blocks") == scene.lab.pool.counts()[2] > 2_000


def test_blocks_that_an_announced_deferral_keeps_are_no_leak_on_an_idle_engine() -> None:
    scene = Watched(connector_share=1.0, total=LARGE, max_num_batched_tokens=1_024, faults=["leak.finished-held"])
    scene.lab.arrive(400, max_tokens=4)
    lose_a_batch(scene)
    scene.run_until_idle()
    assert scene.lab.pool.counts()[2]
    scene.beat(8)
    assert not scene.firing("leak.unaccounted")


def test_a_leak_after_the_loss_is_found_before_the_audit_is_complete() -> None:
    scene = Watched(faults=["leak.unaccounted"], total=LARGE, max_num_batched_tokens=1_024)
    scene.lab.arrive(8, max_tokens=2_000)
    scene.steps(3)
    lose_a_batch(scene)
    request = scene.lab.arrive(400, max_tokens=100)
    scene.steps(10)
    scene.lab.abort(request)
    scene.steps(60, 0.05)
    assert scene.lab.scheduler.running
    assert scene.ledger.uncertain_since_ns
    finding = scene.only("leak.unaccounted")
    assert finding.verdict == "likely"
    assert finding.culprits.requests == [request.id]


def test_what_may_have_been_freed_in_the_loss_is_not_judged_while_the_engine_works() -> None:
    scene = Watched(faults=["leak.unaccounted"], total=LARGE, max_num_batched_tokens=1_024)
    scene.lab.arrive(8, max_tokens=2_000)
    request = scene.lab.arrive(400, max_tokens=100)
    scene.steps(10)
    scene.lab.abort(request)
    lose_a_batch(scene)
    scene.steps(60, 0.05)
    assert scene.ledger.uncertain_since_ns
    assert not scene.firing("leak.unaccounted")


@pytest.mark.parametrize("lost", [True, False])
def test_a_request_whose_end_may_be_lost_is_not_accused(lost: bool) -> None:
    scene = Spoken()
    scene.log.arrived(1, "r-1", 8, 8, 0, 2, 3)
    scene.log.waiting_on(1, Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)
    scene.say()
    scene.log.finished(1, Status.FINISHED_ABORTED)
    if lost:
        scene.log.flush(-1, -1, (-1, -1, -1, -1))
        scene.packer.pack()
    scene.wait(1)
    scene.log.arrived(2, "r-2", 8, 8, 0, 2, 3)
    scene.log.waiting_on(2, Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)
    for _ in range(60):
        scene.wait(1)
    assert scene.ledger.state.damaged == lost
    (finding,) = scene.firing("stuck.grammar")
    assert finding.culprits.requests == ["r-2"]


def test_a_finding_that_fires_outlasts_a_loss_that_leaves_it_in_doubt() -> None:
    scene = Spoken()
    scene.log.arrived(1, "r-1", 8, 8, 0, 2, 3)
    scene.log.waiting_on(1, Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)
    for _ in range(40):
        scene.wait(1)
    (fired,) = scene.firing("stuck.grammar")
    scene.log.memory([1])
    scene.log.flush(-1, -1, (-1, -1, -1, -1))
    scene.packer.pack()
    for _ in range(60):
        scene.wait(1)
    assert scene.ledger.state.damaged
    assert [finding.id for finding in scene.firing("stuck.grammar")] == [fired.id]


def test_an_allocation_shows_that_its_blocks_were_freed_in_the_loss() -> None:
    scene = Spoken()
    scene.arrive(1, [1, 2, 3])
    scene.say()
    scene.log.released(1, [1, 2, 3], Release.FINISHED)
    scene.log.finished(1, Status.FINISHED_STOPPED)
    scene.log.flush(-1, -1, (-1, -1, -1, -1))
    scene.packer.pack()
    scene.wait(1)
    scene.arrive(2, [2, 3])
    scene.wait(1)
    state = scene.ledger.state
    assert [state.refs[block] for block in (1, 2, 3)] == [1, 1, 1]
    assert [state.owners(block) for block in (1, 2, 3)] == [[1], [2], [2]]
    assert state.used == 3
    assert not state.is_certain_block(1)
    assert state.is_certain_block(2)


def test_only_a_deferral_announced_since_the_loss_is_overdue() -> None:
    scene = Spoken()
    for number, blocks in ((1, [1, 2]), (2, [3, 4])):
        scene.arrive(number, blocks)
        scene.log.finished(number, Status.FINISHED_STOPPED)
        scene.log.free_deferred(number, blocks, Holder.CONNECTOR)
        scene.say()
        if number == 1:
            scene.log.memory([1])
            scene.log.flush(-1, -1, (-1, -1, -1, -1))
            scene.packer.pack()
            scene.wait(1)
    state = scene.ledger.state
    assert [state.is_certain_deferral(state.deferrals[number]) for number in (1, 2)] == [False, True]
