"""Arrivals and completions by an engine's own counters, while requests wait for blocks.

    arrived  = finished + aborted + the change of (running + waiting)

The counters make these sums exact, however far apart the samples are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from kvscope.monitor.confidence_bounds import Bounds, rate_bounds
from kvscope.monitor.detectors.sample_math import apart_s
from kvscope.monitor.events.samples import Sample

GROWING_PARTS: Final = 3
"""Parts of a window, in each of which the queue has to grow: a burst is in one of them."""
CELLS: Final = 12
"""Parts of a window, over which the spread of completions is estimated."""
SIGMAS: Final = 2.0
"""Two counts whose difference is within so many standard deviations do not differ."""


class RateInTime(NamedTuple):
    """Events per second, and the 95 % bounds of the rate behind them."""

    rate: float
    bounds: Bounds

    def text(self) -> str:
        """Return `1.4 a second (95 % bounds 1.2 to 1.6)`, or the same per minute or hour."""
        per, unit = next(
            ((factor, name) for factor, name in ((1, "second"), (60, "minute")) if self.rate * factor >= 1),
            (3600, "hour"),
        )
        low, high = (f"{bound * per:.3g}" for bound in self.bounds)
        return f"{self.rate * per:.3g} a {unit} (95 % bounds {low} to {high})"


class QueueCourse(NamedTuple):
    """A window of samples in which requests wait for blocks all the time."""

    samples: Sequence[Sample]

    @property
    def seconds(self) -> float:
        """From the first sample to the last."""
        return apart_s(self.samples[0], self.samples[-1]) or 0.0

    @property
    def usage(self) -> float:
        """The median share of the pool in use."""
        return statistics.median(sample.usage or 0.0 for sample in self.samples)

    @property
    def finished(self) -> int:
        """Requests answered to their end."""
        return moved(self.samples[0].finished, self.samples[-1].finished)

    @property
    def arrived(self) -> int:
        """Requests that came, by what ended and what is there."""
        first, last = self.samples[0], self.samples[-1]
        return self.finished + moved(first.aborted, last.aborted) + in_engine(last) - in_engine(first)

    def parts(self, count: int) -> list[Sample]:
        """Return the samples that bound so many parts of about equal length."""
        first_ns, last_ns = self.samples[0].at_ns or 0, self.samples[-1].at_ns or 0
        bounds, part = [self.samples[0]], 1
        for sample in self.samples[1:]:
            if (sample.at_ns or 0) - first_ns >= part * (last_ns - first_ns) / count:
                bounds.append(sample)
                while (sample.at_ns or 0) - first_ns >= part * (last_ns - first_ns) / count:
                    part += 1
        return bounds

    def grows(self) -> bool:
        """Whether the queue is longer after each part, and by more than chance arrivals and completions explain."""
        bounds = self.parts(GROWING_PARTS)
        longer = len(bounds) > GROWING_PARTS and all(for_room(one) < for_room(two) for one, two in pairwise(bounds))
        return longer and self.arrived - self.finished > SIGMAS * math.sqrt(self.arrived + self.finished)

    def arrivals(self) -> RateInTime:
        """Return the rate at which requests came."""
        return RateInTime(self.arrived / self.seconds, rate_bounds(self.arrived, self.seconds))

    def completions(self) -> RateInTime:
        """Return the rate at which they ended, its bounds as wide as requests that end together make them."""
        rate, poisson = self.finished / self.seconds, rate_bounds(self.finished, self.seconds)
        widen = math.sqrt(max(1.0, self._dispersion(rate)))
        return RateInTime(
            rate, Bounds(max(0.0, rate - widen * (rate - poisson.low)), rate + widen * (poisson.high - rate))
        )

    def _dispersion(self, rate: float) -> float:
        """Variance of the completions of a cell over their mean: 1 where they are independent of each other."""
        cells = [
            (moved(one.finished, two.finished), apart_s(one, two) or 0.0) for one, two in pairwise(self.parts(CELLS))
        ]
        terms = [(count - rate * seconds) ** 2 / (rate * seconds) for count, seconds in cells if rate * seconds > 0]
        return math.fsum(terms) / (len(terms) - 1) if len(terms) > 1 else 1.0

    def slows_down(self) -> bool:
        """Whether fewer requests ended in the later half than in the earlier, by more than chance."""
        bounds = self.parts(2)
        if len(bounds) < 3:
            return False
        earlier, later = (moved(one.finished, two.finished) for one, two in pairwise(bounds[:3]))
        return earlier - later > SIGMAS * math.sqrt(earlier + later)


def moved(before: int | None, after: int | None) -> int:
    """Return by how much a counter moved, or 0 where it is not exposed."""
    return (after or 0) - (before or 0)


def in_engine(sample: Sample) -> int:
    """Return how many requests the engine has."""
    return (sample.running or 0) + (sample.waiting or 0)


def for_room(sample: Sample) -> int:
    """Return how many wait for a place or for blocks, and not for something else."""
    return max(0, (sample.waiting or 0) - (sample.deferred or 0))
