"""stuck.slots-exhausted: request or adapter slots ran out, not memory."""

from __future__ import annotations

from collections.abc import Iterator

from kvscope.monitor.detectors.detector import Detector
from kvscope.monitor.detectors.judgement import TextJudgement
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.detectors.written.lost_blocks import slots_leaked
from kvscope.monitor.detectors.written.written_view import WrittenView
from kvscope.monitor.ledger.engine_ledger import EngineLedger


class SlotsExhausted(Detector[TextJudgement]):
    """A count of requests that is used up."""

    code = "stuck.slots-exhausted"
    severity = "error"
    title = "Request or adapter slots ran out, not KV memory"
    requires = ("log", "report")
    position = 298

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[TextJudgement]:
        """Yield the slots that belong to no request."""
        if not ledger.has_stream:
            yield from slots_leaked(WrittenView(ledger, settings))
