"""From how many samples, and over how long, a rule can decide where metrics are all there is."""

from __future__ import annotations

import math
from typing import NamedTuple

from kvscope.monitor.detectors.thresholds import Settings, Threshold
from kvscope.monitor.text import counted, duration


class SampleNeed(NamedTuple):
    """The least that a rule decides from.

    samples: the fewest. seconds: the time that they must span (None: any). what: the state of the engine that has to
    show in all of them. longest_interval_s: samples further apart than this decide nothing (None: any distance).
    """

    samples: int
    seconds: Threshold | None
    what: str
    longest_interval_s: Threshold | None = None

    def decides_after_s(self, interval_s: float, settings: Settings | None = None) -> float:
        """Return how long the state must last at one sample each `interval_s` seconds, or infinity if it never
        decides.
        """
        values = settings or Settings()
        if self.longest_interval_s is not None and interval_s > values(self.longest_interval_s):
            return math.inf
        spanned = values(self.seconds) if self.seconds is not None else 0.0
        return max(self.samples - 1, math.ceil(spanned / interval_s)) * interval_s

    def text(self, settings: Settings, interval_s: float) -> str:
        """Return the need as a sentence for a finding that is not decided."""
        span = f" over {duration(settings(self.seconds))} or more" if self.seconds is not None else ""
        least = f"This rule decides from {counted(self.samples, 'sample')}{span}"
        after_s = self.decides_after_s(interval_s, settings) if interval_s > 0 else math.inf
        return (
            least
            if after_s == math.inf
            else f"{least}, so after {duration(after_s)} at one sample each {duration(interval_s)}"
        )
