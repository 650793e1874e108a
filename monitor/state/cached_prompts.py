"""Which computed prompts had a prefix that other blocks of the cache held already.

Engines such as vLLM enter a block in the cache although another block has its content. The hash of a block covers the
whole prefix, so a prompt whose blocks have the hashes of blocks that were cached before it was admitted, and are cached
still, was computed though its prefix was there. Prompts are remembered by a few of their hashes, at places that double,
so that any prompt finds one that shares at least half of what any shares with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from kvscope.monitor.events.description import EngineDescription
from kvscope.monitor.state.records import ComputedPrompt

COMPUTED_ALWAYS: Final = 2
"""Blocks that a prompt computes though they are cached: its last full one, since a token must be computed, and one more
with speculative decoding that needs hidden states.
"""
MAX_CACHED_PROMPTS: Final = 4_096


class CachedPrompt(NamedTuple):
    """A computed prompt: the blocks that hold it, and when its first token was there (monotonic clock)."""

    blocks: list[int]
    at_ns: int


class CachedPrompts:
    """Computed prompts of one engine whose blocks are cached, as many as one pool has blocks for."""

    def __init__(self) -> None:
        self._by_hash: dict[int, CachedPrompt] = {}
        self._order: deque[tuple[CachedPrompt, list[int]]] = deque()
        self._blocks = 0

    def add(self, prompt: CachedPrompt, hashes: Sequence[int], born: Sequence[int], most: int) -> None:
        """Remember a prompt under those of its hashes that no earlier one stands for. `most` blocks in all.

        hashes, born: columns of the pool.
        """
        keys = []
        for place in _places(len(prompt.blocks)):
            key = hashes[prompt.blocks[place]]
            if not key:
                break
            earlier = self._by_hash.get(key)
            if earlier is None or not _has_kept(earlier, place, key, hashes, born):
                self._by_hash[key] = prompt
                keys.append(key)
        if not keys:
            return
        self._order.append((prompt, keys))
        self._blocks += len(prompt.blocks)
        while self._order and (self._blocks > most or len(self._order) > MAX_CACHED_PROMPTS):
            oldest, its_keys = self._order.popleft()
            self._blocks -= len(oldest.blocks)
            for key in its_keys:
                if self._by_hash.get(key) is oldest:
                    del self._by_hash[key]

    def count_kept(
        self, blocks: Sequence[int], first: int, admitted_ns: int, hashes: Sequence[int], born: Sequence[int]
    ) -> int:
        """Return how many of a prompt's blocks, from its `first` computed one on, other blocks held when it was
        admitted, and hold still. A lower bound.
        """
        for place in reversed([each for each in _places(len(blocks)) if each >= first]):
            key = hashes[blocks[place]]
            earlier = self._by_hash.get(key) if key else None
            if earlier is None or earlier.at_ns >= admitted_ns:
                continue
            count = first
            while count < min(len(blocks), len(earlier.blocks)) and (
                blocks[count] != earlier.blocks[count]
                and _has_kept(earlier, count, hashes[blocks[count]], hashes, born)
            ):
                count += 1
            if count > first:
                return count - first
        return 0

    def clear(self) -> None:
        """Forget all, as lost events may have changed the cache."""
        self._by_hash.clear()
        self._order.clear()
        self._blocks = 0


def _places(blocks: int) -> Iterator[int]:
    """Yield the places 0, 1, 3, 7 … of so many blocks."""
    place = 0
    while place < blocks:
        yield place
        place = 2 * place + 1


def _has_kept(prompt: CachedPrompt, place: int, value: int, hashes: Sequence[int], born: Sequence[int]) -> bool:
    """Whether the prompt's block at this place has this hash, and nothing allocated it again.

    Where groups have windows a prompt lacks its first blocks, and a hash may stand at another place in it.
    """
    if place >= len(prompt.blocks):
        return False
    block = prompt.blocks[place]
    return bool(value) and hashes[block] == value and born[block] < prompt.at_ns


def with_kept(prompts: list[ComputedPrompt], description: EngineDescription) -> list[ComputedPrompt]:
    """Return the prompts with only what a lookup could have hit counted as recomputed, in whichever blocks it was,
    where one group sees everything.

    Elsewhere a group whose window has left a prefix behind lets the others miss it too.
    """
    groups = description.groups
    partial = any(one.window or not any(kind in one.kind.lower() for kind in ("full", "mla")) for one in groups)
    if partial or len(groups) > 1:
        return prompts
    return [
        prompt._replace(again=prompt.kept, ends_full=True)
        if prompt.kept > COMPUTED_ALWAYS + prompt.again
        else prompt._replace(again=prompt.could_hit)
        for prompt in prompts
    ]
