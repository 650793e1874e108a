"""A fall of usage in samples: how long it took, what ended in it, and whether that is more than chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from ...base.confidence_bounds import binomial_tail
from ...contract.samples import Sample
from ..sample_math import apart_s, prompt_tokens_until

FALL_SHOWN_S: Final = 2.0
"""The time that metrics may take to show a fall that took within_s: gauges are those of the last step that ended."""


def counter_moved(before: Sample, low: Sample, counter: str) -> int | str:
    """How far a counter moved in the fall."""
    first, last = getattr(before, counter), getattr(low, counter)
    return "not exposed" if first is None or last is None else last - first


def before_fall(samples: Sequence[Sample], fall: int) -> Sample:
    """Return the fullest sample before a fall: one of two lines, or of as long as a fall may take if they are
    closer.
    """
    first = max(0, fall - 2)
    while first > 0 and (apart_s(samples[first - 1], samples[fall]) or FALL_SHOWN_S) < FALL_SHOWN_S:
        first -= 1
    return max(samples[first:fall], key=lambda sample: sample.usage or 0)


def generations_passed(before: Sample, low: Sample) -> bool:
    """Return whether more requests ended in the fall than ran before it: they did not all run, or end, together."""
    finished = counter_moved(before, low, "finished")
    return isinstance(finished, int) and finished > (before.running or 0)


def is_new_work(samples: Sequence[Sample], before: Sample, fall: int, wave: int) -> bool:
    """Whether the wave is of new requests: the old ones are counted as finished, and hardly any other.

    Where that is not exposed: prompt tokens are counted meanwhile, which those of preempted requests are not.
    """
    running = before.running or 0
    finished = counter_moved(before, samples[fall], "finished")
    aborted = counter_moved(before, samples[fall], "aborted")
    if isinstance(aborted, int) and aborted >= running / 2:
        return False  # clients that gave up
    if isinstance(finished, int):
        return finished >= running / 2
    return prompt_tokens_until(samples[fall : wave + 6])[-1] > 0


def chance_within(count: int, share: float) -> float:
    """Return the chance that so many requests of independent lengths all end within this share of their duration.

    Any of them may be the first to end, and each other follows it within that time.
    """
    return float(count * share ** (count - 1))


def end_together_by_chance(samples: Sequence[Sample], before: Sample) -> float | None:
    """Return the chance that so many of the requests that ran at `before` end until the last sample, if each ends
    independently of the others. Return None where no count of finished requests is exposed.

    Any of them may be the first to end, and the others follow it within that time.
    """
    running, finished = before.running or 0, counter_moved(before, samples[-1], "finished")
    took_s, mean_s = apart_s(before, samples[-1]), mean_running_s(samples)
    if took_s is None or mean_s is None or not isinstance(finished, int):
        return None
    return running * binomial_tail(min(finished, running) - 1, running - 1, min(1.0, took_s / mean_s))


def mean_running_s(samples: Sequence[Sample]) -> float | None:
    """Return how long a request runs, by Little's law over the samples, or None where nothing is counted that ended."""
    ended = [counter_moved(samples[0], samples[-1], counter) for counter in ("finished", "aborted")]
    count = sum(number for number in ended if isinstance(number, int))
    if not isinstance(ended[0], int) or count <= 0:
        return None
    areas = ((one.running or 0) * (apart_s(one, two) or 0.0) for one, two in pairwise(samples))
    return math.fsum(areas) / count or None
