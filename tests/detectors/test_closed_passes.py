"""stuck.promotion-starved where each pass ends before the scheduler tries a waiting request."""

from __future__ import annotations

import pytest

from kvscope.monitor.contract.kinds import Cause, Limit, Load, Status
from tests.detectors.scenes import Spoken


@pytest.mark.parametrize("overtaken", [False, True])
def test_a_ready_request_whose_passes_end_before_the_queue_waits_for_its_turn(overtaken: bool) -> None:
    """A prompt takes each step's whole token budget, and one that arrived later is refused the same way: no waiting
    request was tried. With the later one admitted, this one was skipped.
    """
    scene = Spoken()
    log = scene.log
    scene.arrive(1, list(range(1, 30)))
    log.arrived(2, "r-2", 40, 8, 0, 10, 12)
    log.queued(2, Cause.NEW)
    log.waiting_on(2, Status.WAITING_FOR_REMOTE_KVS)
    log.remote_load(2, Load.DELIVERED, 40)
    log.not_scheduled(2, Cause.TOKEN_BUDGET, 1)
    scene.say()
    scene.wait(0.5)
    log.arrived(3, "r-3", 40, 8, 0, 10, 12)
    log.queued(3, Cause.NEW)
    log.not_scheduled(3, Cause.TOKEN_BUDGET, 1)
    if overtaken:
        log.admitted(3, 0)
    for step in range(60):
        log.tick()
        log.step_launched(step, [1], [1])
        scene.say()
        scene.wait(0.5)
        log.progressed([1], [116 + step], [step])
        log.step_completed(step, 500_000_000, Limit.TOKENS, 2, 0, 29)
    starved = scene.firing("stuck.promotion-starved")
    assert [finding.culprits.requests for finding in starved] == ([["r-2"]] if overtaken else [])
    assert {finding.verdict for finding in starved} <= {"confirmed"}


@pytest.mark.parametrize("queues_ready", [False, True])
def test_an_engine_that_queues_the_ready_in_each_pass_has_skipped_one_that_is_not_queued(queues_ready: bool) -> None:
    """It is behind many others, and no pass gets as far as the queue: elsewhere its turn has not come."""
    scene = Spoken(queues_ready=queues_ready)
    _waits_for_slots(scene, queued=False)
    starved = scene.firing("stuck.promotion-starved")
    assert [finding.culprits.requests for finding in starved] == ([["r-3"]] if queues_ready else [])
    assert {finding.verdict for finding in starved} <= {"confirmed"}


def test_one_that_was_put_back_in_the_queue_waits_for_its_turn() -> None:
    scene = Spoken(queues_ready=True)
    _waits_for_slots(scene, queued=True)
    assert not scene.firing("stuck.promotion-starved")


def _waits_for_slots(scene: Spoken, queued: bool) -> None:
    """Request 3 is ready behind request 2, which waits for a slot."""
    log = scene.log
    scene.arrive(1, list(range(1, 10)))
    for number in (2, 3):
        log.arrived(number, f"r-{number}", 40, 8, 0, 10, 12)
        log.queued(number, Cause.NEW)
    log.waiting_on(3, Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)
    log.not_scheduled(2, Cause.MAX_NUM_SEQS, 1)
    scene.say()
    scene.wait(0.5)
    log.ready(3)
    if queued:
        log.queued(3, Cause.NEW, at_front=True)
    for step in range(60):
        log.tick()
        log.step_launched(step, [1], [1])
        scene.say()
        scene.wait(0.5)
        log.progressed([1], [36 + step], [step])
        log.step_completed(step, 500_000_000, Limit.SEQUENCES, 2, 0, 29)


@pytest.mark.parametrize("lacks", [Cause.NONE, Cause.LORA], ids=["nothing", "a LoRA slot"])
@pytest.mark.parametrize("waits_for", [Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR, Status.WAITING_FOR_REMOTE_KVS])
def test_a_ready_request_in_the_queue_may_lack_what_others_lack(lacks: Cause, waits_for: Status) -> None:
    """vLLM goes on to requests whose adapter runs, and the probe names the reason of the first in the queue alone. One
    whose status still shows the wait was not tried at all.
    """
    scene = Spoken()
    log = scene.log
    scene.arrive(1, list(range(1, 10)))
    for number in (2, 3):
        log.arrived(number, f"r-{number}", 40, 8, 0, 10, 12)
        log.queued(number, Cause.NEW)
    log.waiting_on(3, waits_for)
    scene.say()
    scene.wait(0.5)
    in_queue = waits_for == Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    if in_queue:
        log.ready(3)
    else:
        log.remote_load(3, Load.DELIVERED, 40)
    if lacks:
        log.not_scheduled(2, lacks, 1)
    scene.say()
    scene.wait(0.5)
    scene.arrive(4, [20, 21])
    for step in range(60):
        log.tick()
        log.step_launched(step, [1, 4], [1, 1])
        scene.say()
        scene.wait(0.5)
        log.progressed([1, 4], [36 + step, 8 + step], [step, step])
        log.step_completed(step, 500_000_000, Limit.SEQUENCES, 2, 0, 29)
    assert bool(scene.firing("stuck.promotion-starved")) == (not (lacks and in_queue))
