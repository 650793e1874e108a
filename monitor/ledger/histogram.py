"""Counts of durations by how long they were: what a Prometheus histogram is made of."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

Buckets = list[tuple[float, int]]
"""For each bound in seconds, the last infinite, how many are at most as long."""


MOST_NOTED: Final = 4096


class Histogram:
    """Durations, given in ns, counted in buckets of `bounds` seconds, the least first.

    They are noted, and counted when there are many of them, or when somebody asks.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = (*bounds, float("inf"))
        self._bounds_ns = [round(bound * 1e9) for bound in bounds]
        self._counts = [0] * len(self._bounds)
        self._sum_ns = 0
        self._noted: list[int] = []

    def observe(self, durations: Sequence[int]) -> None:
        """Some more."""
        self._noted += durations
        if len(self._noted) > MOST_NOTED:
            self._settle()

    def _settle(self) -> None:
        self._noted.sort()
        below = 0
        for bucket, bound_ns in enumerate(self._bounds_ns):
            until = bisect_right(self._noted, bound_ns, below)
            self._counts[bucket] += until - below
            below = until
        self._counts[-1] += len(self._noted) - below
        self._sum_ns += sum(self._noted)
        self._noted.clear()

    @property
    def buckets(self) -> Buckets:
        """Cumulative, as Prometheus wants them."""
        self._settle()
        return list(zip(self._bounds, accumulate(self._counts), strict=True))

    @property
    def count(self) -> int:
        """All of them."""
        self._settle()
        return sum(self._counts)

    @property
    def seconds(self) -> float:
        """Their sum."""
        self._settle()
        return self._sum_ns / 1e9
