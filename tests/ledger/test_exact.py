"""The ledger's view of every block equals the pool's own, after every step, whatever happens."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.ledger.balance import balance_of
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from tests.drawn_seeds import drawn_seeds

FAULTS = (
    (),
    ("leak.unaccounted:every=2",),
    ("leak.finished-held:every=3",),
    ("leak.unaccounted:every=3:after=2", "leak.finished-held:every=4:limit=5"),
)


def random_lab(rng: random.Random, faults: tuple[str, ...]) -> Lab:
    # With two KV groups there is no connector.
    window = None if "finished-held" in str(faults) else rng.choice((None, 1, 7, 50))
    return Lab(
        total=rng.choice((2, 3, 5, 9, 17, 40, 120, 500)),
        block_size=rng.choice((1, 2, 4, 16)),
        max_num_seqs=rng.choice((1, 3, 8, 32)),
        max_num_batched_tokens=rng.choice((3, 16, 64, 512)),
        max_model_len=rng.choice((20, 200, 4000)),
        policy=rng.choice(("fcfs", "priority")),
        prefix_caching=rng.random() < 0.7,
        window=window,
        connector_share=0.0 if window else rng.choice((0.0, 0.5, 1.0)) if "finished-held" not in str(faults) else 1.0,
        load_share=rng.choice((0.0, 0.3, 1.0)) if not faults and not window else 0.0,
        lease_s=rng.choice((0.0, 0.0, 0.05, 1.0)),
        async_scheduling=rng.random() < 0.5,
        faults=faults,
        seed=rng.randrange(1 << 30),
    )


def assert_same(lab: Lab, ledger: EngineLedger, skipped: Counter[int]) -> None:
    """Every block, by the ledger, by the pool and by the tables; `skipped` has the references the fault left."""
    pool, state = lab.pool, ledger.state
    owners: dict[int, list[int]] = {block: [] for block in range(pool.total)}
    fenced: dict[int, list[int]] = {block: [] for block in range(pool.total)}
    for number in lab.manager.tables:
        for block in lab.blocks_of(number):
            owners[block].append(number)
    for _, request, held, _ in lab.manager.fenced:
        for blocks in held:
            for block in blocks:
                fenced[block].append(request.number)
    for block in range(1, pool.total):
        assert state.refs[block] == pool.refs[block]
        assert bool(state.hashes[block]) == (pool.digests[block] is not None)
        legitimate = [n for n in state.owners(block) if state.is_legitimate(n, block)]
        assert sorted(legitimate) == sorted(owners[block])
        assert sorted(state.detached.get(block, [])) == sorted(fenced[block])
        assert (state.refs[block] == 0) == (block in pool.free_queue)
    assert (state.free, state.cached_idle, state.used, state.total) == pool.counts()
    assert {r.number: r.status for r in state.requests.values() if not r.is_finished} == {
        r.number: r.status for r in lab.scheduler.requests.values() if not r.is_finished
    }
    parts = balance_of(state)
    assert parts.holds
    assert ledger.balance() == parts
    assert state.unexplained_references() == dict(sorted(skipped.items()))
    assert parts.unexplained_references == skipped.total()
    assert state.unaccounted() == sorted(b for b in skipped if pool.refs[b] == skipped[b])
    assert parts.unaccounted == len(state.unaccounted())
    alive = {
        n: "running" if r.status == 5 else "waiting" for n, r in lab.scheduler.requests.items() if not r.is_finished
    }
    holders = [
        {alive.get(n, "finished") for n in owners[b]} | {"finished" for _ in fenced[b]} for b in range(1, pool.total)
    ]
    assert parts.running == sum("running" in h for h in holders)
    assert parts.waiting == sum("waiting" in h and "running" not in h for h in holders)
    assert parts.finished == sum(h == {"finished"} for h in holders)


def drive(lab: Lab, steps: int, rng: random.Random) -> None:
    """Random life, checked after every step."""
    ledger = EngineLedger(lab.packer.engine)
    for frame in lab.frames:
        ledger.apply(frame)
    prefixes = [[rng.randrange(9) for _ in range(rng.randint(1, 40))] for _ in range(3)]
    requests = []
    skipped: Counter[int] = Counter()
    for _ in range(steps):
        if rng.random() < 0.35:
            prompt = rng.choice(prefixes) + [rng.randrange(1000) for _ in range(rng.randint(1, 30))]
            requests.append(lab.arrive(prompt, max_tokens=rng.randint(1, 40), priority=rng.randint(0, 2)))
        if requests and rng.random() < 0.12:
            request = requests.pop(rng.randrange(len(requests)))
            held = lab.blocks_of(request.number)
            fault = lab.faults.on.get("leak.unaccounted")
            before = len(fault.affected) if fault else 0
            lab.abort(request)
            if fault and len(fault.affected) > before:
                skipped.update(held)
        seen = len(lab.frames)
        lab.step(stop_chance=0.03)
        for frame in lab.frames[seen:]:
            ledger.apply(frame)
        assert_same(lab, ledger, skipped)
        assert not ledger.anomalies
    assert ledger.state.audit_cycles > 0 or steps < 200


@pytest.mark.parametrize("faults", FAULTS, ids=lambda faults: "+".join(faults) or "none")
@pytest.mark.parametrize("seed", drawn_seeds(3, 8))
def test_ten_thousand_random_steps(faults: tuple[str, ...], seed: int) -> None:
    """4 × 8 labs of 350 steps: 11,200 steps, each checked block by block."""
    rng = random.Random(f"{seed} {faults}")
    drive(random_lab(rng, faults), 350, rng)
