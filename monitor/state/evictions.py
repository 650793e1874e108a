"""Which prompts evicted prefix-cache content, and how much of it was needed again.

A hash names the content of a block. Content that is cached again after its eviction had to be recomputed. Memory is
bounded to the content evicted last, by the requests that evicted last: of a small pool, to the content of so many
pools. Any load would have evicted older content meanwhile.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Final

from kvscope.monitor.state.records import UNKNOWN_POSITION, RequestState

MAX_EVICTED: Final = 1 << 17
POOLS_EVICTED: Final = 16
LEAST_EVICTED: Final = 1 << 12
MAX_EVICTORS: Final = 1 << 12
NUMBERED_TOGETHER: Final = 8
"""Blocks evicted one after the other that share a number, that of the first: one for each would double the memory."""


class Evictor:
    """A request whose prompt was allocated blocks that held cached prefixes. Counts are in blocks."""

    __slots__ = (
        "at",
        "at_ns",
        "cached_before",
        "evicted",
        "evicted_at",
        "for_its_size",
        "for_its_size_at",
        "id",
        "missed",
        "missed_at",
        "unused",
        "unused_at",
    )

    def __init__(self, name: str, at_ns: int, cached_before: int, unused: int, at: int) -> None:
        self.id = name
        self.at = self.evicted_at = self.unused_at = at
        """Stream positions of its first and last eviction, and of the one with the fewest unused blocks."""
        self.missed_at = self.for_its_size_at = UNKNOWN_POSITION
        self.at_ns = at_ns
        """Its first eviction, on the engine's monotonic clock."""
        self.cached_before = cached_before
        """Cached-idle blocks just before."""
        self.unused = unused
        """The fewest free blocks without content, which would have served as well, at any of its evictions."""
        self.evicted = 0
        self.missed = 0
        """Evicted blocks that were cached again since."""
        self.for_its_size = 0
        """Of these, blocks that prompts missed, and that would still have been cached had this request evicted no more
        than such a prompt takes. Where the least recently used goes first, it has itself pushed them out.
        """


class Evictions:
    """The evictions of one engine since the first event received."""

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
            evictor = self._by_request[record.number] = Evictor(record.id, at_ns, cached_before, unused, at)
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
