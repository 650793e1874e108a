"""A step planned while another runs: no block is handed out that the one that runs still reads or writes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from kvscope.engine.blocks.block_pool import NULL_BLOCK
from kvscope.engine.scheduling.scheduler_state import SchedulerOutput
from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.contract.kinds import Limit, Release
from kvscope.monitor.detectors.corrupt.anomalies import UseAfterFree
from kvscope.monitor.ledger.engine_ledger import MAX_ANOMALIES, EngineLedger

LABS = 20
STEPS = 500


class InUse(Lab):
    """A lab that knows which blocks the steps in flight read and write, and which were handed out meanwhile."""

    def __init__(self, **settings: object) -> None:
        super().__init__(async_scheduling=True, **settings)  # type: ignore[arg-type]
        self.in_use: dict[int, set[int]] = {}
        self.clobbered: list[int] = []
        allocate = self.pool.allocate

        def watched(request: int, count: int, group: int = 0) -> list[int]:
            blocks = allocate(request, count, group)
            for step in self.in_flight:
                self.clobbered += self.in_use[step.step].intersection(blocks)
            return blocks

        self.pool.allocate = watched  # type: ignore[method-assign]

    def _launch(self, plan: SchedulerOutput) -> None:
        super()._launch(plan)
        self.in_use[plan.step] = {
            table[position // self.manager.block_size]
            for share in plan.shares
            for table, window in zip(self.manager.tables[share.request.number], self.manager.windows, strict=True)
            for position in range(
                0 if window is None else max(0, share.start + 1 - window), share.start + share.num_tokens
            )
        }
        assert NULL_BLOCK not in self.in_use[plan.step]


def random_lab(seed: int, faults: Sequence[str]) -> InUse:
    rng = random.Random(seed)
    window = rng.choice((None, 1, 6, 30))
    return InUse(
        total=rng.choice((9, 17, 40, 120)) * (1 if window is None else 2),  # a table for each group
        block_size=rng.choice((1, 4, 16)),
        max_num_seqs=rng.choice((3, 8, 32)),
        max_num_batched_tokens=rng.choice((16, 64, 512)),
        max_model_len=rng.choice((200, 4000)),
        policy=rng.choice(("fcfs", "priority")),
        prefix_caching=rng.random() < 0.5,
        window=window,
        connector_share=rng.choice((0.0, 0.5)) if window is None else 0.0,
        load_share=rng.choice((0.0, 0.3)) if window is None else 0.0,
        faults=faults,
        seed=seed,
    )


def drive(lab: InUse) -> None:
    rng = lab.rng
    requests = []
    # So that each fits when it is alone.
    longest = min(40, lab.pool.usable // len(lab.manager.windows) * lab.manager.block_size // 2)
    while lab.scheduler.completed_step < STEPS:
        if rng.random() < 0.4:
            prompt, max_tokens = rng.randint(1, longest), rng.randint(1, longest)
            requests.append(lab.arrive(prompt, max_tokens=max_tokens, priority=rng.randint(0, 2)))
        if requests and rng.random() < 0.15:
            lab.abort(requests.pop(rng.randrange(len(requests))))
        lab.step(stop_chance=0.1)


@pytest.mark.parametrize("seed", range(LABS))
def test_nobody_is_given_a_block_that_a_step_in_flight_is_using(seed: int) -> None:
    """20 labs of 500 steps, with and without a window. The steps do overlap, and frees do wait for them."""
    lab = random_lab(seed, ())
    drive(lab)
    assert lab.clobbered == []
    assert lab.packer.shadow.totals.released.keys() >= {Release.FINISHED, Release.ABORTED}


@pytest.mark.slow
def test_with_the_fault_the_same_steps_are_caught_and_the_ledger_says_so() -> None:
    """Each block that the lab saw handed out too early, and no other sort of contradiction."""
    seen = 0
    for seed in range(LABS):
        lab = random_lab(seed, (UseAfterFree.code,))
        drive(lab)
        ledger = EngineLedger(lab.packer.engine)
        for frame in lab.frames:
            ledger.apply(frame)
        found = [anomaly.anomaly for anomaly in ledger.anomalies]
        assert {anomaly.kind for anomaly in found} <= UseAfterFree.kinds
        if max(Counter(anomaly.kind for anomaly in found).values(), default=0) < MAX_ANOMALIES:
            assert set(lab.clobbered) <= {block for anomaly in found for block in anomaly.blocks}
        seen += len(lab.clobbered)
    assert seen > 0


def test_a_step_is_planned_while_another_runs_and_its_tokens_are_not_known_yet() -> None:
    lab = Lab(async_scheduling=True)
    request = lab.arrive(4, max_tokens=8)
    lab.step()
    assert len(lab.in_flight) == 1
    lab.step()
    first, second = lab.in_flight[0], lab.scheduler.step
    assert (first.step, second) == (1, 2)
    assert len(request.output_token_ids) == 1
    assert first.shares[0].start == request.num_tokens - 1
    lab.run_until_idle()
    assert len(request.output_token_ids) == 8
    assert lab.scheduler.step == 8
    assert lab.pool.num_free == lab.pool.usable


def test_whoever_lacks_a_block_waits_for_those_on_their_way_before_another_is_preempted() -> None:
    """The first needs a block: one preemption makes room, the first waits a step for it, the second goes on."""
    lab = Lab(total=14, block_size=4, async_scheduling=True, prefix_caching=False)
    requests = [lab.arrive(16, max_tokens=16), lab.arrive(14, max_tokens=10), lab.arrive(14, max_tokens=16)]
    lab.run_until_idle()
    assert [request.num_preemptions for request in requests] == [0, 0, 1]
    assert lab.packer.shadow.totals.limits[Limit.DEFERRED] == 1
    assert [len(request.output_token_ids) for request in requests] == [16, 10, 16]


def test_a_token_that_a_step_in_flight_samples_survives_the_preemption() -> None:
    """It is not computed again, only its keys and values are."""
    lab = Lab(total=10, block_size=4, async_scheduling=True, prefix_caching=False)
    lab.arrive(16, max_tokens=16)
    second = lab.arrive(14, max_tokens=16)
    while not second.num_preemptions:
        known = list(second.output_token_ids)
        lab.step()
    assert second.output_token_ids[: len(known)] == known
    assert len(second.output_token_ids) == len(known) + 1
    assert second.num_computed_tokens == 0
