"""How long blocks stay: those whose stay is over, and those that are still there.

vLLM's three histograms know a block only when it is handed out again, so one that leaks is never in them. This module
also counts the ages of blocks that are still there, by the second in which they began: one count a second of the last
hour and one for all before it, so that no caller has to walk the pool.
"""

from __future__ import annotations

from bisect import bisect_left
from operator import sub
from typing import Final

from kvscope.monitor.ledger.histogram import Buckets, Histogram
from kvscope.monitor.state.engine_state import EngineState
from kvscope.monitor.state.residency_samples import ResidencySamples

RESIDENCY_BOUNDS_S: Final = (0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0)
AGE_BOUNDS_S: Final = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0)
_SLOT_NS: Final = 1_000_000_000
_SLOTS: Final = int(AGE_BOUNDS_S[-1]) + 1


class Ages:
    """How many blocks are in one state, by the second since when. Times are monotonic ns."""

    def __init__(self) -> None:
        self.count = 0
        self._since_ns = 0
        self._slots: dict[int, int] = {}
        self._oldest = -1
        """The last second whose blocks are counted together with all before it."""
        self._older = 0

    def add(self, at_ns: int, blocks: int = 1) -> None:
        """So many come into the state."""
        slot = at_ns // _SLOT_NS
        if slot not in self._slots:
            self._forget(slot - _SLOTS)
            self._slots[slot] = 0
        self._slots[slot] += blocks
        self.count += blocks
        self._since_ns += at_ns * blocks

    def remove(self, since_ns: list[int]) -> None:
        """So many leave it, that came then."""
        ordered, done = sorted(since_ns), 0
        while done < len(ordered):  # a second at a time
            slot = ordered[done] // _SLOT_NS
            until = bisect_left(ordered, (slot + 1) * _SLOT_NS, done)
            if slot > self._oldest:
                self._slots[slot] -= until - done
            else:
                self._older -= until - done
            done = until
        self.count -= len(ordered)
        self._since_ns -= sum(ordered)

    def buckets(self, now_ns: int) -> Buckets:
        """For each bound in seconds, how many are at most as old: to the second."""
        now = now_ns // _SLOT_NS
        counts = [0] * len(AGE_BOUNDS_S)
        for slot, blocks in self._slots.items():
            age = now - slot
            for index, bound in enumerate(AGE_BOUNDS_S):
                if age <= bound:
                    counts[index] += blocks
        return [*zip(AGE_BOUNDS_S, counts, strict=True), (float("inf"), self.count)]

    def seconds(self, now_ns: int) -> float:
        """Return the sum of their ages."""
        return (now_ns * self.count - self._since_ns) / 1e9

    def _forget(self, until: int) -> None:
        """Count together what came in that second or before, and drop what is empty."""
        self._oldest = max(self._oldest, until)
        for slot in [slot for slot, blocks in self._slots.items() if slot <= until or not blocks]:
            self._older += self._slots.pop(slot)


class Residency:
    """The stays of one engine's blocks, since we have listened. The ledger notes them, and they are counted many at a
    time: call `count` before you read them.

    lifetime            from being handed out until the content is gone: given back unhashed, or evicted
    idle_before_evict   from the last release until the eviction
    reuse_gap           from the last release until a prefix hit
    held, idle          how old the stays are that go on: in use, and only cached
    """

    def __init__(self) -> None:
        self.lifetime = Histogram(RESIDENCY_BOUNDS_S)
        self.idle_before_evict = Histogram(RESIDENCY_BOUNDS_S)
        self.reuse_gap = Histogram(RESIDENCY_BOUNDS_S)
        self.held = Ages()
        self.idle = Ages()
        self.noted = ResidencySamples()

    def take(self, state: EngineState) -> ResidencySamples:
        """Start over from the ledger, since events were missed, and return where to note the fate of blocks.
        O(blocks).
        """
        self.noted = ResidencySamples()
        self.held, self.idle = Ages(), Ages()
        for since, refs, value in sorted(zip(state.since, state.refs, state.hashes, strict=True)):
            if refs > 0:
                self.held.add(since)
            elif value:
                self.idle.add(since)
        return self.noted

    def count(self) -> None:
        """Count what was noted."""
        noted = self.noted
        for at_ns, blocks in zip(noted.taken_ns, noted.taken, strict=True):
            self.held.add(at_ns, blocks)
        for at_ns, blocks in zip(noted.kept_ns, noted.kept, strict=True):
            self.idle.add(at_ns, blocks)
        self.held.remove(noted.used_since)
        self.idle.remove(noted.hit_since)
        self.idle.remove(noted.evicted_since)
        self.reuse_gap.observe([*map(sub, noted.hit_ns, noted.hit_since)])
        self.idle_before_evict.observe([*map(sub, noted.evicted_ns, noted.evicted_since)])
        self.lifetime.observe([died - born for died, born in zip(noted.died_ns, noted.born, strict=True) if born])
        noted.clear()
