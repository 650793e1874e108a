"""What each block is, held against the columns of the books, block by block."""

from __future__ import annotations

import pytest

from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.ledger.records import RequestState
from kvscope.monitor.questions.blocks import block_map
from kvscope.monitor.questions.schema import BLOCK_STATES
from tests.questions.test_past import random_run


def state_of(ledger: EngineLedger, block: int, tables: dict[int, list[RequestState]]) -> str:
    """By its reference count and hash, and by every table and deferral that names it."""
    state = ledger.state
    living = [record for record in tables.get(block, ()) if not record.is_finished]
    if any(record.is_running for record in living):
        return "running"
    if living:
        return "waiting"
    if any(block in deferral.blocks for deferral in state.deferrals.values()):
        return "finished"
    if block < state.reserved:
        return "reserved"
    if state.refs[block] > 0:
        return "UNACCOUNTED"
    return "cached-idle" if state.hashes[block] else "free"


@pytest.mark.parametrize("losses", [False, True], ids=["whole", "losses"])
@pytest.mark.parametrize("seed", range(6))
def test_each_block_is_what_the_books_say_of_it(seed: int, losses: bool) -> None:
    _, records = random_run(seed, 150, losses=losses)
    ledger = EngineLedger(records[0].engine)
    for number, record in enumerate(records):
        ledger.apply(record)
        if number % 5 or not ledger.ready:
            continue
        tables: dict[int, list[RequestState]] = {}
        for request in ledger.state.requests.values():
            for block in request.blocks:
                tables.setdefault(block, []).append(request)
        shown = [BLOCK_STATES[value] for value in block_map(ledger).states]
        assert shown == [state_of(ledger, block, tables) for block in range(ledger.state.total)]
