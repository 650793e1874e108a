"""corrupt.counter-drift: the engine's own accounts disagree, or its events contradict each other otherwise."""

from __future__ import annotations

from kvscope.monitor.detectors.corrupt.anomalies import COUNTER_DRIFT, CorruptDetector
from kvscope.monitor.detectors.corrupt.conservation import Conservation
from kvscope.monitor.detectors.detector import Causes
from kvscope.monitor.detectors.judgement import Judgement
from kvscope.monitor.detectors.ties import hits_its_blocks


class CounterDrift(CorruptDetector):
    """The engine's own accounts disagree."""

    code = COUNTER_DRIFT
    severity = "critical"
    title = "The engine's own block counts disagree"
    requires = ("stream",)
    position = 520

    def causes(self) -> Causes[Judgement]:
        """Return what it may cause."""
        return Causes[Judgement]().of(Conservation, hits_its_blocks)
