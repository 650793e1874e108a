"""corrupt.counter-drift: the engine's own accounts disagree, or its events contradict each other otherwise."""

from __future__ import annotations

from kvscope.monitor.detectors.corrupt.anomalies import COUNTER_DRIFT, CorruptDetector


class CounterDrift(CorruptDetector):
    """The engine's own accounts disagree."""

    code = COUNTER_DRIFT
    severity = "critical"
    title = "The engine's own accounts disagree"
    requires = ("stream",)
    position = 520
