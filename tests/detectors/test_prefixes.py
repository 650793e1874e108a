"""Prefix caches that do not serve, from KV events: scenes, and recordings in which nothing is wrong."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvscope.monitor.contract.samples import KvEvent, KvEvents
from kvscope.monitor.detectors.registry import THRESHOLDS
from tests.detectors.scenes import Observer, value
from tests.ledger.test_prefixes import RECORDINGS, records, removed, step, stored

PREFIX_HITS = "collapse.prefix-hits"
CACHE_FLUSHED = "collapse.cache-flushed"
PROMPTS = [list(range(start, start + 20)) for start in range(0, 200, 20)]
"""Ten prompts of 20 blocks."""


def judged(steps: Sequence[KvEvents]) -> Observer:
    observer = Observer()
    observer.watch.feed(steps)
    observer.watch.settle()
    return observer


def store(at_s: float, blocks: Sequence[int], *before: KvEvent) -> KvEvents:
    return step(at_s, *before, stored(*blocks))


@pytest.mark.parametrize("name", RECORDINGS)
def test_nothing_is_wrong_in_real_recordings(name: str) -> None:
    assert judged(records(name)).alarms() == []


def computed_again() -> list[KvEvents]:
    """Every prompt comes three times, ten seconds apart, and each time is stored beside its own copy."""
    return [store(10 * round_ + n, prompt) for round_ in range(3) for n, prompt in enumerate(PROMPTS)]


def test_prompts_that_are_computed_again_though_they_are_there() -> None:
    steps = computed_again()
    finding = judged(steps).only(PREFIX_HITS)
    assert finding.verdict == "likely"
    blocks = sum(map(len, PROMPTS))
    assert value(finding, "blocks_stored") == 3 * blocks
    assert value(finding, "cached_blocks_stored_again") == 2 * blocks
    assert value(finding, "cached_share_stored_again") == round(100 * 2 / 3, 1)
    assert value(finding, "cached_blocks") == 3 * blocks
    assert "prefix_cache_queries" in finding.missing
    assert finding.position == steps[len(PROMPTS)].position


def test_prompts_whose_last_block_alone_is_computed_again() -> None:
    again = [store(10 + n / 10, PROMPTS[n % 10][-1:]) for n in range(500)]
    assert judged([store(0, prompt) for prompt in PROMPTS] + again).alarms() == []


def test_alike_prompts_that_come_together() -> None:
    assert judged([store(n / 10, PROMPTS[0]) for n in range(12)]).alarms() == []


def test_it_is_over_when_prefixes_are_hit_again() -> None:
    steps = computed_again()
    after = THRESHOLDS[f"{PREFIX_HITS}.window_s"].value + 60
    observer = judged([*steps, *(store(after + n, [1000 + n]) for n in range(10))])
    assert observer.firing(PREFIX_HITS) == []


def flush(*, needed_again: int) -> list[KvEvents]:
    """Ten prompts are kept; one of 180 blocks pushes out nine of them; then so many of the nine come again."""
    huge = list(range(1000, 1180))
    steps = [store(n, prompt) for n, prompt in enumerate(PROMPTS)]
    for n in range(9):
        parent = huge[20 * n - 1] if n else None
        steps.append(step(60 + n, removed(*PROMPTS[n]), stored(*huge[20 * n : 20 * n + 20], parent=parent)))
    steps += [store(120 + n, PROMPTS[n], removed(*huge[20 * n : 20 * n + 20])) for n in range(needed_again)]
    return steps


def test_one_prompt_that_pushes_out_what_is_needed() -> None:
    finding = judged(flush(needed_again=4)).only(CACHE_FLUSHED)
    assert finding.verdict == "likely"
    assert value(finding, "cached_blocks_before") == 200
    assert value(finding, "prompt_blocks") == value(finding, "blocks_evicted_by_prompt") == 180
    assert value(finding, "evicted_blocks_recomputed") == 80
    assert finding.position == "60"
    assert "request" in finding.missing


def test_what_is_pushed_out_and_never_asked_for_again_is_no_loss() -> None:
    assert judged(flush(needed_again=0)).alarms() == []


def test_a_loss_that_is_a_small_part_of_the_work_is_no_finding() -> None:
    assert judged(flush(needed_again=4)).firing(CACHE_FLUSHED)
    more = [store(120 + n, range(10_000 + 100 * n, 10_100 + 100 * n)) for n in range(120)]
    assert judged([*flush(needed_again=4), *more]).firing(CACHE_FLUSHED) == []


@pytest.mark.parametrize(("needed_again", "is_loss"), [(80, False), (95, True)])
def test_a_tenth_of_what_a_prompt_pushed_out_must_be_needed_again(needed_again: int, is_loss: bool) -> None:
    """Ten prompts of 100 blocks are kept; one of 900 pushes out nine of them."""
    prompts = [list(range(start, start + 100)) for start in range(0, 1000, 100)]
    huge = list(range(10_000, 10_900))
    steps = [store(n, prompt) for n, prompt in enumerate(prompts)]
    for n, prompt in enumerate(prompts[:9]):
        parent = huge[100 * n - 1] if n else None
        steps.append(step(60 + n, removed(*prompt), stored(*huge[100 * n : 100 * n + 100], parent=parent)))
    steps.append(store(120, prompts[0][:needed_again], removed(*huge[:needed_again])))
    assert bool(judged(steps).firing(CACHE_FLUSHED)) is is_loss


def test_a_flush_is_forgotten() -> None:
    later = 120 + THRESHOLDS[f"{CACHE_FLUSHED}.remember_s"].value
    assert judged([*flush(needed_again=4), store(later, [5000])]).firing(CACHE_FLUSHED) == []


def test_a_reset_is_no_flush() -> None:
    steps = [store(n, prompt) for n, prompt in enumerate(PROMPTS)]
    again = [store(60 + n, prompt) for n, prompt in enumerate(PROMPTS)]
    assert judged([*steps, step(30, KvEvent("cleared")), *again]).alarms() == []
