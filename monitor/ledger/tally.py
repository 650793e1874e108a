"""Statistics of one engine over time: latencies, recomputed tokens and how long blocks stay.

vLLM's three residency histograms know a block only when it is handed out again, so one that leaks is never in them.
This module also counts the ages of blocks that are still there, by the second in which they began: one count a second
of the last hour and one for all before it, so that no caller has to walk the pool.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import sub
from typing import Final

from ..contract.kinds import Status
from ..contract.samples import Sample
from .engine_state import EngineState
from .first_token_pace import FirstTokenPace
from .records import ComputedPrompt, Preemption, RequestState, ResidencySamples

Buckets = list[tuple[float, int]]
"""For each bound in seconds, the last infinite, how many are at most as long."""


class Histogram:
    """Durations, given in ns, counted in buckets of `bounds` seconds, the least first."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = (*bounds, float("inf"))
        self._bounds_ns = [round(bound * 1e9) for bound in bounds]
        self._counts = [0] * len(self._bounds)
        self._sum_ns = 0

    def observe(self, durations: Sequence[int]) -> None:
        """Add durations."""
        ordered, below = sorted(durations), 0
        for bucket, bound_ns in enumerate(self._bounds_ns):
            until = bisect_right(ordered, bound_ns, below)
            self._counts[bucket] += until - below
            below = until
        self._counts[-1] += len(ordered) - below
        self._sum_ns += sum(ordered)

    @property
    def buckets(self) -> Buckets:
        """The cumulative counts, as Prometheus expects them."""
        return list(zip(self._bounds, accumulate(self._counts), strict=True))

    @property
    def count(self) -> int:
        """The number of durations."""
        return sum(self._counts)

    @property
    def seconds(self) -> float:
        """The sum of the durations."""
        return self._sum_ns / 1e9


RESIDENCY_BOUNDS_S: Final = (0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0)
AGE_BOUNDS_S: Final = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0)
_SLOT_NS: Final = 1_000_000_000
_SLOTS: Final = int(AGE_BOUNDS_S[-1]) + 1


class Ages:
    """The ages of the blocks in one state, counted by the second in which they entered it. Times are monotonic ns."""

    def __init__(self) -> None:
        self.count = 0
        self._since_ns = 0
        self._slots: dict[int, int] = {}
        self._oldest = -1
        """The last second whose blocks are counted together with all before it."""
        self._older = 0

    def add(self, at_ns: int, blocks: int = 1) -> None:
        """Count blocks that enter the state."""
        slot = at_ns // _SLOT_NS
        if slot not in self._slots:
            self._forget(slot - _SLOTS)
            self._slots[slot] = 0
        self._slots[slot] += blocks
        self.count += blocks
        self._since_ns += at_ns * blocks

    def remove(self, since_ns: list[int]) -> None:
        """Count blocks that leave the state, by when each entered it."""
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
        """Return for each bound in seconds how many blocks are at most that old, to the second."""
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
        """Count the blocks of that second and before together, and drop empty seconds."""
        self._oldest = max(self._oldest, until)
        for slot in [slot for slot, blocks in self._slots.items() if slot <= until or not blocks]:
            self._older += self._slots.pop(slot)


class Residency:
    """How long the blocks of one engine stay, since reading began.

    The ledger notes transitions, which `count` counts many at a time: call it before you read.

    lifetime            from allocation until the content is gone: released without a hash, or evicted
    idle_before_evict   from the last release until the eviction
    reuse_gap           from the last release until a prefix hit
    held, idle          the ages of blocks that are in use, and of those that are only cached
    """

    def __init__(self) -> None:
        self.lifetime = Histogram(RESIDENCY_BOUNDS_S)
        self.idle_before_evict = Histogram(RESIDENCY_BOUNDS_S)
        self.reuse_gap = Histogram(RESIDENCY_BOUNDS_S)
        self.held = Ages()
        self.idle = Ages()
        self.noted = ResidencySamples()

    def take(self, state: EngineState) -> ResidencySamples:
        """Start over from `state` after lost events, and return where to note transitions from now on. O(blocks)."""
        self.noted = ResidencySamples()
        self.held, self.idle = Ages(), Ages()
        for since, refs, value in sorted(zip(state.since, state.refs, state.hashes, strict=True)):
            if refs > 0:
                self.held.add(since)
            elif value:
                self.idle.add(since)
        return self.noted

    def count(self) -> None:
        """Count the transitions noted since the last call."""
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


