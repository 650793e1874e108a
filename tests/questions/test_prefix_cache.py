"""The forest of prefixes, held against the prompts that it is made of."""

from __future__ import annotations

import random

import pytest

from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.base.text import timestamp
from kvscope.monitor.contract.kinds import Evict
from kvscope.monitor.ledger import prefix_tree
from kvscope.monitor.questions import past
from kvscope.monitor.questions.pipeline import Pipeline
from tests.detectors.scenes import ENGINE, Spoken, Watched


def shared(seed: int = 1, total: int = 400, **lab: object) -> tuple[Watched, list[list[int]]]:
    """Prompts of a few prefixes and tails of their own; each runs alone, so that none is computed twice."""
    rng = random.Random(seed)
    scene = Watched(total=total, block_size=4, **lab)
    prefixes = [[rng.randrange(1000) for _ in range(4 * rng.randint(2, 6))] for _ in range(3)]
    prompts = []
    for _ in range(12):
        prompts.append(rng.choice(prefixes) + [rng.randrange(1000) for _ in range(4 * rng.randint(1, 4) + 1)])
        scene.lab.arrive(prompts[-1], max_tokens=1)
        scene.run_until_idle()
    return scene, prompts


def test_the_forest_is_that_of_the_prompts() -> None:
    scene, prompts = shared()
    view = scene.watch.prefix_cache(ENGINE)
    blocks = {block for node in view.nodes for block in node.ids}
    hashes = scene.ledger.state.hashes
    assert blocks == {block for block, value in enumerate(hashes) if value}
    assert sum(node.blocks for node in view.nodes) == view.cached_blocks == len(blocks)
    assert view.left_out == 0
    ends = {node.id: node for node in view.nodes}
    paths = set()
    for node in view.nodes:
        tokens, above = node.tokens, node.parent
        while above:
            tokens, above = tokens + ends[above].tokens, ends[above].parent
        if all(other.parent != node.id for other in view.nodes):
            paths.add(tokens)
            assert node.hits == 0
    assert paths == {len(prompt) // 4 * 4 for prompt in prompts}


def test_hits_and_references_are_those_of_the_requests() -> None:
    scene, prompts = shared()
    looked_up = scene.ledger.state.totals.hit_tokens // 4
    view = scene.watch.prefix_cache(ENGINE)
    assert sum(node.hits * node.blocks for node in view.nodes) == looked_up
    running = [scene.lab.arrive(prompts[0], max_tokens=50, name=f"same-{n}") for n in range(3)]
    scene.steps(3)
    view = scene.watch.prefix_cache(ENGINE)
    (node,) = (node for node in view.nodes if len(node.holders) == 3 and not node.parent)
    assert node.holders == [request.id for request in running]
    assert node.references == node.blocks / len(node.ids) * 3
    assert node.idle_s is None
    assert view.shared_blocks == sum(refs > 1 for refs in scene.lab.pool.refs)
    assert {node.idle_s for node in view.nodes if not node.references} != {None}


def test_asked_again_it_goes_on_and_says_what_a_new_one_says() -> None:
    """What was told before is kept; a moment that is past is told anew."""
    scene, prompts = shared()
    scene.watch.prefix_cache(ENGINE)
    for prompt in prompts[:4]:
        scene.lab.arrive([*prompt, 7, 7, 7, 7, 7], max_tokens=3)
        scene.run_until_idle()
    now = scene.watch.prefix_cache(ENGINE)
    assert now == scene.watch.prefix_cache(ENGINE, timestamp(scene.now_ns) or "")
    first = scene.watch.events(ENGINE, kinds=["cached"])[5]
    earlier = scene.watch.prefix_cache(ENGINE, first.position)
    assert earlier.cached_blocks < now.cached_blocks
    assert {node.id for node in earlier.nodes if not node.parent} & {node.id for node in now.nodes if not node.parent}


def test_what_was_evicted_says_for_whom_and_whether_it_was_needed() -> None:
    scene, prompts = shared(total=90)
    big = scene.lab.arrive([n + 5000 for n in range(340)], max_tokens=1, name="the-big-one")
    scene.run_until_idle()
    before = scene.watch.prefix_cache(ENGINE)
    by_big = [eviction for eviction in before.evictions if eviction.by == big.id]
    assert by_big
    assert {eviction.cause for eviction in before.evictions} == {"ALLOCATED"}
    assert sum(eviction.blocks for eviction in before.evictions) == scene.ledger.state.totals.evicted
    assert not any(eviction.needed_again for eviction in by_big)
    scene.lab.arrive(prompts[0], max_tokens=1)
    scene.run_until_idle()
    again = [eviction for eviction in scene.watch.prefix_cache(ENGINE).evictions if eviction.by == big.id]
    assert sum(eviction.needed_again for eviction in again) == len(prompts[0]) // 4


def test_what_is_kept_follows_the_pool_and_not_the_stream() -> None:
    """300 prompts that nobody asks for again pass through a pool of 40 blocks; now and then its cache is looked at."""
    scene = Watched(total=40, block_size=4)
    rng = random.Random(3)
    for number in range(300):
        scene.lab.arrive([rng.randrange(10_000) for _ in range(21)], max_tokens=1)
        scene.run_until_idle()
        if number % 20 == 0:
            scene.watch.prefix_cache(ENGINE)
    (evicted_prefixes, _) = scene.watch._past._prefixes[ENGINE]
    sizes = {name: len(kept) for name, kept in vars(evicted_prefixes).items()}
    most = prefix_tree.MAX_TREE_EVICTIONS * 5
    assert scene.ledger.state.totals.evicted > most + 40
    assert 0 < sizes.pop("_gone") <= most
    assert sizes.pop("evictions") == prefix_tree.MAX_TREE_EVICTIONS
    assert max(sizes.values()) <= 40, sizes


def test_a_large_eviction_takes_the_place_of_older_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_tree, "MOST_EVICTED", 12)
    scene, _ = shared(total=90)
    scene.lab.arrive([n + 5000 for n in range(340)], max_tokens=1)
    scene.run_until_idle()
    shown = scene.watch.prefix_cache(ENGINE).evictions
    assert sum(eviction.blocks for eviction in shown[:-1]) < 12
    assert sum(eviction.blocks for eviction in shown) < scene.ledger.state.totals.evicted


