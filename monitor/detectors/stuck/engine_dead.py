"""stuck.engine-dead: the engine's process is gone while the front end answers."""

from __future__ import annotations

from collections.abc import Iterator

from kvscope.monitor.detectors.detector import Detector
from kvscope.monitor.detectors.judgement import TextJudgement
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.detectors.written.standstill import engine_dead
from kvscope.monitor.detectors.written.written_view import WrittenView
from kvscope.monitor.ledger.engine_ledger import EngineLedger


class EngineProcessDead(Detector[TextJudgement]):
    """A front end without an engine."""

    code = "stuck.engine-dead"
    severity = "critical"
    title = "The engine process is gone while the front end still responds"
    requires = ("log", "report")
    position = 299

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[TextJudgement]:
        """Yield the engine's end."""
        if not ledger.has_stream:
            yield from engine_dead(WrittenView(ledger, settings))
