"""What each request holds alone and shares, held against the tables alone, and added up against the balance."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.ledger.pool_account import Activity, blocks_of, holder_of, holders, request_blocks


@pytest.mark.parametrize("seed", range(4))
def test_blocks_that_count_under_each_request_add_up_to_the_balance(seed: int) -> None:
    rng = random.Random(seed)
    lab = Lab(total=129, connector_share=0.5, faults=["leak.unaccounted:every=2"], seed=seed)
    ledger = EngineLedger(lab.packer.engine)
    templates: list[list[int]] = [[], [1] * 12, [2] * 24]
    fed = shared_in_all = 0
    for _ in range(200):
        if len(lab.scheduler.requests) < 24 and rng.random() < 0.6:
            own = [rng.randrange(1000) for _ in range(rng.randint(4, 30))]
            lab.arrive([*rng.choice(templates), *own], max_tokens=rng.randint(1, 20))
        if lab.scheduler.running and rng.random() < 0.05:
            lab.abort(rng.choice(lab.scheduler.running))
        lab.step(0.1)
        lab.flush()
        for frame in lab.frames[fed:]:
            ledger.apply(frame)
        fed = len(lab.frames)
        state, balance = ledger.state, ledger.balance()
        tables = {one.number: set(blocks_of(state, one)) for one in state.requests.values()}
        uses = Counter(block for table in tables.values() for block in table)
        held = request_blocks(state)
        for request, table in tables.items():
            assert held[request].total == len(table)
            assert held[request].own == sum(uses[block] == 1 for block in table)
            assert held[request].counted == holders(state).count(request)
        shared_in_all += sum(one.shared for one in held.values())
        counts = Counter(holder.activity for block in uses if (holder := holder_of(state, block)))
        assert counts[Activity.RUNNING] == balance.running
        assert counts[Activity.WAITING] == balance.waiting
        assert counts[Activity.FINISHED] == balance.finished
        assert counts[Activity.UNACCOUNTED] <= balance.unaccounted
        assert sum(one.counted for one in held.values()) == len(uses)
    assert shared_in_all
