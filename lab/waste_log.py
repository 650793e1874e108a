"""Adds up what a witness of an engine observes, by kind, and finds who lost by an eviction and behind a head.

A cache evicts in the order of last use. Had one request evicted fewer blocks, all that it evicted and what followed
would have stayed in the cache for as many evictions longer. If the first blocks of a prefix would have stayed until the
lookup that missed them, had the request evicted no more than the one that missed takes, the request's size is to blame
for these. For the others the cache is too small: prompts of about one size push out one another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from itertools import takewhile
from typing import Final, NamedTuple

from .truth.episode_end import ObservedWaste, WasteKind

MOST_NAMED_IN_WASTE: Final = 5_000
"""Requests and blocks that are kept of each kind."""


class WasteLog:
    """The observed waste, by kind. `closed` once the episode is no longer watched: then nothing is added."""

    def __init__(self) -> None:
        self.closed = False
        self._seen: dict[WasteKind, ObservedWaste] = {}
        self._requests: dict[WasteKind, dict[str, None]] = {}
        self._blocks: dict[WasteKind, dict[int, None]] = {}

    def add(
        self, kind: WasteKind, at_s: float, amount: float, requests: Iterable[str] = (), blocks: Iterable[int] = ()
    ) -> None:
        """Add one observation."""
        if not self.closed:
            self.add_even_late(kind, at_s, amount, requests, blocks)

    def add_lost_prefix(self, at_s: float, flushed: int, evicted: int) -> None:
        """Add the tokens of a prefix that is gone: those that one request pushed out, and the others."""
        if flushed:
            self.add("prefix-flushed", at_s, flushed)
        if evicted:
            self.add("prefix-evicted", at_s, evicted)

    def add_even_late(
        self, kind: WasteKind, at_s: float, amount: float, requests: Iterable[str] = (), blocks: Iterable[int] = ()
    ) -> None:
        """Add one observation of the drain: of something that began while the episode was watched."""
        seen = self._seen.get(kind)
        if seen is None:
            seen = self._seen[kind] = ObservedWaste(kind, at_s, at_s)
            self._requests[kind], self._blocks[kind] = {}, {}
        seen.first_s, seen.last_s = min(seen.first_s, at_s), max(seen.last_s, at_s)
        seen.amount += amount
        if len(self._requests[kind]) < MOST_NAMED_IN_WASTE:
            self._requests[kind].update(dict.fromkeys(requests))
        if len(self._blocks[kind]) < MOST_NAMED_IN_WASTE:
            self._blocks[kind].update(dict.fromkeys(blocks))

    def all(self) -> list[ObservedWaste]:
        """Return everything that was observed."""
        for kind, seen in self._seen.items():
            seen.requests, seen.blocks = list(self._requests[kind]), list(self._blocks[kind])
        return list(self._seen.values())


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


def held_back(needs: Iterable[int], free: int, places: int, *, others_run: bool) -> int:
    """Count the requests, by the blocks that each needs, that would run in `free` blocks if it were not for the head.

    Beside others, these are as many as fit together, in at most `places`. With nothing running, each that fits alone
    could have the room in turn.
    """
    if not others_run:
        return sum(needed <= free for needed in needs)
    count = 0
    for needed in needs:
        if count < places and needed <= free:
            count, free = count + 1, free - needed
    return count
