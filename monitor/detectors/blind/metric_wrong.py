"""blind.metric-wrong: a metric or a log line contradicts itself."""

from __future__ import annotations

from collections.abc import Iterator

from kvscope.monitor.detectors.detector import Detector
from kvscope.monitor.detectors.judgement import TextJudgement
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.detectors.written.contradictions import ROUNDING, contradictions_of
from kvscope.monitor.detectors.written.written_view import WrittenView
from kvscope.monitor.ledger.engine_ledger import EngineLedger


class MetricWrong(Detector[TextJudgement]):
    """Numbers that cannot be right."""

    code = "blind.metric-wrong"
    severity = "info"
    title = "A metric or a log line contradicts itself"
    requires = ("log", "report")
    position = 835

    rounding = ROUNDING

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[TextJudgement]:
        """Yield the first contradiction."""
        if not ledger.has_stream:
            yield from contradictions_of(WrittenView(ledger, settings))
