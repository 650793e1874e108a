"""held.endless-output: an answer that does not end fills the pool."""

from __future__ import annotations

from collections.abc import Iterator

from kvscope.monitor.detectors.detector import Detector
from kvscope.monitor.detectors.judgement import TextJudgement
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.detectors.written.pool_pressure import endless_output
from kvscope.monitor.detectors.written.written_view import WrittenView
from kvscope.monitor.ledger.engine_ledger import EngineLedger


class EndlessOutput(Detector[TextJudgement]):
    """A model that goes on generating."""

    code = "held.endless-output"
    severity = "info"
    title = "An endless answer fills the pool"
    requires = ("log", "report")
    position = 730

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[TextJudgement]:
        """Yield the answer, if the report speaks of one."""
        if not ledger.has_stream:
            yield from endless_output(WrittenView(ledger, settings))
