"""What samples add up to, where an engine's figures are all there is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from monitor.events.sample import Sample

DEFAULT_INTERVAL_S: Final = 10.0
"""Between two of vLLM's lines, unless their times say otherwise."""


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
