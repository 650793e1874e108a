"""A ready request that the scheduler does not take up: it is ahead of the head of the queue, not behind it."""

from __future__ import annotations

from tests.detectors.leaks import fetching


def test_a_fetched_request_that_was_ready_before_the_head_came_is_not_behind_it() -> None:
    """What it waited for has come, and the scheduler left it out: no request waits for another here."""
    scene = fetching(total=24, faults=("stuck.promotion-starved:limit=1",))
    left_out = scene.lab.arrive(48, max_tokens=8)
    scene.steps(20)
    head = scene.lab.arrive(60, max_tokens=8)
    scene.live(30)
    assert scene.lab.scheduler.waiting.head() is head
    assert head.shortage
    assert scene.alarms() == ["stuck.promotion-starved"]
    assert scene.firing("stuck.promotion-starved")[0].culprits.requests == [left_out.id]


def test_a_fetched_request_that_came_before_the_head_and_was_ready_after_it_is_not_behind_it() -> None:
    """Had the scheduler taken it up, it would be ahead of the one that came while its KV was fetched."""
    scene = fetching(total=24, faults=("stuck.promotion-starved:limit=1",))
    left_out, head = scene.lab.arrive(48, max_tokens=8), scene.lab.arrive(60, max_tokens=8)
    scene.steps(20)
    scene.live(30)
    record = scene.ledger.state.requests[left_out.number]
    assert record.ready_ns > scene.ledger.state.requests[head.number].arrived_ns
    assert not scene.firing("stuck.parked-loads")
    assert scene.firing("stuck.promotion-starved")[0].culprits.requests == [left_out.id]
