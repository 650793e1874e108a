"""corrupt.use-after-free: a block was handed out while it was held."""

from __future__ import annotations

from kvscope.monitor.detectors.corrupt.anomalies import USE_AFTER_FREE, CorruptDetector


class UseAfterFree(CorruptDetector):
    """A block was handed out while it was held."""

    code = USE_AFTER_FREE
    severity = "critical"
    title = "A block was handed out while it was held"
    requires = ("stream",)
    position = 510
