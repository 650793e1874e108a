"""sizing.refused-start: the engine does not start, because the pool holds less than one request."""

from __future__ import annotations

from collections.abc import Iterator

from kvscope.monitor.detectors.detector import Detector
from kvscope.monitor.detectors.judgement import TextJudgement
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.detectors.written.refusals import refused_start
from kvscope.monitor.detectors.written.written_view import WrittenView
from kvscope.monitor.ledger.engine_ledger import EngineLedger


class RefusedStart(Detector[TextJudgement]):
    """An engine that ended at its start for want of KV memory."""

    code = "sizing.refused-start"
    severity = "error"
    title = "The engine refuses to start: the pool holds less than one request"
    requires = ("log", "report")
    position = 660

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[TextJudgement]:
        """Yield the refusal, with the engine's own numbers."""
        if not ledger.has_stream:
            yield from refused_start(WrittenView(ledger, settings))
