"""held.not-memory: the pool has room, or it is the host's memory that grows, so something else limits."""

from __future__ import annotations

from collections.abc import Iterator

from kvscope.monitor.detectors.detector import Detector
from kvscope.monitor.detectors.judgement import TextJudgement
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.detectors.written.pool_pressure import NEARLY_EMPTY, STANDING_USAGE, nearly_empty_pool
from kvscope.monitor.detectors.written.written_view import WrittenView
from kvscope.monitor.ledger.engine_ledger import EngineLedger


class NotMemory(Detector[TextJudgement]):
    """A pool with room, and a complaint."""

    code = "held.not-memory"
    severity = "info"
    title = "The pool has room: the limit is not KV memory"
    requires = ("log", "report")
    position = 740

    max_usage = NEARLY_EMPTY
    max_standing_usage = STANDING_USAGE

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[TextJudgement]:
        """Yield the room that the pool has."""
        if not ledger.has_stream:
            yield from nearly_empty_pool(WrittenView(ledger, settings))