LATENCY_BOUNDS_S: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
TOKEN_BOUNDS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
SERVED: Final = frozenset((Status.FINISHED_STOPPED, Status.FINISHED_LENGTH_CAPPED, Status.FINISHED_REPETITION))
"""The terminal statuses of requests that got what they asked for."""


class Latencies:
    """Latencies of the requests that ended in one way, since reading began.

    queue         from arrival until first admitted, or until the end without an admission
    first_token   from arrival until the first token of output
    per_token     between two tokens of output, on average over the request
    """

    def __init__(self) -> None:
        self.queue = Histogram(LATENCY_BOUNDS_S)
        self.first_token = Histogram(LATENCY_BOUNDS_S)
        self.per_token = Histogram(TOKEN_BOUNDS_S)

    def add(self, request: RequestState) -> None:
        """Add a request that has ended."""
        for name, ns in times_of(request).items():
            histogram: Histogram = getattr(self, name)
            histogram.observe([ns])


def times_of(request: RequestState) -> dict[str, int]:
    """Return the latencies of an ended request in ns, by their names in Latencies. Those from before reading began are
    left out.
    """
    times = {}
    arrived, first = request.arrived_ns, request.first_token_ns
    if arrived:
        times["queue"] = (request.admitted_ns or request.finished_ns) - arrived
        if first:
            times["first_token"] = first - arrived
    if first and request.output_tokens > 1:
        times["per_token"] = (request.finished_ns - first) // (request.output_tokens - 1)
    return times


MAX_RECOMPUTED: Final = 4_096


class Recompute:
    """Tokens of one engine that were computed more than once, since reading began."""

    def __init__(self) -> None:
        self.lost: dict[int, int] = {}
        """Computed tokens that preemptions took, by their reason."""
        self.after_preemption = 0
        """Those of them that had to be computed again, because the prefix cache did not have them any more either."""
        self.recent: deque[tuple[int, int]] = deque(maxlen=MAX_RECOMPUTED)
        """Wall times at which requests were admitted again, with the tokens that had to be computed again then."""
        self.though_cached = 0
        """A lower bound of prompt tokens that were computed though their content was cached at admission."""

    def since(self, wall_ns: int) -> int:
        """Return the tokens that had to be computed again after preemptions since then."""
        return sum(tokens for at_ns, tokens in self.recent if at_ns >= wall_ns)

    def recomputed(self, at_ns: int, tokens: int) -> None:
        """Add what the batch of that wall time showed to be computed again after preemptions."""
        self.after_preemption += tokens
        if tokens:
            self.recent.append((at_ns, tokens))

    def add(self, preempted: Iterable[Preemption], prompts: Iterable[ComputedPrompt], block_size: int) -> None:
        """Add what the last batch showed."""
        for preemption in preempted:
            self.lost[preemption.reason] = self.lost.get(preemption.reason, 0) + preemption.tokens_lost
        for prompt in prompts:
            self.though_cached += prompt.again * block_size


MOST_NOTED: Final = 4_096
"""Bound on blocks counted in one go."""


class Tally:
    """The statistics of one start of an engine, since reading began."""

    def __init__(self) -> None:
        self.recompute = Recompute()
        self.served = Latencies()
        self.failed = Latencies()
        self.pace = FirstTokenPace()
        self._residency = Residency()
        self.in_step = False
        """Whether the ages of held and idle blocks are those of the ledger."""

    @property
    def residency(self) -> Residency:
        """How long blocks stay, with all transitions counted."""
        self._residency.count()
        return self._residency

    def follow(self, state: EngineState) -> None:
        """Follow a batch that was folded into `state`. While it is damaged nothing is noted; then ages start over."""
        if state.residency_samples is None and not state.damaged:
            state.residency_samples = self._residency.take(state)
        elif self._residency.noted.size > MOST_NOTED:
            self._residency.count()
        self.in_step = state.residency_samples is not None
        self.pace.follow(state.now_ns, state.requests.values())

    def sampled(self, sample: Sample) -> None:
        """Count the requests that a metrics page reports since the sample before."""
        if sample.restarted:
            self.pace = FirstTokenPace()
        if sample.at_ns is not None:
            self.pace.sampled(sample.at_ns, sample.first_token_s or ())

    def finished(self, requests: Iterable[RequestState]) -> None:
        """Note requests that have just ended."""
        for request in requests:
            (self.served if request.status in SERVED else self.failed).add(request)
            self.pace.finished(request)
