"""A ready request that the scheduler does not take up: it is ahead of the head of the queue, not behind it."""

from __future__ import annotations

import pytest

from kvscope.monitor.contract.kinds import Cause, Load, Status
from kvscope.monitor.contract.wire import decode, encode
from kvscope.monitor.probes.packer import Vitals
from tests.detectors.leaks import fetching
from tests.detectors.spoken import Spoken


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


@pytest.mark.parametrize("has_come", [True, False])
def test_a_fetched_request_in_the_status_of_its_fetch_waits_its_turn_once_it_was_found_behind_the_head(
    has_come: bool,
) -> None:
    """As vLLM has it: twelve blocks are of two requests, and the one at the head of the queue lacks one."""
    scene = Spoken(total=13)
    for number in (1, 2):
        scene.log.arrived(number, f"r-{number}", 25, 8, 0, 7, 9)
        scene.log.allocated(number, range(6 * number - 5, 6 * number + 1))
        scene.log.waiting_on(number, Status.WAITING_FOR_REMOTE_KVS)
    scene.wait(1)
    scene.log.ready(1)
    scene.log.queued(1, Cause.KV_BLOCKS)
    if has_come:
        scene.log.remote_load(2, Load.DELIVERED, 24)
        scene.say()
    for passes in range(1, 20):
        scene.log.allocation_failed(1, 1, 0)
        scene.log.not_scheduled(1, Cause.KV_BLOCKS, passes)
        if has_come:
            scene.log.not_scheduled(2, Cause.BEHIND_HEAD, passes)
        scene.wait(1)
        scene.packer._vitals = lambda passes=passes: Vitals(-1, 0, 0, 2, 2, passes, passes)
        scene.watch.feed([decode(encode(scene.packer.heartbeat()))])
        scene.watch.settle()
    assert [f.culprits.requests for f in scene.firing("stuck.parked-loads")] == ([["r-2"]] if has_come else [])
