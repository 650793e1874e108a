"""Whose prompt pushed what out of the prefix cache, and how much of that was needed again.

A hash names the content of a block. One that is cached again after it was evicted had to be computed again. What is
remembered is bounded: the contents evicted last, of the requests that evicted last.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Final

from kvscope.monitor.state.records import UNKNOWN, RequestState

MAX_EVICTED: Final = 1 << 17
MAX_EVICTORS: Final = 1 << 12


class Evictor:
    """A request whose prompt was given blocks that held others' prefixes. Counts are of blocks."""

    def __init__(self, name: str, at_ns: int, cached_before: int, unused: int, at: int) -> None:
        self.id = name
        self.at = self.evicted_at = self.unused_at = at
        """Where in the stream it evicted first and last, and where the least lay unused."""
        self.missed_at = UNKNOWN
        self.at_ns = at_ns
        """When it first evicted something, on the engine's monotonic clock."""
        self.cached_before = cached_before
        """Kept for their prefixes just before, and in nobody's use."""
        self.unused = unused
        """The least that lay free with no content in them, and would have served as well, whenever it evicted."""
        self.evicted = 0
        self.missed = 0
        """Of the evicted: cached again since."""


class Evictions:
    """The evictions of one engine, since we have listened."""

    def __init__(self) -> None:
        self.culprits: deque[Evictor] = deque(maxlen=MAX_EVICTORS)
        """Those who evicted what was needed again, in the order in which that was found."""
        self.gone: dict[int, Evictor] = {}
        """By hash, what was evicted and is not cached again, with who evicted it. Always the same dictionary."""
        self._by_request: dict[int, Evictor] = {}

    def evict(
        self, record: RequestState, at_ns: int, hashes: list[int], cached_before: int, unused: int, at: int
    ) -> None:
        """The request was given blocks that held these contents, `at` that place in the stream."""
        evictor = self._by_request.get(record.number)
        if evictor is None:
            evictor = self._by_request[record.number] = Evictor(record.id, at_ns, cached_before, unused, at)
            if len(self._by_request) > MAX_EVICTORS:
                del self._by_request[next(iter(self._by_request))]
        evictor.evicted += len(hashes)
        evictor.evicted_at = at
        if unused < evictor.unused:
            evictor.unused, evictor.unused_at = unused, at
        self.gone.update(dict.fromkeys(hashes, evictor))
        if len(self.gone) > MAX_EVICTED:
            for value in list(islice(self.gone, MAX_EVICTED // 2)):
                del self.gone[value]

    def store(self, hashes: list[int], at: int) -> None:
        """These contents are cached, again or for the first time, `at` that place in the stream."""
        for value in hashes:
            evictor = self.gone.pop(value, None)
            if evictor is not None:
                if not evictor.missed:
                    self.culprits.append(evictor)
                evictor.missed += 1
                evictor.missed_at = at
