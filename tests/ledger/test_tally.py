"""What is counted beyond the books, held against the books and against what the real scheduler did."""

from __future__ import annotations

from collections import Counter

import pytest

from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.contract.kinds import Stage, Status
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.ledger.tally import AGE_BOUNDS_S, SERVED, Ages


def busy(seed: int, steps: int = 400, **settings: object) -> Lab:
    """A pool under pressure: shared prefixes, hits, evictions, preemptions, aborts."""
    lab = Lab(total=61, seed=seed, policy="priority", **settings)  # type: ignore[arg-type]
    shared = [lab.rng.randrange(1000) for _ in range(12)]
    for step in range(steps):
        if step < steps - 100 and len(lab.scheduler.requests) < 10:
            extra = [lab.rng.randrange(1000) for _ in range(lab.rng.randint(1, 30))]
            lab.arrive(shared[: lab.rng.choice((0, 8, 12))] + extra, lab.rng.randint(2, 40), lab.rng.randint(0, 2))
        if lab.scheduler.running and lab.rng.random() < 0.03:
            lab.abort(lab.scheduler.running[0])
        lab.step(lab.rng.choice((0.01, 0.4)))
    return lab


@pytest.mark.parametrize(
    "settings", [{}, {"connector_share": 0.5}, {"window": 12}, {"async_scheduling": True}], ids=str
)
def test_the_ages_are_of_just_the_blocks_that_the_books_have(settings: dict[str, object]) -> None:
    lab, ledger = busy(1, **settings), EngineLedger("lab")
    for frame in lab.frames:
        ledger.apply(frame)
        residency, state = ledger.tally.residency, ledger.state
        assert ledger.tally.in_step
        assert (residency.held.count, residency.idle.count) == (state.used, state.cached_idle)
    now = state.now_ns
    for ages, mine in ((residency.held, lambda b: state.refs[b] > 0), (residency.idle, lambda b: not state.refs[b])):
        since = [state.since[b] for b in range(state.total) if mine(b) and (state.refs[b] or state.hashes[b])]
        expected = [sum(now // 10**9 - at // 10**9 <= bound for at in since) for bound in AGE_BOUNDS_S]
        assert [count for _, count in ages.buckets(now)] == [*expected, len(since)]
    assert residency.lifetime.count + state.used + state.cached_idle == state.totals.allocated
    assert residency.idle_before_evict.count == state.totals.evicted > 0
    assert 0 < residency.reuse_gap.count <= state.totals.reused


def test_after_a_loss_it_begins_anew_from_the_books_once_they_are_right() -> None:
    lab, ledger = busy(2), EngineLedger("lab")
    lost = len(lab.frames) // 2
    seen = Counter[bool]()
    for index, frame in enumerate(lab.frames):
        if index != lost:
            ledger.apply(frame)
            residency, state = ledger.tally.residency, ledger.state
            seen[ledger.tally.in_step] += 1
            assert ledger.tally.in_step == (not state.damaged)
            if ledger.tally.in_step:
                assert (residency.held.count, residency.idle.count) == (state.used, state.cached_idle)
    assert ledger.lost_batches[Stage.TRANSPORT] == 1
    assert seen[False] > 0
    assert ledger.tally.in_step


def test_what_came_more_than_an_hour_ago_is_counted_together_and_leaves_in_order() -> None:
    ages, second = Ages(), 10**9
    for hour in range(5):
        ages.add(hour * 3_600 * second, hour + 1)
        ages.add((hour * 3_600 + 1) * second, 1)
    now = 4 * 3_600 * second + second
    at_most_an_hour = 5 + 1 + 1  # the last hour's, and those of just an hour ago
    assert ages.buckets(now)[-2:] == [(3_600.0, at_most_an_hour), (float("inf"), 1 + 2 + 3 + 4 + 5 + 5)]
    came = [(hour * 3_600 + later, blocks) for hour in range(5) for later, blocks in ((0, hour + 1), (1, 1))]
    assert ages.seconds(now) == sum((now // second - at) * blocks for at, blocks in came)
    ages.remove([0, second, 3_600 * second])
    assert ages.buckets(now)[-1][1] == 1 + 2 + 3 + 4 + 5 + 5 - 3
    assert ages.buckets(now)[-2][1] == at_most_an_hour


def test_latencies_are_those_of_the_requests_that_ended() -> None:
    lab, ledger = busy(3), EngineLedger("lab")
    ended = []
    for frame in lab.frames:
        ledger.apply(frame)
        ended += ledger.take_just_finished()
    for latencies, of in ((ledger.tally.served, True), (ledger.tally.failed, False)):
        mine = [request for request in ended if (request.status in SERVED) == of]
        assert mine
        assert latencies.queue.count == len(mine)
        waited = sum((request.admitted_ns or request.finished_ns) - request.arrived_ns for request in mine)
        assert latencies.queue.seconds == pytest.approx(waited / 1e9)
        assert latencies.first_token.count == sum(request.first_token_ns > 0 for request in mine)
    assert all(request.status == Status.FINISHED_ABORTED for request in ended if request.status not in SERVED)


def test_recomputed_tokens_are_those_that_were_computed_beyond_prompt_and_output() -> None:
    """With no prefix cache, each token is computed once but for what preemption took."""
    lab, ledger = Lab(total=41, prefix_caching=False, seed=4), EngineLedger("lab")
    requests = [lab.arrive(12, max_tokens=60) for _ in range(8)]
    lab.run_until_idle()
    for frame in lab.frames:
        ledger.apply(frame)
    recompute, totals = ledger.tally.recompute, ledger.state.totals
    needed = sum(len(request.token_ids) - 1 for request in requests)
    assert recompute.after_preemption == totals.computed_tokens - needed > 0
    assert sum(recompute.lost.values()) == totals.tokens_lost == recompute.after_preemption
    assert recompute.though_cached == 0
