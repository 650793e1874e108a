"""Thresholds that follow the engine: its pool, its load and its pace."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from kvscope.monitor.contract.kinds import Cause, EngineMode, Limit, Preempt, Release, Status
from kvscope.monitor.contract.wire import decode, encode
from kvscope.monitor.detectors.detector import Settings
from kvscope.monitor.probes.packer import Vitals
from tests.detectors.spoken import Spoken, value

BLOCKS = 5_000
FLUSHED = "collapse.cache-flushed"


def flushed_by_one_prompt(*, needed: int, usual: int = 100, settings: Iterable[str] | Settings = ()) -> Spoken:
    """Prompts of `usual` blocks fill a pool. One evicts an eighth of it, and `needed` of that is computed again."""
    scene = Spoken(total=BLOCKS + 1, settings=settings)
    for number, first in enumerate(range(1, BLOCKS, usual), start=100):
        blocks = list(range(first, min(first + usual, BLOCKS + 1)))
        scene.arrive(number, blocks)
        scene.log.cached(number, blocks, blocks)
        end(scene, number, blocks)
    evict(scene, 2, list(range(1, 1 + BLOCKS // 8)), needed)
    scene.wait(1)
    return scene


def evict(scene: Spoken, number: int, blocks: list[int], needed: int) -> None:
    """Request `number` takes these blocks, and the one after it computes the first of what was in them again."""
    log, tokens = scene.log, 4 * len(blocks)
    log.arrived(number, f"r-{number}", tokens, 8, 0, len(blocks), len(blocks) + 2)
    log.allocated(number, blocks, blocks)
    log.admitted(number, 0)
    end(scene, number, blocks)
    again = blocks[:needed]
    scene.arrive(number + 1, again)
    log.cached(number + 1, again, again)
    end(scene, number + 1, again)


def end(scene: Spoken, number: int, blocks: list[int]) -> None:
    scene.log.released(number, blocks, Release.FINISHED)
    scene.log.finished(number, Status.FINISHED_STOPPED)
    scene.say()


def test_a_prompt_that_pushes_out_a_needed_eighth_of_a_large_pool() -> None:
    (finding,) = flushed_by_one_prompt(needed=BLOCKS // 8).firing(FLUSHED)
    assert finding.culprits.requests == ["r-2"]
    assert value(finding, "evicted_blocks_recomputed") == BLOCKS // 8


@pytest.mark.parametrize("needed", [0, BLOCKS // 16, BLOCKS // 10 - 1])
def test_what_is_mostly_not_needed_again_is_no_loss(needed: int) -> None:
    assert not flushed_by_one_prompt(needed=needed).firing(FLUSHED)


def test_prompts_as_large_as_one_another_are_no_flush() -> None:
    assert not flushed_by_one_prompt(needed=BLOCKS // 8, usual=500).firing(FLUSHED)


@pytest.mark.parametrize(
    ("block_size", "needed", "empty", "fires"),
    [
        (256, 4, 150, True),
        (256, 3, 150, False),
        (256, 4, 1, False),  # as many, of which the pool had no room for more
        (16, 64, 150, True),
        (16, 63, 150, False),
        (4, 64, 150, True),  # 256 tokens, but as many blocks
    ],
)
def test_evictions_beside_empty_blocks_count_by_their_tokens_too(
    block_size: int, needed: int, empty: int, fires: bool
) -> None:
    kept = list(range(1, 101))
    scene = Spoken(total=101 + empty, block_size=block_size)
    scene.arrive(1, kept)
    scene.log.cached(1, kept, kept)
    end(scene, 1, kept)
    evict(scene, 2, kept[:needed], needed)
    scene.wait(1)
    assert [finding.verdict for finding in scene.firing(FLUSHED)] == ["confirmed"] * fires


def pushed_out(*sizes: int, again: range, preempted: bool = False, answered: bool = False) -> Spoken:
    """Prompts of 100 blocks are cached in a large pool. Prompts of these sizes evict the oldest, and then one of 100
    blocks computes the contents `again`, in its prompt or, once it has its first token, in its output.
    """
    scene = Spoken(total=BLOCKS + 1)
    for number, first in enumerate(range(1, BLOCKS, 100), start=100):
        blocks = list(range(first, first + 100))
        scene.arrive(number, blocks)
        scene.log.cached(number, blocks, blocks)
        end(scene, number, blocks)
    first = 1
    for number, size in enumerate(sizes, start=2):
        evict(scene, number, list(range(first, first + size)), 0)
        first += size
    scene.arrive(50, list(again))
    if preempted:
        scene.log.preempted(50, Preempt.KV_BLOCKS, len(again), 1, 0)
    if answered:
        scene.log.first_token(50)
    scene.log.cached(50, list(again), list(again))
    end(scene, 50, list(again))
    scene.wait(1)
    return scene


def test_a_prompt_whose_size_costs_a_small_part_of_the_cache_is_named_as_likely() -> None:
    (finding,) = pushed_out(300, again=range(101, 201)).firing(FLUSHED)
    assert (finding.verdict, finding.culprits.requests) == ("likely", ["r-2"])
    assert value(finding, "recomputed_for_its_size") == 96  # 8 evictions share the number of the first
    assert "the least recently used" in finding.missing


@pytest.mark.parametrize(
    "healthy",
    [
        lambda: pushed_out(100, 100, 100, again=range(101, 201)),  # as many evictions, by prompts of the load's size
        lambda: pushed_out(300, again=range(1, 101)),  # these would have made room for an ordinary prompt too
        lambda: pushed_out(300, 100, 100, again=range(101, 201)),  # and these for the prompts that came after it
        lambda: pushed_out(300, again=range(101, 201), preempted=True),  # a preempted request is computed again
        lambda: pushed_out(300, again=range(101, 201), answered=True),  # an output that repeats an earlier one
    ],
)
def test_what_an_ordinary_prompt_would_have_evicted_too_is_no_flush(healthy: Callable[[], Spoken]) -> None:
    assert not healthy().firing(FLUSHED)


def waiting_head(step_s: float, seconds: float, held: int = 10, mode: EngineMode = EngineMode.UNPAUSED) -> Spoken:
    """The head of the queue lacks blocks for so long, while a step after the other takes `step_s`. held: blocks of 40
    that the running request holds.
    """
    scene = Spoken(total=41)
    log = scene.log
    scene.arrive(1, list(range(1, 1 + held)))
    for number, blocks in ((2, 35), (3, 2)):
        log.arrived(number, f"r-{number}", 4 * blocks, 8, 0, blocks, blocks + 2)
        log.queued(number, Cause.NEW)
    log.allocation_failed(2, 35, 40 - held)
    log.engine_mode(mode)
    for step in range(round(seconds / step_s)):
        log.not_scheduled(2, Cause.KV_BLOCKS, step + 1)
        log.tick()
        log.step_launched(step, [1], [1])
        scene.say()
        scene.wait(step_s)
        log.progressed([1], [40 + step], [step])
        log.step_completed(step, round(step_s * 1e9), Limit.KV, 40 - held, 0, held)
    scene.say()
    return scene


def test_a_head_that_waits_for_minutes_of_short_steps_is_found() -> None:
    (finding,) = waiting_head(0.5, 150).firing("stuck.head-of-line")
    assert finding.culprits.requests == ["r-2"]


def test_a_head_that_waits_for_some_long_steps_is_not() -> None:
    scene = waiting_head(6.0, 150)
    assert not scene.firing("stuck.head-of-line")
    assert waiting_head(6.0, 330).firing("stuck.head-of-line")


def head_of_an_idle_engine(seconds: int, behind: int, fetched: int = 10, ready: bool = False) -> Spoken:
    """Nothing runs, the scheduler makes passes, and blocks that are fetched for a request are what the head lacks. The
    one behind it needs `behind` blocks of those that are left of 40. ready: the fetch has ended, and its request stands
    behind the head as well.
    """
    scene = Spoken(total=41, settings=["stuck.remote-load.grace_s=1000"])
    log = scene.log
    log.arrived(1, "r-1", 40, 8, 0, 10, 12)
    log.allocated(1, list(range(1, 1 + fetched)))
    log.waiting_on(1, Status.WAITING_FOR_REMOTE_KVS)
    for number, blocks in ((2, 40), (3, behind)):
        log.arrived(number, f"r-{number}", 4 * blocks, 8, 0, blocks, blocks + 2)
        log.queued(number, Cause.NEW)
    log.allocation_failed(2, 40, 40 - fetched)
    log.not_scheduled(2, Cause.KV_BLOCKS, 1)
    if ready:
        scene.wait(1)
        log.not_scheduled(1, Cause.BEHIND_HEAD, 1)
    for second in range(seconds):
        scene.packer._vitals = lambda passes=second: Vitals(-1, 0, 0, 3, 0, 0, 10 + passes)  # type: ignore[misc]
        scene.wait(1)
        scene.watch.feed([decode(encode(scene.packer.heartbeat()))])
        scene.watch.settle()
    return scene


def test_a_head_that_waits_for_a_fetch_alone_is_found_sooner() -> None:
    assert not head_of_an_idle_engine(25, behind=2).firing("stuck.head-of-line")
    (finding,) = head_of_an_idle_engine(40, behind=2).firing("stuck.head-of-line")
    assert (finding.verdict, finding.culprits.requests) == ("confirmed", ["r-2"])
    assert (value(finding, "running"), value(finding, "waiting_that_fit")) == (0, 1)
    assert not head_of_an_idle_engine(200, behind=31).firing("stuck.head-of-line"), "the one behind has no room"


def test_a_request_that_is_ready_behind_the_head_is_not_the_head() -> None:
    scene = head_of_an_idle_engine(40, behind=2, ready=True)
    assert scene.ledger.head() is scene.ledger.request("r-2")
    (finding,) = scene.firing("stuck.head-of-line")
    assert finding.culprits.requests == ["r-2"]


def test_a_request_behind_a_head_that_is_not_known_is_the_first_that_is() -> None:
    scene = Spoken(total=41)
    for number, cause in ((1, Cause.BEHIND_HEAD), (2, Cause.NEW)):
        scene.log.arrived(number, f"r-{number}", 8, 8, 0, 2, 4)
        scene.log.queued(number, Cause.NEW)
        if cause == Cause.BEHIND_HEAD:
            scene.log.not_scheduled(number, cause, 1)
    scene.say()
    assert scene.ledger.head() is scene.ledger.request("r-1")


def test_a_head_for_which_enough_is_free_is_not_short_of_blocks() -> None:
    """The account is broken: what the engine refuses it for lack of is free by its own events."""
    assert waiting_head(0.5, 150, held=6).firing("stuck.head-of-line")
    assert not waiting_head(0.5, 150, held=5).firing("stuck.head-of-line")


def test_little_room_is_no_head_of_line() -> None:
    assert not head_of_an_idle_engine(200, behind=2, fetched=38).firing("stuck.head-of-line")
    assert waiting_head(0.5, 150, held=36).firing("stuck.head-of-line")
    assert not waiting_head(0.5, 150, held=37).firing("stuck.head-of-line")


def heads_in_turn(held_s: int, behind: int = 2, others: int = 0, turns: int = 5, quiet_turns: int = 5) -> Spoken:
    """Each 30 s another head of the queue lacks blocks for `held_s`, until its client gives up, and one that needs
    `behind` blocks waits behind it. others: requests that run beside the one that all wait for. quiet_turns: how many
    turns the engine has been seen in the end.
    """
    scene, step = Spoken(total=200), 0
    log = scene.log
    for number in range(1, 2 + others):
        scene.arrive(number, list(range(10 * number, 10 * number + 5)))
    log.allocated(1, list(range(10 * (2 + others), 170)))

    def passes(seconds: float, head: int = 0) -> None:
        nonlocal step
        for _ in range(round(2 * seconds)):
            step += 1
            if head:
                log.not_scheduled(head, Cause.KV_BLOCKS, step)
            log.step_launched(step, [1], [1])
            scene.say()
            scene.wait(0.5)
            log.progressed([1], [40 + step], [step])
            log.step_completed(step, 500_000_000, Limit.KV, 30, 0, 10)

    passes(30 * (quiet_turns - turns))
    for turn in range(5 - turns, 5):
        head, short = 100 + turn, 200 + turn
        passes(30 - held_s)
        for number, blocks in ((head, 100), (short, behind)):
            log.arrived(number, f"r-{number}", 4 * blocks, 8, 0, blocks, blocks + 2)
            log.queued(number, Cause.NEW)
        log.allocation_failed(head, 100, scene.ledger.state.free)
        passes(held_s, head)
        if turn < 4:
            log.finished(head, Status.FINISHED_ABORTED)
            log.finished(short, Status.FINISHED_ABORTED)
    scene.say()
    return scene


def test_heads_that_each_wait_for_seconds_are_found_by_the_time_that_others_lose() -> None:
    scene = heads_in_turn(8)
    (finding,) = scene.firing("stuck.head-of-line")
    assert (finding.verdict, finding.severity) == ("likely", "warning")
    assert "may reserve more" in finding.missing
    assert finding.culprits.requests[-1] == "r-104"
    assert value(finding, "heads_short_of_blocks") == len(finding.culprits.requests) >= 4
    assert value(finding, "held_back_s") == pytest.approx(32, abs=3)
    assert value(finding, "share_of_time_lost") == pytest.approx(8 / (8 * 3 + 22), abs=0.02)
    assert value(finding, "waiting_that_fit") == 1
    scene.is_borne_out(finding)


def test_heads_that_cost_more_are_found_before_the_engine_was_seen_for_a_whole_period() -> None:
    """Without a loss in the part of the 120 s that is not known it would be a tenth of the time all the same."""
    (finding,) = heads_in_turn(20, turns=3, quiet_turns=3).firing("stuck.head-of-line")
    assert (finding.verdict, value(finding, "heads_short_of_blocks")) == ("likely", 3)
    assert value(finding, "share_of_time_lost") == pytest.approx(20 / (20 * 3 + 10), abs=0.02)
    assert "In the last 90 s" in finding.explanation


@pytest.mark.parametrize(
    "scene",
    [
        pytest.param(lambda: heads_in_turn(2), id="it costs little time"),
        pytest.param(lambda: heads_in_turn(8, behind=90), id="those behind would not fit either"),
        pytest.param(lambda: heads_in_turn(16, turns=2), id="two that are met by chance"),
        pytest.param(lambda: heads_in_turn(8, others=9), id="of many requests it costs one some time"),
        pytest.param(
            lambda: heads_in_turn(5, turns=3, quiet_turns=3), id="an eighth of 90 s is less than a tenth of 120"
        ),
    ],
)
def test_a_queue_behind_a_large_request_is_no_head_of_line(scene: Callable[[], Spoken]) -> None:
    assert not scene().firing("stuck.head-of-line")
