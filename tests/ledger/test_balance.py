"""The conservation law, case by case; tests/ledger/test_exact.py holds it at every step of random lives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvscope.monitor.contract.kinds import Holder, Kind, Limit, Release, Stage, Status
from kvscope.monitor.contract.wire import Run, batch_of
from kvscope.monitor.ledger.balance import Balance
from tests.detectors.scenes import ENGINE, Spoken

TOTAL = 17


def balance(scene: Spoken) -> Balance:
    """The balance now, which always adds up."""
    parts = scene.ledger.balance()
    assert parts.holds
    assert (parts.total, parts.reserved) == (scene.total, 1)
    return parts


def shares(scene: Spoken) -> tuple[int, int, int, int]:
    """Blocks of the running, the waiting, the finished, and of nobody."""
    parts = balance(scene)
    return parts.running, parts.waiting, parts.finished, parts.unaccounted


@pytest.fixture
def scene() -> Iterator[Spoken]:
    """r-1 runs with blocks 1 to 3; r-2 took over 1 and 2 by a prefix hit, and has 4."""
    scene = Spoken(TOTAL)
    scene.arrive(1, [1, 2, 3])
    scene.log.cached(1, [1, 2], [101, 102])
    scene.log.arrived(2, "r-2", 12, 8, 0, 3, 5)
    scene.log.reused(2, [1, 2])
    scene.log.allocated(2, [4])
    scene.log.admitted(2, 8)
    scene.say()
    yield scene
    assert not scene.ledger.anomalies


def test_an_empty_pool_is_free() -> None:
    parts = balance(Spoken(TOTAL))
    assert parts.free == TOTAL - 1
    assert shares(Spoken(TOTAL)) == (0, 0, 0, 0)


def test_a_shared_block_counts_once(scene: Spoken) -> None:
    assert shares(scene) == (4, 0, 0, 0)
    assert balance(scene).free == TOTAL - 1 - 4


def test_a_shared_block_counts_under_the_liveliest(scene: Spoken) -> None:
    scene.log.waiting_on(1, Status.WAITING_FOR_REMOTE_KVS)
    scene.say()
    assert shares(scene) == (3, 1, 0, 0)
    scene.log.waiting_on(2, Status.WAITING_FOR_REMOTE_KVS)
    scene.say()
    assert shares(scene) == (0, 4, 0, 0)
    scene.log.finished(1, Status.FINISHED_STOPPED)
    scene.log.free_deferred(1, [1, 2, 3], Holder.CONNECTOR)
    scene.say()
    assert shares(scene) == (0, 3, 1, 0)
    scene.log.finished(2, Status.FINISHED_STOPPED)
    scene.log.free_deferred(2, [1, 2, 4], Holder.CONNECTOR)
    scene.say()
    assert shares(scene) == (0, 0, 4, 0)
    assert balance(scene).unexplained_references == 0


def test_a_finished_owner_without_a_deferral_is_no_holder(scene: Spoken) -> None:
    scene.log.finished(1, Status.FINISHED_ABORTED)
    scene.say()
    assert shares(scene) == (3, 0, 0, 1)
    assert balance(scene).unexplained_references == 3
    assert scene.ledger.state.unexplained_references() == {1: 1, 2: 1, 3: 1}
    scene.log.released(1, [3, 2, 1], Release.ABORTED)
    scene.say()
    assert shares(scene) == (3, 0, 0, 0)
    assert balance(scene).unexplained_references == 0


def test_a_deferral_of_a_part_leaves_the_rest_unaccounted(scene: Spoken) -> None:
    scene.log.finished(1, Status.FINISHED_STOPPED)
    scene.log.free_deferred(1, [1, 3], Holder.CONNECTOR)
    scene.say()
    assert shares(scene) == (3, 0, 1, 0)
    assert scene.ledger.state.unexplained_references() == {2: 1}


def test_what_is_freed_with_a_hash_is_cached_idle(scene: Spoken) -> None:
    scene.log.finished(2, Status.FINISHED_STOPPED)
    scene.log.released(2, [4, 2, 1], Release.FINISHED)
    scene.log.finished(1, Status.FINISHED_STOPPED)
    scene.log.released(1, [3, 2, 1], Release.FINISHED)
    scene.say((TOTAL - 1, 2, 0, TOTAL))
    parts = balance(scene)
    assert (parts.free, parts.cached_idle) == (TOTAL - 1 - 2, 2)
    scene.log.evicted([1], 1)
    scene.say((TOTAL - 1, 1, 0, TOTAL))
    assert balance(scene).cached_idle == 1


def test_detached_blocks_are_held_as_long_as_their_deferral(scene: Spoken) -> None:
    scene.log.detached(1, [1, 2, 3])
    scene.log.finished(1, Status.FINISHED_STOPPED)
    scene.log.free_deferred(1, [1, 2, 3], Holder.FENCE)
    scene.say()
    assert shares(scene) == (3, 0, 1, 0)
    scene.log.reclaimed([1, 2, 3], Release.FINISHED)
    scene.say((TOTAL - 1 - 3, 0, 3, TOTAL))
    assert shares(scene) == (3, 0, 0, 0)
    assert not scene.ledger.state.deferrals


def test_detached_without_a_deferral_is_unaccounted(scene: Spoken) -> None:
    scene.log.detached(1, [3])
    scene.say()
    assert shares(scene) == (3, 0, 0, 1)
    assert scene.ledger.state.unaccounted() == [3]


def test_after_a_loss_the_engines_own_tables_are_the_truth() -> None:
    """r-1's end and its blocks' release were lost; the next whole audit names neither."""
    scene = Spoken(TOTAL)
    scene.arrive(1, [1, 2, 3])
    scene.arrive(2, [4, 5])
    scene.say()
    lost = Run(Kind.LOST, 0, -1, [9, 9, Stage.TRANSPORT], [])
    scene.watch.feed([batch_of(ENGINE, scene.packer.epoch, [lost], wall_ns=scene.clock.time_ns())])
    assert scene.ledger.uncertain_since_ns
    assert shares(scene) == (5, 0, 0, 0)
    scene.log.audit_begin(1)
    held = {4: 1, 5: 1, 6: 1}
    scene.log.audit_blocks(1, [held.get(b, 0) * 4 + (0 if b in held else 2) for b in range(1, TOTAL)])
    scene.log.audit_request(2, "r-2", Status.RUNNING, 4, 1, [4, 5])
    scene.log.audit_end(1, TOTAL - 1 - 3, 0, 3, 1)
    scene.say()
    assert not scene.ledger.uncertain_since_ns
    assert shares(scene) == (2, 0, 0, 1)
    assert scene.ledger.state.unaccounted() == [6]
    assert scene.ledger.request("r-1") is None


def test_while_owners_are_uncertain_it_is_answered_all_the_same() -> None:
    """r-2's release of the shared block was lost; an audit has told the count but not yet the tables."""
    scene = Spoken(TOTAL)
    scene.arrive(1, [1])
    scene.log.cached(1, [1], [101])
    scene.log.arrived(2, "r-2", 8, 8, 0, 2, 4)
    scene.log.reused(2, [1])
    scene.say()
    lost = Run(Kind.LOST, 0, -1, [9, 9, Stage.TRANSPORT], [])
    scene.watch.feed([batch_of(ENGINE, scene.packer.epoch, [lost], wall_ns=scene.clock.time_ns())])
    scene.log.audit_begin(1)
    scene.log.audit_blocks(1, [1 * 4 + 1])
    scene.log.released(1, [1], Release.PREEMPTED)
    scene.say()
    assert scene.ledger.uncertain_since_ns
    assert scene.ledger.balance().total == TOTAL


def test_a_step_keeps_the_balance_and_each_change_of_blocks_or_requests_renews_it(scene: Spoken) -> None:
    before = balance(scene)
    scene.log.step_launched(0, [1, 2], [4, 4])
    scene.log.progressed([1, 2], [16, 16], [1, 1])
    scene.log.step_completed(0, 5, Limit.NONE, TOTAL - 5, 0, 4)
    scene.say()
    assert scene.ledger.balance() is before
    scene.log.allocated(1, [5])
    scene.say()
    assert shares(scene) == (5, 0, 0, 0)
    scene.log.waiting_on(1, Status.WAITING_FOR_REMOTE_KVS)
    scene.say()
    assert shares(scene) == (3, 2, 0, 0)
