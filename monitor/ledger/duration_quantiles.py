"""Quantiles of durations that are known by the buckets they fell in."""

from __future__ import annotations

import math
from collections.abc import Mapping


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
