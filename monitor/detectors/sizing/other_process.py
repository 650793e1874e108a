"""sizing.other-process: another process holds device memory that the engine counts on."""

from __future__ import annotations

from collections.abc import Iterator

from kvscope.monitor.detectors.detector import Detector
from kvscope.monitor.detectors.judgement import TextJudgement
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.detectors.written.refusals import MOST_ELSEWHERE, other_process
from kvscope.monitor.detectors.written.written_view import WrittenView
from kvscope.monitor.ledger.engine_ledger import EngineLedger


class OtherProcess(Detector[TextJudgement]):
    """A device that others fill."""

    code = "sizing.other-process"
    severity = "warning"
    title = "Another process holds device memory that the engine needs"
    requires = ("log", "report")
    position = 670

    max_elsewhere = MOST_ELSEWHERE

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[TextJudgement]:
        """Yield the device that is not the engine's alone."""
        if not ledger.has_stream:
            yield from other_process(WrittenView(ledger, settings))
