"""Sums, windows and rates of samples, where an engine's metrics are all there is.

Arrivals and completions while requests wait for blocks, by the engine's own counters:

    arrived  = finished + aborted + the change of (running + waiting)

The counters make these sums exact, however far apart the samples are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Final, NamedTuple

from ..base.confidence_bounds import Bounds, rate_bounds
from ..contract.samples import Sample

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


class FullestPool(NamedTuple):
    """The name and the usage of a pool, for a sentence."""

    name: str
    usage: float


def fullest_pool(sample: Sample) -> FullestPool:
    """Return the pool with the highest usage, which is the one pool of most engines."""
    pools = {
        "usage": sample.shown_usage or 0.0,
        "usage of the sliding-window pool": sample.window_pool_usage or 0.0,
        "usage of the Mamba state pool": sample.state_pool_usage or 0.0,
    }
    return FullestPool(*max(pools.items(), key=lambda pool: pool[1]))


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


LEAST_PAUSES: Final = 3
"""Complete pauses that show how long a step takes here."""
GAPS_LOOKED_AT: Final = 32


def last_window(samples: Sequence[Sample], holds: Callable[[Sample], bool]) -> int | None:
    """Return the index at which the last window begins in which `holds` is true, or None if it is not at the end."""
    start = len(samples)
    for sample in reversed(samples):
        if not holds(sample):
            break
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


def is_made_anew(samples: Sequence[Sample]) -> bool:
    """Whether each scrape cost the page's server CPU time: a copy of the page repeats that as well."""
    times = [sample.process_cpu_s for sample in samples]
    return all(one is not None and two is not None and one < two for one, two in pairwise(times))


def moving_pause_s(
    samples: Sequence[Sample], shown_by: Callable[[Sample], object] = attrgetter("steps"), *, may_be_copy: bool = True
) -> float:
    """Return the longest time that what shows progress stood still with requests running and then moved again, at least
    1 ms. Return 0 until enough pauses were seen from their beginning to their end.

    Watching may begin in the middle of a step, so that the first pause seen is shorter than it was. Several steps
    between two samples are as many pauses, each shorter than the time between the two, unless nothing moved, or nothing
    was seen, before: a copy of the page that is made again every 15 s has hundreds of steps at once, and no pause but
    its own. Only one that is no copy needs nothing before.
    """
    longest = 0.0
    began = changed = ends_seen = 0
    for index in range(1, len(samples)):
        before, sample = samples[index - 1], samples[index]
        moved = shown_by(sample) != shown_by(before)
        if moved:
            stood = changed < index - 1 if changed else may_be_copy
            ends = 1 if stood else max((sample.steps or 0) - (before.steps or 0), 1)
            ends_seen += ends if before.running else ends - 1  # the first of them began while nothing ran
            changed = index
        if before.running:
            longest = max(longest, seconds_apart(samples[began], sample))
        if moved or not before.running:
            began = index
    return max(longest, 0.001) if ends_seen >= LEAST_PAUSES else 0.0


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
