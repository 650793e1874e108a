"""Whether clients wait longer for their first token than this engine usually lets them wait.

The engine's own past is the measure: time is cut into slices, and each slice has the distribution of the time from
arrival to the first token. Three slices in a row, together five minutes, must lie far above what earlier ones had. A
burst, a long prompt or a warm-up is over before, and an engine that has not been watched for long is not judged.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from ..contract.kinds import FIRST_FINISHED
from ..contract.samples import DurationCount
from .records import RequestState


def duration_quantile(counts: Mapping[tuple[float, float], int], share: float, at_most: float = math.inf) -> float:
    """Return the duration that `share` of the counted ones do not exceed, as Prometheus's histogram_quantile does: in
    proportion within a bucket, and the lower bound of the last. `counts`: by lower and upper bound, at least one.
    `at_most`: a longer one is not plausible. The bucket still holds.
    """
    below, rank = 0, share * sum(counts.values())
    for (lower, upper), number in sorted(counts.items()):
        if below + number >= rank:
            inside = lower if math.isinf(upper) else lower + (upper - lower) * (rank - below) / number
            return max(lower, min(inside, at_most))
        below += number
    raise AssertionError(f"rank {rank} of {below}")


SLICE_NS: Final = 100_000_000_000
RECENT_SLICES: Final = 3
"""Slices that must all be slow, five minutes together."""
FEWEST_IN_SLICE: Final = 4
"""A slice with fewer requests is neither slow nor learned."""
FEWEST_LEARNED: Final = 6
MOST_LEARNED: Final = 864
"""The slices of a day. Older ones no longer count."""
USUAL_SHARE: Final = 0.9
"""The share of the earlier slices whose 95th percentile is within the usual time: their bursts are usual too."""
SLOWER: Final = 3.0
"""Half of the requests wait so many times longer than 95 % usually do. Histograms of engines are about that fine."""
BUCKET_GROWTH: Final = 1.05
"""Durations that are known exactly are counted in buckets of this ratio."""


class SlowClients(NamedTuple):
    """Clients that wait longer than usual for their first token.

    p50_s is the median wait in the last slice. usual_p95_s is the 95th percentile of the `usual_of` requests before.
    """

    since_ns: int
    """On the clock of `add`."""
    p50_s: float
    usual_p95_s: float
    usual_of: int


class _Slice(NamedTuple):
    """Durations by their bounds: of requests that got their first token, and of those that still wait for it."""

    began_ns: int
    ended_ns: int
    counts: Counter[tuple[float, float]]
    unserved: Counter[tuple[float, float]]

    @property
    def waited(self) -> Counter[tuple[float, float]]:
        """The durations of both."""
        return self.counts + self.unserved


class _Learned(NamedTuple):
    ended_ns: int
    p95_s: float
    requests: int


class FirstTokenPace:
    """The times to the first token of one start of an engine, on a clock that never goes back."""

    def __init__(self) -> None:
        self._began_ns = 0
        self._counts: Counter[tuple[float, float]] = Counter()
        self._recent: deque[_Slice] = deque(maxlen=RECENT_SLICES)
        self._learned: deque[_Learned] = deque(maxlen=MOST_LEARNED)
        self._verdicts: deque[tuple[int, SlowClients | None]] = deque(maxlen=MOST_LEARNED)
        """Verdicts of each slice by its end."""

    @property
    def slow(self) -> SlowClients | None:
        """How the clients of the last slice are slowed down, or None if they are not or nothing was learned yet."""
        return self._verdicts[-1][1] if self._verdicts else None

    def slow_at(self, at_ns: int) -> SlowClients | None:
        """Return the same at an earlier time."""
        return next((slow for ended_ns, slow in reversed(self._verdicts) if ended_ns <= at_ns), None)

    def finished(self, request: RequestState) -> None:
        """Count a request that has ended, if its first token came in this slice."""
        if request.arrived_ns and request.first_token_ns > self._began_ns:
            self._counts[_duration_bounds((request.first_token_ns - request.arrived_ns) / 1e9)] += 1

    def follow(self, now_ns: int, requests: Iterable[RequestState]) -> None:
        """Note the current requests at this time. Requests without a token count by how long they wait already, once
        that is longer than usual.
        """
        if not self._is_over(now_ns):
            return
        usual = self.usual()
        longest_s = SLOWER * usual[0] if usual else math.inf
        unserved: Counter[tuple[float, float]] = Counter()
        for request in requests:
            if request.status >= FIRST_FINISHED or not request.arrived_ns:
                continue
            if request.first_token_ns > self._began_ns:
                self._counts[_duration_bounds((request.first_token_ns - request.arrived_ns) / 1e9)] += 1
            elif not request.first_token_ns and (waits_s := (now_ns - request.arrived_ns) / 1e9) > longest_s:
                unserved[_duration_bounds(waits_s)] += 1
        self._close(now_ns, unserved)

    def sampled(self, now_ns: int, counts: Iterable[DurationCount]) -> None:
        """Count the requests of a sample, and those of an engine's histogram."""
        self._is_over(now_ns)
        for lower_s, upper_s, requests in counts:
            self._counts[lower_s, upper_s] += requests
        if self._is_over(now_ns):
            self._close(now_ns, Counter())

    def _is_over(self, now_ns: int) -> bool:
        self._began_ns = self._began_ns or now_ns
        return now_ns - self._began_ns >= SLICE_NS

    def _close(self, now_ns: int, unserved: Counter[tuple[float, float]]) -> None:
        if len(self._recent) == RECENT_SLICES:
            self._learn(self._recent[0])
        self._recent.append(_Slice(self._began_ns, now_ns, self._counts, unserved))
        self._verdicts.append((now_ns, self._judge()))
        self._began_ns, self._counts = now_ns, Counter()

    def _learn(self, old: _Slice) -> None:
        """Take a slice for usual that has left the recent ones, unless it was far from usual itself."""
        while self._learned and old.ended_ns - self._learned[0].ended_ns > MOST_LEARNED * SLICE_NS:
            self._learned.popleft()
        if old.counts.total() < FEWEST_IN_SLICE:
            return
        usual = self.usual()
        if usual is None or duration_quantile(old.counts, 0.5) <= SLOWER * usual[0]:
            self._learned.append(_Learned(old.ended_ns, duration_quantile(old.counts, 0.95), old.counts.total()))

    def usual(self) -> tuple[float, int] | None:
        """Return the time that 95 % of the requests usually wait at most, and the number of requests behind it. None
        until enough were seen.
        """
        if len(self._learned) < FEWEST_LEARNED:
            return None
        ordered = sorted(slice_.p95_s for slice_ in self._learned)
        return ordered[math.ceil(USUAL_SHARE * len(ordered)) - 1], sum(slice_.requests for slice_ in self._learned)

    def _judge(self) -> SlowClients | None:
        usual = self.usual()
        if usual is None or len(self._recent) < RECENT_SLICES:
            return None
        if any(each.waited.total() < FEWEST_IN_SLICE for each in self._recent):
            return None
        medians = [duration_quantile(each.waited, 0.5) for each in self._recent]
        if min(medians) <= SLOWER * usual[0]:
            return None
        since_ns = self.slow.since_ns if self.slow is not None else self._recent[0].began_ns
        return SlowClients(since_ns, medians[-1], *usual)


def _duration_bounds(seconds: float) -> tuple[float, float]:
    """Return the bounds of the bucket that a duration is counted in."""
    if seconds <= 0:
        return 0.0, 0.0
    power = math.floor(math.log(seconds, BUCKET_GROWTH))
    return BUCKET_GROWTH**power, BUCKET_GROWTH ** (power + 1)
