"""stuck.outer-tier: the engine waits for memory of an outer tier."""

from __future__ import annotations

from collections.abc import Iterator

from kvscope.monitor.detectors.detector import Detector
from kvscope.monitor.detectors.judgement import TextJudgement
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.detectors.written.lost_blocks import outer_tier_full
from kvscope.monitor.detectors.written.written_view import WrittenView
from kvscope.monitor.ledger.engine_ledger import EngineLedger


class OuterTier(Detector[TextJudgement]):
    """An outer tier whose buffer is full."""

    code = "stuck.outer-tier"
    severity = "error"
    title = "The engine waits for memory in an outer tier"
    requires = ("log", "report")
    position = 299

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[TextJudgement]:
        """Yield the tier's failed allocations."""
        if not ledger.has_stream:
            yield from outer_tier_full(WrittenView(ledger, settings))
