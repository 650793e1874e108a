"""Audits held against the books: no false alarm from what happens while one is being read."""

from __future__ import annotations

import random

import pytest

from kvscope.engine.requests.request import Request, SamplingParams
from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.contract.kinds import Cause, Status
from kvscope.monitor.ledger.engine_ledger import EngineLedger


@pytest.mark.parametrize("lose", [False, True], ids=["whole", "damaged"])
def test_requests_that_wait_at_the_front_end_while_an_audit_is_read(lose: bool) -> None:
    """They are known before the scheduler has them, for longer than a slice or two."""
    rng = random.Random(7)
    lab = Lab(total=130, connector_share=0.5, capacity=8)
    ledger = EngineLedger(lab.packer.engine)
    at_front_end: list[tuple[int, Request]] = []
    applied = 0
    for step in range(1500):
        if rng.random() < 0.2:
            lab._numbers += 1
            request = Request(lab._numbers, f"r-{lab._numbers}", [1] * rng.randint(1, 30), SamplingParams(max_tokens=5))
            lab.log.received(request.number, request.id, request.num_prompt_tokens)
            at_front_end.append((step + rng.randint(0, 12), request))
        for due, request in [item for item in at_front_end if item[0] <= step]:
            lab.scheduler.add(request)
            at_front_end.remove((due, request))
        lab._pack = not (lose and 500 < step < 540)  # the drain thread sleeps, and flushes are dropped
        lab.step()
        for frame in lab.frames[applied:]:
            ledger.apply(frame)
        applied = len(lab.frames)
    assert ledger.state.audit_cycles > 10
    assert bool(ledger.dropped_batches) == lose
    assert not ledger.anomalies
    waiting = {request.number for _, request in at_front_end}
    received = {r.number for r in ledger.state.requests.values() if r.status == Status.RECEIVED}
    assert received == waiting


def test_who_was_let_in_unheard_no_longer_waits_for_that() -> None:
    lab = Lab(max_num_seqs=2, capacity=2)
    ledger = EngineLedger(lab.packer.engine)
    for _ in range(6):
        lab.arrive(6, max_tokens=12)
    taken_over = []
    for step in range(100):
        lab._pack = not 4 <= step < 30  # the drain thread sleeps while others are let in
        waiting = {record.number for record in ledger.state.requests.values() if record.is_waiting}
        lab.step()
        for frame in lab.frames:
            ledger.apply(frame)
        lab.frames.clear()
        running = [record for record in ledger.state.requests.values() if record.is_running]
        taken_over += [record.number for record in running if ledger.state.damaged and record.number in waiting]
        assert {record.cause for record in running} <= {Cause.NONE}
    assert ledger.dropped_batches
    assert taken_over
