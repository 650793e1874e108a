"""How long blocks stay: those whose stay is over, and those that are still there.

vLLM's three histograms know a block only when it is handed out again, so one that leaks is never in them. Here the
ages of what is still there are counted too, by the second in which they began: one count a second of the last hour and
one for all before it, so that nobody ever has to walk the pool to tell them.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from monitor.events.state import State
from monitor.ledger.histogram import MOST_NOTED, Buckets, Histogram

BOUNDS_S: Final = (0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0)
AGE_BOUNDS_S: Final = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0)
_SLOT_NS: Final = 1_000_000_000
_SLOTS: Final = int(AGE_BOUNDS_S[-1]) + 1


class Ages:
    """How many blocks are in one state, by the second since when. Times are monotonic ns.

    Who comes and leaves is noted, and counted when there is much of it, or when somebody asks.
    """

    def __init__(self) -> None:
        self._came: dict[int, int] = {}
        self._left: list[int] = []
        self._count = 0
        self._since_ns = 0
        self._slots: dict[int, int] = {}
        self._oldest = -1
        """The last second whose blocks are counted together with all before it."""
        self._older = 0

    def add(self, at_ns: int, blocks: int = 1) -> None:
        """So many come into the state."""
        self._came[at_ns] = self._came.get(at_ns, 0) + blocks

    def remove(self, since_ns: list[int]) -> None:
        """So many leave it, that came then."""
        self._left += since_ns
        if len(self._left) > MOST_NOTED:
            self._settle()

    @property
    def count(self) -> int:
        """All of them."""
        self._settle()
        return self._count

    def buckets(self, now_ns: int) -> Buckets:
        """For each bound in seconds, how many are at most as old: to the second."""
        self._settle()
        now = now_ns // _SLOT_NS
        counts = [0] * len(AGE_BOUNDS_S)
        for slot, blocks in self._slots.items():
            age = now - slot
            for index, bound in enumerate(AGE_BOUNDS_S):
                if age <= bound:
                    counts[index] += blocks
        return [*zip(AGE_BOUNDS_S, counts, strict=True), (float("inf"), self._count)]

    def seconds(self, now_ns: int) -> float:
        """The sum of their ages."""
        self._settle()
        return (now_ns * self._count - self._since_ns) / 1e9

    def _settle(self) -> None:
        for at_ns, blocks in self._came.items():
            slot = at_ns // _SLOT_NS
            if slot not in self._slots:
                self._forget(slot - _SLOTS)
            self._slots[slot] = self._slots.get(slot, 0) + blocks
            self._count += blocks
            self._since_ns += at_ns * blocks
        self._left.sort()
        done = 0
        while done < len(self._left):  # a second at a time
            slot = self._left[done] // _SLOT_NS
            until = bisect_left(self._left, (slot + 1) * _SLOT_NS, done)
            if slot > self._oldest:
                self._slots[slot] -= until - done
            else:
                self._older -= until - done
            done = until
        self._count -= len(self._left)
        self._since_ns -= sum(self._left)
        self._came.clear()
        self._left.clear()

    def _forget(self, until: int) -> None:
        """Count together what came in that second or before, and drop what is empty."""
        self._oldest = max(self._oldest, until)
        for slot in [slot for slot, blocks in self._slots.items() if slot <= until or not blocks]:
            self._older += self._slots.pop(slot)


class Residency:
    """The stays of one engine's blocks, since we have listened.

    lifetime            from being handed out until the content is gone: given back unhashed, or evicted
    idle_before_evict   from the last release until the eviction
    reuse_gap           from the last release until a prefix hit
    held, idle          how old the stays are that go on: in use, and only cached
    """

    def __init__(self) -> None:
        self.lifetime = Histogram(BOUNDS_S)
        self.idle_before_evict = Histogram(BOUNDS_S)
        self.reuse_gap = Histogram(BOUNDS_S)
        self.held = Ages()
        self.idle = Ages()
        self.in_step = False
        """Whether `held` and `idle` are those of the books; if not, `take` first."""

    def take(self, state: State) -> None:
        """Begin anew from the books, since events were missed. O(blocks)."""
        self.held, self.idle = Ages(), Ages()
        for since, refs, value in sorted(zip(state.since, state.refs, state.hashes, strict=True)):
            if refs > 0:
                self.held.add(since)
            elif value:
                self.idle.add(since)

    def allocated(self, blocks: int, idle_since: list[int], born: list[int], now_ns: int) -> None:
        """See Stays, as for what follows."""
        self.held.add(now_ns, blocks)
        if idle_since:
            self.evicted(idle_since, born, now_ns)

    def reused(self, blocks: int, idle_since: list[int], now_ns: int) -> None:
        """More in use, fewer idle."""
        self.reuse_gap.observe([now_ns - since for since in idle_since])
        self.idle.remove(idle_since)
        self.held.add(now_ns, blocks)

    def released(self, used_since: list[int], born: list[int], now_ns: int) -> None:
        """Fewer in use, more idle but for those whose lives are over."""
        self.held.remove(used_since)
        self.lifetime.observe([now_ns - at for at in born if at])
        self.idle.add(now_ns, len(used_since) - len(born))

    def idle_from(self, at_ns: int) -> None:
        """One more is idle."""
        self.idle.add(at_ns)

    def evicted(self, idle_since: list[int], born: list[int], now_ns: int) -> None:
        """Fewer idle: their lives are over."""
        self.idle.remove(idle_since)
        self.idle_before_evict.observe([now_ns - since for since in idle_since])
        self.lifetime.observe([now_ns - at for at in born if at])
