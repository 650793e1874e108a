"""Engines that number their requests from 0, in the ledger's balance."""

from __future__ import annotations

from kvscope.monitor.contract.kinds import Kind, Release, Stage
from kvscope.monitor.contract.wire import Run, batch_of
from tests.detectors.spoken import ENGINE, Spoken


def test_the_request_of_number_0_is_an_owner_like_any_other() -> None:
    """It runs, and shares a block with one that waits."""
    scene = Spoken(total=9)
    scene.arrive(0, [1, 2])
    scene.log.arrived(1, "r-1", 8, 8, 0, 2, 4)
    scene.log.reused(1, [1])
    scene.say()
    parts = scene.ledger.balance()
    assert parts.holds
    assert (parts.running, parts.waiting) == (2, 0)


def test_after_a_loss_a_block_of_request_0_still_counts_once() -> None:
    """The release of another shared block was lost, and its first owner releases it, too."""
    scene = Spoken(total=9)
    scene.arrive(0, [1])
    scene.arrive(2, [2])
    for number, block in ((1, 1), (3, 2)):
        scene.log.arrived(number, f"r-{number}", 8, 8, 0, 2, 4)
        scene.log.reused(number, [block])
        scene.log.admitted(number, 0)
    scene.say()
    assert scene.ledger.balance().running == 2
    lost = Run(Kind.LOST, 0, -1, [9, 9, Stage.TRANSPORT], [])
    scene.watch.feed([batch_of(ENGINE, scene.packer.epoch, [lost], wall_ns=scene.clock.time_ns())])
    scene.log.audit_begin(1)
    scene.log.audit_blocks(1, [2 * 4, 1 * 4])
    scene.log.released(2, [2], Release.PREEMPTED)
    scene.say()
    assert scene.ledger.state.owner[2] < 0
    assert scene.ledger.balance().running == 2
