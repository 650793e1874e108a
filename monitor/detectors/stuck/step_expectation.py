"""How long a step in flight may take before it counts as stopped."""

from __future__ import annotations

from typing import Final, NamedTuple

from kvscope.monitor.detectors.thresholds import Settings, Threshold
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.state.records import StepInFlight

JITTER_SIGMAS: Final = 3
"""Steps of one kind differ; of Gaussian ones, 1 in 700 is slower than this many standard deviations."""


class StepAllowance(NamedTuple):
    """How long a step may take, in seconds, and by what: `expected_s` is 0 where no step like it was seen."""

    allowed_s: float
    expected_s: float
    unseen: str
    """Why the engine's own steps do not show how long this one takes; empty if they do."""
    longest_s: float
    """The longest step of the epoch seen so far."""


class StepLimits(NamedTuple):
    """The thresholds of stuck.engine-stalled that concern steps."""

    grace: Threshold
    slower_than_expected: Threshold
    early_steps: Threshold
    unseen_step: Threshold
    longest_times: Threshold


def step_allowance(ledger: EngineLedger, settings: Settings, limits: StepLimits, step: StepInFlight) -> StepAllowance:
    """Return how long `step` may take, by the steps of this epoch that computed something alike."""
    times, model = ledger.step_times, ledger.step_model()
    work = times.work_of(step.step)
    if work is None and not step.tokens and not ledger.state.damaged:
        work = times.last_work  # a larger step would have been handed over before it runs
    unseen = ""
    if model is None or times.count < settings(limits.early_steps):
        unseen = f"it is among the first {settings(limits.early_steps):.0f} steps received, which may compile kernels"
    elif work is None:
        unseen = "its launch was not received"
    elif not model.has_seen_like(work):
        unseen = "no step seen so far computed as much"
    if unseen or model is None or work is None:
        allowed = max(settings(limits.unseen_step), settings(limits.longest_times) * times.longest_s)
        return StepAllowance(allowed, 0.0, unseen, times.longest_s)
    expected = model.expected_s(work)
    slow = settings(limits.slower_than_expected) * (1 + JITTER_SIGMAS * model.jitter)
    return StepAllowance(max(settings(limits.grace), slow * expected), expected, "", times.longest_s)
