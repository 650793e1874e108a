"""How long blocks stay: those whose stay is over, and those that are still there.

vLLM's three histograms know a block only when it is handed out again, so one that leaks is never in them. Here the
ages of what is still there are counted too, by the second in which they began: one count a second of the last hour and
one for all before it, so that nobody ever has to walk the pool to tell them.
"""

from __future__ import annotations

from array import array
from typing import Final

from monitor.events.kinds import Kind
from monitor.events.state import State
from monitor.ledger.histogram import Buckets, Histogram

BOUNDS_S: Final = (0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0)
AGE_BOUNDS_S: Final = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0)
_SLOT_NS: Final = 1_000_000_000
_SLOTS: Final = int(AGE_BOUNDS_S[-1]) + 1
KINDS: Final = frozenset(
    int(kind)
    for kind in (Kind.ALLOCATED, Kind.REUSED, Kind.CACHED, Kind.EVICTED, Kind.RELEASED, Kind.RECLAIMED)
)  # fmt: skip
"""Of the events that are folded in here, as plain numbers."""
_ALLOCATED, _REUSED, _CACHED, _EVICTED = (
    int(kind) for kind in (Kind.ALLOCATED, Kind.REUSED, Kind.CACHED, Kind.EVICTED)
)


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
        if not blocks:
            return
        slot = at_ns // _SLOT_NS
        if slot not in self._slots:
            self._forget(slot - _SLOTS)
        self._slots[slot] = self._slots.get(slot, 0) + blocks
        self.count += blocks
        self._since_ns += at_ns * blocks

    def remove(self, since_ns: list[int]) -> None:
        """So many leave it, that came then."""
        slots, oldest = self._slots, self._oldest
        for since in since_ns:
            slot = since // _SLOT_NS
            if slot > oldest:
                slots[slot] -= 1
            else:
                self._older -= 1
        self.count -= len(since_ns)
        self._since_ns -= sum(since_ns)

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
        """The sum of their ages."""
        return (now_ns * self.count - self._since_ns) / 1e9

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
        """Whether what follows can be folded in; if not, `take` first."""
        # A column a block: references, whether it has a hash, since when in use or idle, when handed out (0: unseen).
        self._refs = array("i")
        self._hashed = bytearray()
        self._since = array("q")
        self._born = array("q")

    def take(self, state: State) -> None:
        """Begin anew from the books, since events were missed. O(blocks)."""
        self._refs = array("i", state.refs)
        self._hashed = bytearray(map(bool, state.hashes))
        self._since = array("q", state.since)
        self._born = array("q", [0]) * state.total
        self.held, self.idle = Ages(), Ages()
        for since, refs, hashed in sorted(zip(self._since, self._refs, self._hashed, strict=True)):
            if refs > 0:
                self.held.add(since)
            elif hashed:
                self.idle.add(since)
        self.in_step = True

    def apply(self, kind: int, blocks: list[int], now_ns: int) -> None:
        """Fold in one event of `KINDS`. Blocks that the pool has not are left out."""
        if not 0 <= min(blocks) <= max(blocks) < len(self._refs):
            return
        if kind == _ALLOCATED:
            self._allocated(blocks, now_ns)
        elif kind == _REUSED:
            self._reused(blocks, now_ns)
        elif kind == _CACHED:
            self._cached(blocks, now_ns)
        elif kind == _EVICTED:
            self._unhashed(blocks, now_ns)
        else:
            self._released(blocks, now_ns)

    def _allocated(self, blocks: list[int], now_ns: int) -> None:
        refs, hashed, since, born = self._refs, self._hashed, self._since, self._born
        taken, evicted = 0, []
        for block in blocks:
            if refs[block]:  # cannot be, and the books say so
                refs[block] += 1
                continue
            if hashed[block]:
                hashed[block] = 0
                evicted.append((since[block], born[block]))
            refs[block] = 1
            since[block] = born[block] = now_ns
            taken += 1
        if evicted:
            self._evicted(evicted, now_ns)
        self.held.add(now_ns, taken)

    def _reused(self, blocks: list[int], now_ns: int) -> None:
        refs, hashed, since = self._refs, self._hashed, self._since
        taken, idle = 0, []
        for block in blocks:
            if not refs[block]:
                if hashed[block]:
                    idle.append(since[block])
                since[block] = now_ns
                taken += 1
            refs[block] += 1
        self.reuse_gap.observe([now_ns - at for at in idle])
        self.idle.remove(idle)
        self.held.add(now_ns, taken)

    def _cached(self, blocks: list[int], now_ns: int) -> None:
        for block in blocks:
            if not self._refs[block] and not self._hashed[block]:
                self._since[block] = now_ns
                self.idle.add(now_ns)
            self._hashed[block] = 1

    def _unhashed(self, blocks: list[int], now_ns: int) -> None:
        evicted = []
        for block in blocks:
            if self._hashed[block] and not self._refs[block]:
                evicted.append((self._since[block], self._born[block]))
            self._hashed[block] = 0
        self._evicted(evicted, now_ns)

    def _released(self, blocks: list[int], now_ns: int) -> None:
        refs, hashed, since, born = self._refs, self._hashed, self._since, self._born
        kept, given_back, lifetimes = 0, [], []
        for block in blocks:
            if refs[block] != 1:
                refs[block] = max(refs[block] - 1, 0)
                continue
            refs[block] = 0
            given_back.append(since[block])
            if hashed[block]:
                kept += 1
                since[block] = now_ns
            elif born[block]:
                lifetimes.append(now_ns - born[block])
        self.held.remove(given_back)
        self.lifetime.observe(lifetimes)
        self.idle.add(now_ns, kept)

    def _evicted(self, stays: list[tuple[int, int]], now_ns: int) -> None:
        """Of blocks that lost their content: since when idle, and when handed out."""
        idle = [since for since, _ in stays]
        self.idle.remove(idle)
        self.idle_before_evict.observe([now_ns - since for since in idle])
        self.lifetime.observe([now_ns - born for _, born in stays if born])
