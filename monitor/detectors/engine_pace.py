"""Times in the engine's own pace: what takes seconds at 20 ms a step takes minutes at 30 s a step."""

from __future__ import annotations

from typing import Final

from kvscope.monitor.detectors.thresholds import Settings, Threshold
from kvscope.monitor.ledger.engine_ledger import EngineLedger

MIN_STEPS: Final = Threshold(
    3, "steps", "a step may be full, and the one after it: a request left out of three has been left out"
)
"""Shared by stuck.zero-token and the other codes that wait for a step."""


def mean_step_s(ledger: EngineLedger) -> float:
    """Return how long the steps of this epoch took on average, or 0 before the first."""
    totals = ledger.state.totals
    return totals.step_ns / totals.steps / 1e9 if totals.steps else 0.0


def at_pace_s(ledger: EngineLedger, settings: Settings, grace: Threshold, steps: Threshold = MIN_STEPS) -> float:
    """Return the pending period: `grace` in seconds, or the engine's own pace if that is longer."""
    return max(settings(grace), pace_s(ledger, settings, steps))


def pace_s(ledger: EngineLedger, settings: Settings, steps: Threshold = MIN_STEPS) -> float:
    """Return the seconds of so many steps, and at least of the longest step of this epoch or the one in flight."""
    since_ns = min((step.since_ns for step in ledger.state.in_flight.values()), default=0)
    in_flight_s = ledger.age_s(max(since_ns, ledger.step_times.completed_ns)) if since_ns else 0.0
    longest_s = max(ledger.step_times.longest_s, in_flight_s)
    return max(settings(steps) * mean_step_s(ledger), longest_s)
