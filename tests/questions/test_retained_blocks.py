"""What is held, and what became of the blocks of a window, against a replay of the reference counts alone."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest

from kvscope.monitor.base.errors import BadQuestion
from kvscope.monitor.base.text import timestamp
from kvscope.monitor.contract.kinds import Kind
from kvscope.monitor.contract.wire import Batch
from kvscope.monitor.ledger.tally import RESIDENCY_BOUNDS_S
from tests.detectors.scenes import ENGINE, Watched, finished_held, unaccounted


def busy(seed: int, **lab: object) -> Watched:
    """Requests that share prefixes come, run, are aborted and go."""
    rng = random.Random(seed)
    scene = Watched(**{"total": 80, "block_size": 4, "seed": seed} | lab)
    prefixes = [[rng.randrange(9) for _ in range(12)] for _ in range(3)]
    requests = []
    for _ in range(150):
        if rng.random() < 0.4:
            tail = [rng.randrange(1000) for _ in range(rng.randint(1, 20))]
            requests.append(scene.lab.arrive(rng.choice(prefixes) + tail, max_tokens=rng.randint(1, 30)))
        if requests and rng.random() < 0.1:
            scene.lab.abort(requests.pop())
        scene.steps(1, rng.choice((0.01, 0.2, 1.0)))
    return scene


def residency(scene: Watched, since_ns: int) -> tuple[dict[int, int], set[int], list[float]]:
    """By the events from the very first on: since when each block is held, those of them that were taken in the window,
    and how long those were that were taken and given back in it.
    """
    refs: Counter[int] = Counter()
    born: dict[int, int] = {}
    within: set[int] = set()
    lifetimes = []
    for frame in scene.lab.frames:
        assert isinstance(frame, Batch)
        now = 0
        for event in frame.events():
            if event.kind in (Kind.CLOCK, Kind.STEP_LAUNCHED, Kind.STEP_COMPLETED, Kind.ARRIVED):
                now = event.args[0] + frame.wall_ns - frame.mono_ns
            for block in event.ids if event.kind in (Kind.ALLOCATED, Kind.REUSED) else ():
                if not refs[block]:
                    born[block] = now
                    within |= {block} if frame.wall_ns >= since_ns else set()
                refs[block] += 1
            for block in event.ids if event.kind in (Kind.RELEASED, Kind.RECLAIMED) else ():
                refs[block] -= 1
                if not refs[block]:
                    since = born.pop(block)
                    lifetimes += [(now - since) / 1e9] if block in within else []
                    within.discard(block)
    return born, within, lifetimes


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("faults", [(), ("leak.unaccounted:every=2",)], ids=["sound", "leaking"])
def test_all_that_was_handed_out_came_back_or_is_held(seed: int, faults: tuple[str, ...]) -> None:
    scene = busy(seed, faults=faults)
    batches = [frame for frame in scene.lab.frames if isinstance(frame, Batch)]
    since_ns = batches[len(batches) // 3].wall_ns
    view = scene.watch.retained_blocks(ENGINE, timestamp(since_ns) or "")
    born, within, lifetimes = residency(scene, since_ns)
    assert view.is_complete
    assert view.allocated == view.freed + view.unfreed
    assert (view.freed, view.unfreed, view.held_blocks) == (len(lifetimes), len(within), len(born))
    assert sorted(block for held in view.held for block in held.ids) == sorted(born)
    assert sum(held.blocks for held in view.held) == len(born)
    assert [bucket.blocks for bucket in view.lifetimes] == [
        sum(low < life <= high for life in lifetimes)
        for low, high in zip((-1.0, *RESIDENCY_BOUNDS_S), (*RESIDENCY_BOUNDS_S, float("inf")), strict=True)
    ]
    for held in view.held:
        assert held.since == timestamp(min(born[block] for block in held.ids))
        shown = {scene.watch.block(ENGINE, block).state for block in held.ids}
        living = {"RUNNING": "running", "WAITING": "waiting", "PREEMPTED": "waiting"}
        assert shown == {living.get(held.state, "UNACCOUNTED")}
    assert [held.for_s for held in view.held] == sorted((held.for_s for held in view.held), reverse=True)


def test_what_is_held_does_not_depend_on_the_window() -> None:
    scene = finished_held("leak.finished-held:every=2")
    scene.live(15)
    whole, late = (scene.watch.retained_blocks(ENGINE, timestamp(scene.now_ns - ns) or "") for ns in (10**12, 10**9))
    assert late.held == whole.held != []
    assert late.held_blocks == whole.held_blocks == sum(held.blocks for held in late.held)
    assert late.allocated < whole.allocated


def test_a_leak_stands_before_those_who_work() -> None:
    scene = finished_held("leak.finished-held:every=2")
    scene.live(15)
    scene.lab.arrive(30, max_tokens=60)
    scene.steps(3)
    view = scene.watch.retained_blocks(ENGINE)
    affected = scene.lab.faults.on["leak.finished-held"].affected
    assert [held.owner for held in view.held[: len(affected)]] == list(affected)
    assert {held.reason for held in view.held[: len(affected)]} == {"FREE_DEFERRED"}
    assert (view.held[-1].state, view.held[-1].reason) == ("RUNNING", "")


def test_what_nobody_owns_has_no_owner() -> None:
    scene = unaccounted()
    (held,) = (held for held in scene.watch.retained_blocks(ENGINE).held if held.reason == "UNACCOUNTED")
    assert held.ids == scene.ledger.state.unaccounted()


def test_a_warm_cache_is_set_apart() -> None:
    scene = Watched(total=200, block_size=4)
    for _ in range(5):
        scene.lab.arrive(40, max_tokens=2)
    scene.run_until_idle()
    view = scene.watch.retained_blocks(ENGINE)
    assert view.held == []
    assert view.still_cached == scene.lab.pool.counts()[1] > 0


def test_floors_are_what_each_drain_left() -> None:
    scene = Watched(faults=["leak.rising-floor:every=1"], total=200, block_size=4)
    expected = []
    for _ in range(4):
        scene.lab.arrive(30, max_tokens=3)
        scene.run_until_idle(0.2)
        scene.steps(5, 0.2)
        balance = scene.ledger.balance()
        expected.append(balance.unaccounted + balance.finished)
    floors = scene.watch.retained_blocks(ENGINE).floors
    assert [floor.blocks for floor in floors][-4:] == expected
    assert expected == sorted(set(expected))


def test_an_engine_with_a_queue_has_not_drained() -> None:
    """The last request that runs leaves one behind that never fits."""
    scene = Watched(faults=["leak.rising-floor:every=1"])
    scene.lab.arrive(8, max_tokens=20)
    scene.steps(3, 0.2)
    floors = scene.watch.retained_blocks(ENGINE).floors
    scene.lab.arrive(300, name="the-big-one")
    scene.steps(40, 0.2)
    assert not scene.ledger.living().running
    assert scene.ledger.points[-1].finished_requests == 1
    assert scene.watch.retained_blocks(ENGINE).floors == floors


def test_a_window_that_is_not_kept_whole_says_so() -> None:
    scene = Watched()
    scene.lab.arrive(30, max_tokens=30)
    scene.steps(5)
    frames = [scene.lab.keyframe()]
    scene.steps(5)
    late = Watched()
    late.watch.feed([*frames, *(f for f in scene.lab.frames if f.sequence > frames[0].sequence)])
    name = scene.lab.packer.engine
    assert scene.watch.retained_blocks(name).is_complete
    assert not late.watch.retained_blocks(name).is_complete
    joined = Watched()
    joined.watch.fleet.engines.clear()
    joined.watch.feed(frames)
    assert not joined.watch.retained_blocks(name).is_complete


def test_batches_that_the_engine_dropped_itself_leave_a_window_in_part() -> None:
    """None that it sent is missing, and they say how many it dropped."""
    scene = busy(1)
    assert scene.watch.retained_blocks(ENGINE).is_complete
    scene.lab.step()
    scene.watch.feed([msgspec.structs.replace(scene.lab.frames[-1], dropped_batches=1)])
    assert not scene.watch.retained_blocks(ENGINE).is_complete


def test_a_window_must_have_something_in_it() -> None:
    scene = Watched()
    scene.steps(3)
    at = timestamp(scene.now_ns) or ""
    with pytest.raises(BadQuestion, match="is empty"):
        scene.watch.retained_blocks(ENGINE, at, at)
