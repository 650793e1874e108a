"""Windows of samples in which nothing moves: what stalls found from metrics have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

from kvscope.monitor.detectors.sample_math import apart_s
from kvscope.monitor.detectors.thresholds import Threshold
from kvscope.monitor.events.samples import Sample

LONGEST_TIMES: Final = Threshold(
    3, "times", "a step that cannot be compared with earlier ones may take as much longer than the longest"
)
LEAST_SCRAPES: Final = Threshold(
    5, "scrapes", "where only metrics are known, one gap between two samples may be one step, or its end missed"
)
"""Both of stuck.engine-stalled."""
LEAST_PAUSES: Final = 3
"""Complete pauses that show how long a step takes here."""
GAPS_LOOKED_AT: Final = 32


def last_window(samples: Sequence[Sample], holds: Callable[[Sample], bool]) -> int | None:
    """Return the index at which the last window begins in which `holds` is true, or None if it is not at the end."""
    start = len(samples)
    while start > 0 and holds(samples[start - 1]):
        start -= 1
    return start if start < len(samples) else None


def seconds_apart(first: Sample, last: Sample) -> float:
    """Return the seconds between two samples, 0.0 where they have no times."""
    apart = apart_s(first, last)
    return apart if apart is not None else 0.0


def scrape_interval_s(samples: Sequence[Sample]) -> float:
    """Return the usual time between samples, 0.0 where they have no times."""
    gaps = sorted(gap for one, two in pairwise(samples[-GAPS_LOOKED_AT:]) if (gap := apart_s(one, two)))
    return gaps[len(gaps) // 2] if gaps else 0.0


def moving_pause_s(samples: Sequence[Sample]) -> float:
    """Return the longest time that the count of steps stood still with requests running and then moved again, at least
    1 ms. Return 0 until enough pauses were seen from their beginning to their end.

    Watching may begin in the middle of a step, so that the first pause seen is shorter than it was. Several steps
    between two samples are as many pauses, each shorter than the time between the two.
    """
    longest = 0.0
    began, ends_seen = 0, 0
    for index in range(1, len(samples)):
        before, sample = samples[index - 1], samples[index]
        moved = sample.steps != before.steps
        ends_seen += max((sample.steps or 0) - (before.steps or 0), 0)
        if before.running:
            longest = max(longest, seconds_apart(samples[began], sample))
        if moved or not before.running:
            began = index
    return max(longest, 0.001) if ends_seen >= LEAST_PAUSES else 0.0
