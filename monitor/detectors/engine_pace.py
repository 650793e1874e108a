"""Times in the engine's own pace: what takes seconds at 20 ms a step takes minutes at 30 s a step."""

from __future__ import annotations

from typing import Final

from kvscope.monitor.detectors.thresholds import Settings, Threshold
from kvscope.monitor.ledger.engine_ledger import EngineLedger

MIN_STEPS: Final = Threshold(
    3, "steps", "a step may be full, and the one after it: a request left out of three has been left out"
)
"""Of stuck.zero-token, and of the others that wait for a step."""


def mean_step_s(ledger: EngineLedger) -> float:
    """Return how long the steps of this epoch took on average; 0 before the first."""
    totals = ledger.state.totals
    return totals.step_ns / totals.steps / 1e9 if totals.steps else 0.0


def at_pace_s(ledger: EngineLedger, settings: Settings, grace: Threshold, steps: Threshold = MIN_STEPS) -> float:
    """Return the pending period: `grace` in seconds, and at least so many steps."""
    return max(settings(grace), settings(steps) * mean_step_s(ledger))
