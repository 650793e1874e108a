"""collapse.outer-hits: an outer tier stores KV and never hits."""

from __future__ import annotations

from collections.abc import Iterator

from kvscope.monitor.detectors.detector import Detector
from kvscope.monitor.detectors.judgement import TextJudgement
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.detectors.written.lost_blocks import outer_misses
from kvscope.monitor.detectors.written.written_view import WrittenView
from kvscope.monitor.ledger.engine_ledger import EngineLedger


class OuterHits(Detector[TextJudgement]):
    """A tier that only stores."""

    code = "collapse.outer-hits"
    severity = "warning"
    title = "An outer tier stores KV and never hits"
    requires = ("log", "report")
    position = 440

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[TextJudgement]:
        """Yield look-ups without a hit."""
        if not ledger.has_stream:
            yield from outer_misses(WrittenView(ledger, settings))
