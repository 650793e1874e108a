"""Counts of durations by how long they were: what a Prometheus histogram is made of."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

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
        """Add more durations."""
        ordered, below = sorted(durations), 0
        for bucket, bound_ns in enumerate(self._bounds_ns):
            until = bisect_right(ordered, bound_ns, below)
            self._counts[bucket] += until - below
            below = until
        self._counts[-1] += len(ordered) - below
        self._sum_ns += sum(ordered)

    @property
    def buckets(self) -> Buckets:
        """Cumulative, as Prometheus wants them."""
        return list(zip(self._bounds, accumulate(self._counts), strict=True))

    @property
    def count(self) -> int:
        """All of them."""
        return sum(self._counts)

    @property
    def seconds(self) -> float:
        """Their sum."""
        return self._sum_ns / 1e9
