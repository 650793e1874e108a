"""Decides which request pushed a prefix out of the cache, by undoing its evictions.

A cache evicts in the order of last use. Had one request evicted fewer blocks, all that it evicted and what followed
would have stayed in the cache for as many evictions longer. If the first blocks of a prefix would have stayed until the
lookup that missed them, had the request evicted no more than the one that missed takes, the request's size is to blame
for these. For the others the cache is too small: prompts of about one size push out one another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from itertools import takewhile
from typing import NamedTuple


class CacheEviction(NamedTuple):
    """The latest eviction of some content: the how many-th it was of all, and by which request.

    needless: blocks without content were free that would have served as well.
    """

    nth: int
    by: Hashable
    needless: bool


class EvictionCauses:
    """The evictions of one engine, by content."""

    def __init__(self) -> None:
        self.latest: dict[bytes, CacheEviction] = {}
        self._made = 0
        self._by: Counter[Hashable] = Counter()

    def evicted(self, content: bytes, by: Hashable, *, needless: bool = False) -> None:
        """Note an eviction by a request."""
        self._made += 1
        self._by[by] += 1
        self.latest[content] = CacheEviction(self._made, by, needless)

    def blocks_flushed(self, gone: Iterable[Iterable[bytes]], victim: Hashable, victim_blocks: int) -> int:
        """Return how many blocks of a lost prefix one request is to blame for, of the prefix `gone` that a request of
        so many blocks had cached and missed on its first admission. `gone`: the contents of each block, in order.

        It is to blame for those that would be there had it evicted no more than such a request takes. A prefix serves
        as far as it is there without a gap.
        """
        made = self._made - self._by[victim]  # until its lookup

        def would_be_there(contents: Iterable[bytes]) -> bool:
            evictions = [self.latest[content] for content in contents]
            return all(one.needless or made - one.nth < self._by[one.by] - victim_blocks for one in evictions)

        return sum(1 for _ in takewhile(would_be_there, gone))
