"""Prompts found again by the contents of their blocks."""

from __future__ import annotations

from kvscope.monitor.contract.description import EngineDescription
from kvscope.monitor.ledger.prefix_reuse import COMPUTED_ALWAYS, CachedPrompt, CachedPrompts, with_kept
from kvscope.monitor.ledger.records import ComputedPrompt

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


def test_blocks_that_every_prompt_computes_are_not_recomputed_though_other_blocks_have_their_content() -> None:
    """Two prompts lack a cached block each, of which a lookup could have hit one."""
    alike = ComputedPrompt("r-1", 20, blocks=10, hit=0, again=2, could_hit=1, kept=2 + COMPUTED_ALWAYS)
    more = alike._replace(kept=alike.kept + 1)
    counted = with_kept([alike, more], EngineDescription())
    assert [(prompt.again, prompt.missed) for prompt in counted] == [(1, 1), (more.kept, more.kept - 1)]
