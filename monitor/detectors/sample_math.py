"""Sums and spacing of samples, where an engine's metrics are all there is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from kvscope.monitor.events.samples import Sample

DEFAULT_INTERVAL_S: Final = 10.0
"""Between two of vLLM's lines, unless their times differ."""
FEWEST_SAMPLES: Final = 3
"""The fewest samples of a window: two are one gap, in which anything may have begun and ended."""
CLOSEST_S: Final = 1.0
"""Samples closer together than this repeat each other, and would count as many."""


def spaced(samples: Sequence[Sample]) -> Iterator[int]:
    """Yield the indices of samples that are no closer together than CLOSEST_S, the first and all without a time
    included.
    """
    last_ns: int | None = None
    for index, sample in enumerate(samples):
        if sample.at_ns is None or last_ns is None or sample.at_ns - last_ns >= CLOSEST_S * 1e9:
            last_ns = sample.at_ns
            yield index


def apart_s(earlier: Sample, later: Sample) -> float | None:
    """Return the seconds between two samples, or None if they have no times."""
    return (later.at_ns - earlier.at_ns) / 1e9 if earlier.at_ns and later.at_ns else None


def prompt_tokens_until(samples: Sequence[Sample]) -> list[float]:
    """At each sample, the prompt tokens taken in so far: throughputs times the time since the sample before."""
    total = 0.0
    sums: list[float] = []
    previous: Sample | None = None
    for sample in samples:
        interval = DEFAULT_INTERVAL_S
        if previous is not None and sample.at_ns and previous.at_ns:
            interval = (sample.at_ns - previous.at_ns) / 1e9
        total += (sample.prompt_tokens_per_s or 0.0) * interval
        sums.append(total)
        previous = sample
    return sums
