"""Windows of samples in which nothing moves: what stalls found from metrics have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kvscope.monitor.detectors.sample_math import apart_s
from kvscope.monitor.detectors.thresholds import Threshold
from kvscope.monitor.events.samples import Sample

LONGEST_TIMES: Final = Threshold(
    3, "times", "where only figures are known, a step may take as much longer than the longest seen"
)
"""Of stuck.engine-stalled."""


def last_window(samples: Sequence[Sample], holds: Callable[[Sample], bool]) -> int | None:
    """Return the index at which the last window begins in which `holds` is true; None if it is not at the end."""
    start = len(samples)
    while start > 0 and holds(samples[start - 1]):
        start -= 1
    return start if start < len(samples) else None


def seconds_apart(first: Sample, last: Sample) -> float:
    """Return the seconds between two samples, 0.0 where they have no times."""
    apart = apart_s(first, last)
    return apart if apart is not None else 0.0


def moving_pause_s(samples: Sequence[Sample]) -> float:
    """Return the longest time that the count of steps stood still with requests running and then moved again, at least
    1 ms; 0 if no step was seen to end.
    """
    longest = 0.0
    began, ends_seen = 0, 0
    for index in range(1, len(samples)):
        before, sample = samples[index - 1], samples[index]
        ends_seen += sample.steps != before.steps
        if sample.steps != before.steps or not before.running:
            began = index
        longest = max(longest, seconds_apart(samples[began], sample))
    return max(longest, 0.001) if ends_seen else 0.0
