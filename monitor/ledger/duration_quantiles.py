"""Quantiles of durations that are known by the buckets they fell in."""

from __future__ import annotations

import math
from collections.abc import Mapping


def duration_quantile(counts: Mapping[tuple[float, float], int], share: float) -> float:
    """Return the duration that `share` of the counted ones do not exceed, as Prometheus's histogram_quantile does: in
    proportion within a bucket, and the lower bound of the last. `counts`: by lower and upper bound, at least one.
    """
    below, rank = 0, share * sum(counts.values())
    for (lower, upper), number in sorted(counts.items()):
        if below + number >= rank:
            return lower if math.isinf(upper) else lower + (upper - lower) * (rank - below) / number
        below += number
    raise AssertionError(f"rank {rank} of {below}")