def test_the_engines_asked_about_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past, "MAX_PREFIX_FOLDS", 2)
    watch = Pipeline()
    for name in ("a", "b", "c"):
        lab = Lab(total=40, engine=name)
        lab.arrive(30, max_tokens=2)
        for _ in range(4):
            lab.step()
        watch.feed(lab.frames)
    for name in ("a", "b", "a", "c"):
        watch.prefix_cache(name)
    assert list(watch._past._prefixes) == ["a", "c"]
    watch.forget("a")
    assert list(watch._past._prefixes) == ["c"]


def test_two_kv_groups_each_have_their_own() -> None:
    scene, _ = shared(window=16)
    view = scene.watch.prefix_cache(ENGINE)
    assert sum(node.blocks for node in view.nodes) == view.cached_blocks
    assert len({node.id for node in view.nodes}) == len(view.nodes)


@pytest.mark.parametrize(("single", "largest"), [(10, 1), (12, 12)])
def test_a_forest_that_is_too_large_is_shown_by_its_largest_tree(
    single: int, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tree is a prompt without branches, the other a short prefix with two long ones: 11 blocks."""
    scene = Watched(total=400, block_size=4)
    shared_part = list(range(100, 104))
    branches = [[*shared_part, *range(first, first + 21)] for first in (200, 300)]
    for prompt in (list(range(400, 401 + 4 * single)), *branches):
        scene.lab.arrive(prompt, max_tokens=1)
        scene.run_until_idle()
    whole = scene.watch.prefix_cache(ENGINE)
    assert sorted(node.blocks for node in whole.nodes) == [1, 5, 5, single]
    monkeypatch.setattr(prefix_tree, "MAX_TREE_NODES", 1)
    shown = scene.watch.prefix_cache(ENGINE)
    assert ([node.blocks for node in shown.nodes], shown.left_out) == ([largest], 3)


def test_a_block_that_lost_its_content_is_the_parent_of_none() -> None:
    """The cache dropped the first block of r-1's prompt; r-2 has both contents, and the monitor joined later."""
    scene = Spoken()
    for number, blocks in ((1, [3, 4]), (2, [5, 6])):
        scene.arrive(number, blocks)
        scene.log.cached(number, blocks, [33, 44])
    scene.log.evicted([3], Evict.INVALIDATED)
    scene.say()
    scene.watch.fleet.engines.clear()
    scene.watch.feed([scene.packer.keyframe()])
    first, second = scene.watch.prefix_cache(ENGINE).nodes
    assert (first.ids, second.ids, second.parent) == ([5], [4, 6], first.id)


def test_an_eviction_of_a_content_that_was_never_seen_is_not_needed_again() -> None:
    """It was cached before the monitor joined."""
    scene = Spoken()
    scene.arrive(1, [3, 4])
    scene.log.evicted([3], Evict.INVALIDATED)
    scene.log.cached(1, [4], [1])
    scene.say()
    (eviction,) = scene.watch.prefix_cache(ENGINE).evictions
    assert (eviction.blocks, eviction.needed_again) == (1, 0)
