"""Prompts found again by the contents of their blocks."""

from __future__ import annotations

from kvscope.monitor.state.cached_prompts import CachedPrompt, CachedPrompts

MOST = 100


def count_kept(earlier: list[int], later: list[int], hashes: list[int]) -> int:
    """How many of the later prompt's blocks the earlier one's hold, none of them allocated since."""
    prompts, born = CachedPrompts(), [0] * len(hashes)
    prompts.add(CachedPrompt(earlier, 10), hashes, born, MOST)
    kept = prompts.count_kept(later, 0, 20, hashes, born)
    prompts.add(CachedPrompt(later, 30), hashes, born, MOST)
    return kept


def test_a_prompt_in_other_blocks_is_found_by_what_they_share() -> None:
    assert count_kept([1, 2, 3], [4, 5, 6], [0, 11, 12, 13, 11, 12, 14]) == 2


def test_a_hash_may_stand_at_a_place_that_the_earlier_prompt_does_not_have() -> None:
    """Where groups have windows, a prompt holds only its last blocks, and their places differ between prompts."""
    assert count_kept([1], [2, 3, 4], [0, 11, 12, 11, 13]) == 0
