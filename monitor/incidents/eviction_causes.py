"""Decides which request pushed a prefix out of the cache, by undoing its evictions.

A cache evicts in the order of last use. Without the evictions of one request, all that it evicted and what followed
would have stayed in the cache for as many evictions longer. If that reaches to the lookup that missed the prefix, the
request is to blame for it. If no single request is, the cache is too small for its prefixes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import NamedTuple

from kvscope.monitor.incidents.truth.episode_end import WasteKind


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

    def kind_of_loss(self, gone: Iterable[bytes], victim_blocks: int) -> WasteKind:
        """Name the loss of a request of so many blocks whose prefix `gone` had been cached.

        One request is to blame if it evicted more than such a request takes, and the prefix would be there without it.
        """
        evictions = [self.latest[content] for content in gone]
        flushed = any(
            one.needless or (self._by[one.by] > victim_blocks and self._made - one.nth < self._by[one.by])
            for one in evictions
        )
        return "prefix-flushed" if flushed else "prefix-evicted"
