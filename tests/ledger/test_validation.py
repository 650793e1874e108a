"""The validation switch: a state that cannot be raises with its events; a loss and a contradiction do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvscope.monitor.contract.kinds import Release
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.ledger.engine_state import EngineState
from kvscope.monitor.ledger.invariants import VARIABLE, InvariantError, disputed_blocks, violations
from tests.detectors.scenes import ENGINE, Spoken


@pytest.fixture
def scene() -> Spoken:
    """r-1 runs with blocks 3 and 4, r-2 with 5 and 6; block 4 is cached."""
    scene = Spoken()
    scene.arrive(1, [3, 4])
    scene.arrive(2, [5, 6])
    scene.log.cached(1, [4], [104])
    scene.say()
    return scene


def lose_a_table(state: EngineState) -> None:
    state.requests[1].blocks.remove(4)


def lose_an_owner(state: EngineState) -> None:
    state.owner[4] = -1


def miscount_used(state: EngineState) -> None:
    state.used += 1


def miscount_cached_idle(state: EngineState) -> None:
    state.cached_idle += 1


def add_a_reference(state: EngineState) -> None:
    state.refs[5] += 1


def hold_a_reserved_block(state: EngineState) -> None:
    state.refs[0] = 1


def keep_a_finished_request(state: EngineState) -> None:
    state.requests[1].status, state.requests[1].blocks = 1 << 20, []


def defer_a_free_block(state: EngineState) -> None:
    state.defer(1, "r-1", 1, 0, 0, [9])


def finish_a_step_in_flight(state: EngineState) -> None:
    state.fences[state.last_step] = [1]


@pytest.mark.parametrize(
    ("damage", "invariant"),
    [
        (lose_a_table, "tables"),
        (lose_an_owner, "references"),
        (miscount_used, "counters"),
        (miscount_cached_idle, "counters"),
        (add_a_reference, "references"),
        (hold_a_reserved_block, "reserved"),
        (keep_a_finished_request, "requests"),
        (defer_a_free_block, "deferrals"),
        (finish_a_step_in_flight, "steps"),
    ],
)
def test_each_invariant_is_checked(scene: Spoken, damage: Callable[[EngineState], None], invariant: str) -> None:
    state = scene.ledger.state
    assert not list(violations(state))
    damage(state)
    assert invariant in {violation.invariant for violation in violations(state)}


def test_the_error_carries_the_events_of_block_and_request(scene: Spoken) -> None:
    scene.ledger.state.refs[5] += 1
    with pytest.raises(InvariantError) as raised:
        scene.wait(1)
    assert raised.value.violation.block == 5
    assert [line.split()[1] for line in raised.value.history] == ["ARRIVED", "ALLOCATED", "ADMITTED"]
    assert "block 5: 2 for 1 holders" in str(raised.value)


def test_the_error_carries_the_events_of_earlier_owners_of_the_block(scene: Spoken) -> None:
    scene.log.released(1, [3, 4], Release.PREEMPTED)
    scene.log.allocated(2, [3])
    scene.say()
    scene.ledger.state.refs[3] += 1
    with pytest.raises(InvariantError) as raised:
        scene.wait(1)
    of_other = [line.split()[1] for line in raised.value.history if " #1 " in line]
    assert (raised.value.violation.block, of_other) == (3, ["ALLOCATED", "RELEASED"])


def test_a_table_that_names_a_block_twice_loses_one_entry_with_each_release(scene: Spoken) -> None:
    """As after a preemption that dropped its table without a free: the prefix cache gives it the same block again."""
    state = scene.ledger.state
    for twice in ([5], [5, 6], [6, 5]):
        scene.log.reused(2, twice)
        scene.say()
        scene.log.released(2, twice, Release.PREEMPTED)
        scene.say()  # checks every invariant
        assert (sorted(state.requests[2].blocks), state.refs[5], state.refs[6]) == ([5, 6], 1, 1)
        assert scene.ledger.balance().holds
    scene.log.released(2, [5, 6], Release.PREEMPTED)
    scene.say()
    assert (state.requests[2].blocks, state.refs[5], state.refs[6]) == ([], 0, 0)
    assert not scene.ledger.anomalies


def test_the_blocks_whose_references_and_holders_differ_are_named(scene: Spoken) -> None:
    lose_a_table(scene.ledger.state)
    assert disputed_blocks(scene.ledger.state) == [4]


def test_it_is_off_unless_it_is_asked_for(scene: Spoken, monkeypatch: pytest.MonkeyPatch) -> None:
    assert scene.ledger.validates
    monkeypatch.delenv(VARIABLE)
    assert not EngineLedger(ENGINE).validates
    assert EngineLedger(ENGINE, validate=True).validates


def test_a_contradiction_of_the_engine_breaks_no_invariant(scene: Spoken) -> None:
    scene.log.released(1, [5], Release.FINISHED)  # by another than its owner
    scene.wait(1)
    assert scene.ledger.anomalies
    assert not list(violations(scene.ledger.state))


def test_a_gap_is_not_a_broken_invariant(scene: Spoken) -> None:
    scene.packer.next_sequence += 1
    scene.log.released(1, [3, 4], Release.PREEMPTED)
    scene.wait(1)
    scene.ledger.state.refs[5] += 1
    scene.wait(1)
    assert scene.ledger.losses
