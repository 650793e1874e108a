"""Prefix-cache content that was lost and needed again, or computed although it was cached.

A hash names the content of a block and covers the whole prefix. Content that is cached again after its eviction had to
be recomputed. Engines such as vLLM also enter a block in the cache although another block has its content: a prompt
whose blocks have the hashes of blocks that were cached before it was admitted, and still are, was computed for nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

from ..contract.description import EngineDescription
from .records import UNKNOWN_POSITION, ComputedPrompt, RequestState

MAX_EVICTED: Final = 1 << 17
POOLS_EVICTED: Final = 16
LEAST_EVICTED: Final = 1 << 12
MAX_EVICTORS: Final = 1 << 12
NUMBERED_TOGETHER: Final = 8
"""Blocks evicted one after the other that share a number, that of the first: one for each would double the memory."""


@dataclass(slots=True, eq=False)
class Evictor:
    """A request whose prompt was allocated blocks that held cached prefixes. Counts are in blocks."""

    id: str
    at_ns: int
    """Its first eviction, on the engine's monotonic clock."""
    cached_before: int
    """Cached-idle blocks just before."""
    unused: int
    """The fewest free blocks without content, which would have served as well, at any of its evictions."""
    at: int
    """The stream position of its first eviction."""
    evicted_at: int
    """The position of its last eviction."""
    unused_at: int
    """The position of the eviction with the fewest unused blocks."""
    missed_at: int = UNKNOWN_POSITION
    for_its_size_at: int = UNKNOWN_POSITION
    evicted: int = 0
    missed: int = 0
    """Evicted blocks that were cached again since."""
    for_its_size: int = 0
    """Of these, blocks that prompts missed, and that would still have been cached had this request evicted no more than
    such a prompt takes. Where the least recently used goes first, it has itself pushed them out.
    """


class Evictions:
    """The evictions of one engine since the first event received.

    Memory is bounded to the content evicted last, by the requests that evicted last. Of a small pool it is the content
    of POOLS_EVICTED pools: any load would have evicted older content meanwhile.
    """

    def __init__(self) -> None:
        self.culprits: deque[Evictor] = deque(maxlen=MAX_EVICTORS)
        """Requests that evicted content needed again, in the order in which that was found."""
        self.gone: dict[int, tuple[Evictor, int]] = {}
        """By hash of evicted content that is not cached again: the request that evicted it, and about the how
        many-th eviction of all it was.
        """
        self.made = 0
        """Evictions in all, by outputs that grow too."""
        self.pool = 0
        """Blocks of the pool, or 0 until it is known."""
        self._by_request: dict[int, Evictor] = {}

    def evict(
        self, record: RequestState, at_ns: int, hashes: list[int], cached_before: int, unused: int, at: int
    ) -> None:
        """Record that the request was allocated blocks that held this content, at stream position `at`."""
        evictor = self._by_request.get(record.number)
        if evictor is None:
            evictor = self._by_request[record.number] = Evictor(record.id, at_ns, cached_before, unused, at, at, at)
            if len(self._by_request) > MAX_EVICTORS:
                del self._by_request[next(iter(self._by_request))]
        evictor.evicted += len(hashes)
        nth, self.made = self.made + 1, self.made + len(hashes)
        evictor.evicted_at = at
        if unused < evictor.unused:
            evictor.unused, evictor.unused_at = unused, at
        for first in range(0, len(hashes), NUMBERED_TOGETHER):
            self.gone.update(dict.fromkeys(hashes[first : first + NUMBERED_TOGETHER], (evictor, nth + first)))
        most = min(MAX_EVICTED, max(LEAST_EVICTED, POOLS_EVICTED * self.pool))
        if len(self.gone) > most:
            for value in list(islice(self.gone, most // 2)):
                del self.gone[value]

    def store(self, hashes: list[int], at: int, number: int, prompt_blocks: int) -> None:
        """Record that this content is cached, again or for the first time, at stream position `at`.

        number, prompt_blocks: of the request whose prompt missed it. No blocks if no prompt did, as where a preempted
        request is computed again, which is the cost of its preemption, or an output repeats.
        """
        own = self._by_request.get(number)
        made = self.made - (own.evicted if own is not None else 0)  # until its lookup
        for value in hashes:
            evictor, nth = self.gone.pop(value, (None, 0))
            if evictor is None or not prompt_blocks:
                continue
            if not evictor.missed:
                self.culprits.append(evictor)
            evictor.missed += 1
            evictor.missed_at = at
            if made - nth < evictor.evicted - prompt_blocks:
                evictor.for_its_size += 1
                evictor.for_its_size_at = at


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
    """Computed prompts of one engine whose blocks are cached, as many as one pool has blocks for.

    A prompt is remembered by a few of its hashes, at places that double, so that any prompt finds one that shares at
    least half of what any shares with it.
    """

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
