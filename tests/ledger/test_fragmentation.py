"""Room in blocks that no token is in, by request, by block and over time, against the engine's own tables."""

from __future__ import annotations

import random

import pytest

from kvscope.monitor.ledger.ledger_records import tokens_in, unused_by_all, unused_tokens
from tests.detectors.scenes import ENGINE, Watched


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_it_is_what_the_engines_own_tables_have(seed: int, prefix_caching: bool) -> None:
    rng = random.Random(seed)
    scene = Watched(total=65, block_size=8, prefix_caching=prefix_caching, seed=seed)
    lab, size = scene.lab, 8
    for _ in range(60):
        if rng.random() < 0.4:
            lab.arrive(rng.randint(1, 60), max_tokens=rng.randint(1, 40))
        scene.steps(1)
        ledger = scene.ledger
        state, described = ledger.state, ledger.description
        room = {
            number: size * len(lab.blocks_of(number)) - lab.scheduler.requests[number].num_computed_tokens
            for number in lab.manager.tables
        }
        reported = {number: unused_tokens(state, described, state.requests[number]) for number in room}
        assert reported == room
        assert unused_by_all(state, described) == sum(room.values())
        for number in room:
            # What is not unused is in the blocks, one after the other.
            tokens = [tokens_in(state, described, block) or 0 for block in lab.blocks_of(number)]
            assert tokens == sorted(tokens, reverse=True)
            assert sum(tokens) == size * len(tokens) - room[number]
    assert any(room.values())
    last = scene.watch.points(ENGINE)[-1]
    assert last.unused_tokens == scene.ledger.points[-1].unused_tokens >= 0


def test_with_groups_that_keep_a_window_nothing_is_told() -> None:
    scene = Watched(window=16)
    request = scene.lab.arrive(40, max_tokens=40)
    scene.steps(5)
    state, described = scene.ledger.state, scene.ledger.description
    assert unused_tokens(state, described, state.requests[request.number]) is None
    assert unused_by_all(state, described) is tokens_in(state, described, 1) is None
    scene.live(2)
    assert scene.watch.points(ENGINE)[-1].unused_tokens is None
