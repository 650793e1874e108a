"""Decides which request pushed a prefix out of the cache, by undoing its evictions.

A cache evicts in the order of last use. Had one request evicted fewer blocks, all that it evicted and what followed
would have stayed in the cache for as many evictions longer. If a prefix would have stayed until the lookup that missed
it, had the request evicted no more than the one that missed takes, the request's size is to blame. Otherwise the cache
is too small for its prefixes: prompts of about one size push out one another.
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

    def kind_of_loss(self, gone: Iterable[bytes], victim: Hashable, victim_blocks: int) -> WasteKind:
        """Name the loss of a request of so many blocks whose prefix `gone` had been cached, on its first admission.

        One request is to blame if the prefix would be there had it evicted no more than such a request takes.
        """
        evictions = [self.latest[content] for content in gone]
        made = self._made - self._by[victim]  # until its lookup
        flushed = any(one.needless or made - one.nth < self._by[one.by] - victim_blocks for one in evictions)
        return "prefix-flushed" if flushed else "prefix-evicted"
