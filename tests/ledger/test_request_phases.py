"""The life of a request as phases: nothing between its arrival and its end is left out, and the cost adds up."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvscope.monitor.contract.kinds import Cause, Status
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.ledger.event_history import Phase, phases, scan_events
from tests.detectors.scenes import Watched
from tests.detectors.waste import preemption


def life_of(ledger: EngineLedger, name: str) -> list[Phase]:
    record = ledger.request(name)
    assert record is not None
    return phases(scan_events(ledger.recent, record.number), record.number, ledger.now_ns)


def test_preempted_again_and_again() -> None:
    ledger = preemption().ledger
    assert sum(record.preemptions for record in ledger.ended)
    for record in ledger.ended:
        life = life_of(ledger, record.id)
        assert life[0].since_ns == ledger.wall(record.arrived_ns)
        assert all(before.until_ns == after.since_ns for before, after in pairwise(life))
        assert life[-1].status == record.status
        assert life[-1].since_ns == ledger.wall(record.finished_ns)
        assert sum(phase.status == Status.RUNNING for phase in life) == record.preemptions + 1
        # All that was lost was computed again, since it came to its end; nothing is in the prefix cache.
        assert sum(phase.recomputed for phase in life) == record.tokens_lost
        assert sum(phase.computed for phase in life) == record.computed_tokens + record.tokens_lost
        assert (life[-1].computed_tokens, life[-1].output_tokens) == (record.computed_tokens, record.output_tokens)
        waited = sum(phase.until_ns - phase.since_ns for phase in life if phase.status in (1, 6))
        assert waited == sum(record.waited_ns.values())


@pytest.mark.parametrize("after", [0, 3, 12])
def test_what_it_holds(after: int) -> None:
    scene = Watched()
    scene.lab.arrive(40, max_tokens=30)
    scene.lab.arrive(100, max_tokens=30)
    scene.steps(1 + after)
    ledger = scene.ledger
    for record in ledger.state.requests.values():
        last = life_of(ledger, record.id)[-1]
        assert (last.status, last.blocks) == (record.status, len(record.blocks))
        assert last.until_ns == ledger.now_ns


def test_a_reason_that_changes_is_another_phase() -> None:
    scene = Watched(total=33, max_num_seqs=1)
    scene.lab.arrive(8, max_tokens=20)
    scene.lab.arrive(8, max_tokens=4, name="next")
    scene.steps(5)
    assert [(p.status, p.cause) for p in life_of(scene.ledger, "next")] == [(Status.WAITING, Cause.MAX_NUM_SEQS)]
    scene.run_until_idle()
    assert [p.status for p in life_of(scene.ledger, "next")] == [
        Status.WAITING,
        Status.RUNNING,
        Status.FINISHED_LENGTH_CAPPED,
    ]
