"""corrupt.double-free: a block was freed that was not held."""

from __future__ import annotations

from kvscope.monitor.detectors.corrupt.anomalies import DOUBLE_FREE, CorruptDetector
from kvscope.monitor.detectors.corrupt.conservation import Conservation
from kvscope.monitor.detectors.corrupt.counter_drift import CounterDrift
from kvscope.monitor.detectors.corrupt.use_after_free import UseAfterFree
from kvscope.monitor.detectors.detector import Causes
from kvscope.monitor.detectors.judgement import Judgement
from kvscope.monitor.detectors.leak.unaccounted import Unaccounted
from kvscope.monitor.detectors.ties import began_later, hits_its_blocks


class DoubleFree(CorruptDetector):
    """A block was freed that was not held."""

    code = DOUBLE_FREE
    severity = "critical"
    title = "A block was freed that no request held"
    requires = ("stream",)
    position = 500

    def causes(self) -> Causes[Judgement]:
        """Return what it may cause."""
        return (
            Causes[Judgement]()
            .of(UseAfterFree, hits_its_blocks)
            .of(Unaccounted, hits_its_blocks)
            .of(CounterDrift, began_later)
            .of(Conservation, hits_its_blocks)
        )
