"""corrupt.use-after-free: a block was handed out while it was held."""

from __future__ import annotations

from kvscope.monitor.detectors.corrupt.anomalies import USE_AFTER_FREE, CorruptDetector
from kvscope.monitor.detectors.corrupt.conservation import Conservation
from kvscope.monitor.detectors.detector import Causes
from kvscope.monitor.detectors.judgement import Judgement
from kvscope.monitor.detectors.ties import hits_its_blocks


class UseAfterFree(CorruptDetector):
    """A block was handed out while it was held."""

    code = USE_AFTER_FREE
    severity = "critical"
    title = "A block was handed out while a request held it"
    requires = ("stream",)
    position = 510

    def causes(self) -> Causes[Judgement]:
        """Return what it may cause."""
        return Causes[Judgement]().of(Conservation, hits_its_blocks)
