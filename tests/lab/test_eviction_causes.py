"""Whose evictions cost a prefix: one request's, or a cache's that is too small."""

from __future__ import annotations

from kvscope.lab.waste_log import EvictionCauses


def content(*numbers: int) -> list[bytes]:
    return [bytes([number]) for number in numbers]


def evicted(causes: EvictionCauses, by: str, *numbers: int) -> None:
    for each in content(*numbers):
        causes.evicted(each, by)


def flushed(causes: EvictionCauses, gone: list[bytes], victim: str, victim_blocks: int) -> int:
    return causes.blocks_flushed([[each] for each in gone], victim, victim_blocks)


def test_a_prefix_that_one_large_prompt_pushed_out_was_flushed() -> None:
    causes = EvictionCauses()
    evicted(causes, "large", *range(50))
    evicted(causes, "small", 60, 61)
    assert flushed(causes, content(48, 49), "victim", 4) == 2


def test_a_prefix_that_would_have_gone_without_it_was_not() -> None:
    causes = EvictionCauses()
    evicted(causes, "large", *range(50))
    for number in range(60, 120):
        evicted(causes, f"small-{number}", number)
    assert flushed(causes, content(48, 49), "victim", 4) == 0


def test_prompts_of_one_size_push_out_one_another() -> None:
    causes = EvictionCauses()
    for prompt in range(10):
        evicted(causes, f"p-{prompt}", *range(10 * prompt, 10 * prompt + 10))
    assert flushed(causes, content(*range(90, 100)), "victim", 10) == 0


def test_a_prompt_hardly_larger_than_those_that_miss_is_not_to_blame() -> None:
    causes = EvictionCauses()
    evicted(causes, "hardly-larger", *range(12))
    for prompt in range(3):
        evicted(causes, f"p-{prompt}", *range(20 + 10 * prompt, 30 + 10 * prompt))
    assert flushed(causes, content(10, 11), "victim", 10) == 0
    # The same prefix with a prompt as much larger as those that came after it: it alone would have kept it.
    evicted(causes, "large", *range(100, 142))
    evicted(causes, "p-3", *range(50, 60))
    assert flushed(causes, content(140, 141), "victim", 10) == 2


def test_what_the_one_that_misses_evicts_itself_is_no_part_of_it() -> None:
    causes = EvictionCauses()
    evicted(causes, "large", *range(50))
    evicted(causes, "victim", *range(60, 100))
    assert flushed(causes, content(20, 21), "victim", 10) == 2
    assert flushed(causes, content(20, 21), "another", 10) == 0


def test_an_eviction_while_blocks_without_content_were_free_is_a_flush() -> None:
    causes = EvictionCauses()
    causes.evicted(b"a", "small", needless=True)
    assert flushed(causes, [b"a"], "victim", 10) == 1
    causes.evicted(b"a", "small")  # the latest eviction counts
    assert flushed(causes, [b"a"], "victim", 10) == 0


def test_the_size_of_a_request_is_to_blame_for_the_blocks_that_would_be_there() -> None:
    """Its evictions are 12 and the one that misses takes 10: without two of them, the last two blocks would be there,
    the last of a prefix first. What comes after a block that is gone in any case serves nothing.
    """
    causes = EvictionCauses()
    evicted(causes, "slightly-larger", *range(12))
    assert flushed(causes, content(*range(11, -1, -1)), "victim", 10) == 2
    assert flushed(causes, content(*range(12)), "victim", 10) == 0


def test_a_block_of_two_groups_would_be_there_if_both_contents_would() -> None:
    causes = EvictionCauses()
    evicted(causes, "large", *range(50))
    assert causes.blocks_flushed([content(48, 49)], "victim", 4) == 1
    assert causes.blocks_flushed([content(0, 49)], "victim", 4) == 0
