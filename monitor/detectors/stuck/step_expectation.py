"""How long a step in flight may take before it counts as stopped."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from kvscope.monitor.detectors.thresholds import Settings, Threshold
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.state.records import StepInFlight

JITTER_SIGMAS: Final = 3.4
"""Steps of one kind differ. The logarithm of 1 step in 3,000 lies this many standard deviations above the mean, and a
step must be `slower_than_expected` times as slow as that one.
"""
MODEL_SIGMAS: Final = 3
"""Standard errors of the model's expectation that are allowed beside it."""


NO_STEP_YET: Final = "no step of this epoch has completed, and the first may load, compile or capture"
NONE_RECEIVED: Final = "no step has completed since its events are received"
"""The reason for a reader that attached to an engine that had made steps: it has compiled before."""


class StepAllowance(NamedTuple):
    """How long a step may take, in seconds, and by what: `expected_s` is 0 where no step like it was seen."""

    allowed_s: float
    expected_s: float
    unseen: str
    """Why the engine's own steps do not show how long this one takes, or empty if they do."""
    longest_s: float
    """The longest step of the epoch seen so far."""
    information_s: float = 0.0
    """A stall that is younger than this is information: most engines that look like it compile."""


class StepLimits(NamedTuple):
    """The thresholds of stuck.engine-stalled that concern steps."""

    grace: Threshold
    slower_than_expected: Threshold
    early_steps: Threshold
    first_of_epoch: Threshold
    unseen_step: Threshold
    longest_times: Threshold
    most_growth: Threshold


def step_allowance(ledger: EngineLedger, settings: Settings, limits: StepLimits, step: StepInFlight) -> StepAllowance:
    """Return how long `step` may take, by the steps of this epoch that computed something alike."""
    times, model = ledger.step_times, ledger.step_model()
    work = times.work_of(step.step)
    if work is None and not step.tokens and not ledger.state.damaged:
        work = times.last_work  # a larger step would have been handed over before it runs
    if not times.count:
        first = ledger.state.last_step < 0
        information_s = settings(limits.first_of_epoch) if first else 0.0
        unseen = NO_STEP_YET if first else NONE_RECEIVED
        return StepAllowance(settings(limits.unseen_step), 0.0, unseen, 0.0, information_s)
    unseen = ""
    if model is None or times.count < settings(limits.early_steps):
        unseen = f"it is among the first {settings(limits.early_steps):.0f} steps received, which may compile kernels"
    elif work is None:
        unseen = "its launch event was not received"
    elif not model.has_seen_like(work):
        unseen = "no step seen so far computed as much"
    if unseen or work is None or model is None:
        larger = work is not None and model is not None and not model.has_seen_like(work)
        growth = min(model.growth(work), settings(limits.most_growth)) if larger and model and work else 1.0
        longest = settings(limits.longest_times) * growth * times.longest_s
        return StepAllowance(max(settings(limits.unseen_step), longest), 0.0, unseen, times.longest_s)
    expected = model.expected_s(work)
    slow = settings(limits.slower_than_expected) * math.exp(JITTER_SIGMAS * model.jitter)
    allowed = slow * expected + MODEL_SIGMAS * model.uncertainty_s(work)
    return StepAllowance(max(settings(limits.grace), allowed), expected, "", times.longest_s)
