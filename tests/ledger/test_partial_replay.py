"""A copy of a ledger goes on as the one that it was taken of does, and neither of them moves the other."""

from __future__ import annotations

import gc
import random
import weakref
from types import FunctionType, ModuleType

import pytest

from kvscope.monitor.contract.wire import Batch
from kvscope.monitor.ledger import keyframe_codec
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.ledger.partial_replay import fork
from kvscope.monitor.ledger.records import RequestState
from kvscope.monitor.questions.blocks import block_map
from kvscope.monitor.questions.request_details import request_views
from tests.ledger.test_exact import FAULTS, random_lab


def batches(seed: int) -> list[Batch]:
    rng = random.Random(seed)
    lab = random_lab(rng, rng.choice(FAULTS))
    shared = [rng.randrange(9) for _ in range(20)]
    for _ in range(80):
        if rng.random() < 0.4:
            lab.arrive([*shared, rng.randrange(1000)], max_tokens=rng.randint(1, 20))
        lab.step(0.05, stop_chance=0.03)
    return [frame for frame in lab.frames if isinstance(frame, Batch)]


def ledger_state(ledger: EngineLedger) -> tuple[object, ...]:
    """All that can be asked of it."""
    return (
        bytes(keyframe_codec.dump_state(ledger.state)),
        block_map(ledger),
        request_views(ledger),
        list(ledger.anomalies),
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("missing", [0, 1], ids=["whole", "damaged"])
def test_it_goes_on_alike(seed: int, missing: int) -> None:
    stated = batches(seed)
    half = len(stated) // 2
    ledger = EngineLedger(stated[0].engine)
    for batch in stated[: half - 1 - missing] + stated[half - 1 : half]:
        ledger.apply(batch)
    assert ledger.state.damaged == bool(missing)
    then = ledger_state(ledger)
    copied = fork(ledger)
    assert ledger_state(copied) == then
    for batch in stated[half:]:
        copied.apply(batch)
    assert ledger_state(ledger) == then
    after = ledger_state(copied)
    assert after != then
    for batch in stated[half:]:
        ledger.apply(batch)
    assert ledger_state(ledger) == after
    assert ledger_state(copied) == after


def test_one_that_nobody_needs_is_gone_at_once() -> None:
    """The columns of a million blocks do not wait for the garbage collector, which walks them all to find that out."""
    stated = batches(0)
    ledger = EngineLedger(stated[0].engine)
    for batch in stated:
        ledger.apply(batch)
    gc.disable()
    try:
        state = weakref.ref(fork(ledger).state)
        assert state() is None
    finally:
        gc.enable()


def test_requests_that_ended_are_shared_and_not_handed_out_again() -> None:
    """Copies are kept: each of them held 4,096 requests of its own, which took 3 MiB."""
    ledger = EngineLedger("lab@127.0.0.1:0/0")
    for batch in batches(seed=0):
        ledger.apply(batch)
    copied = fork(ledger)
    assert [*map(id, copied.ended)] == [*map(id, ledger.ended)]
    assert copied.take_just_finished() == []
    assert len(ledger.just_finished) > 10
    own = requests_of(copied) - requests_of(ledger)
    assert own == {id(request) for request in copied.state.requests.values()}


def requests_of(ledger: EngineLedger) -> set[int]:
    """The ids of all requests that a ledger holds, wherever."""
    found: dict[int, object] = {}
    left: list[object] = [ledger]
    while left:
        for each in gc.get_referents(left.pop()):
            if id(each) not in found and not isinstance(each, type | ModuleType | FunctionType):
                found[id(each)] = each
                left.append(each)
    return {number for number, each in found.items() if isinstance(each, RequestState)}


def test_a_copy_hands_out_what_ends_in_it() -> None:
    stated = batches(seed=0)
    ledger = EngineLedger("lab@127.0.0.1:0/0")
    for batch in stated[:40]:
        ledger.apply(batch)
    copied = fork(ledger)
    ledger.take_just_finished()
    for batch in stated[40:]:
        ledger.apply(batch)
        copied.apply(batch)
    numbers = [record.number for record in ledger.take_just_finished()]
    assert numbers
    assert [record.number for record in copied.take_just_finished()] == numbers
