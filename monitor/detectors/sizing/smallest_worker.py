"""sizing.smallest-worker: every worker has the pool of the smallest one."""

from __future__ import annotations

from collections.abc import Iterator

from kvscope.monitor.detectors.detector import Detector
from kvscope.monitor.detectors.judgement import TextJudgement
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.detectors.written.refusals import MUCH_LARGER, smallest_worker
from kvscope.monitor.detectors.written.written_view import WrittenView
from kvscope.monitor.ledger.engine_ledger import EngineLedger


class SmallestWorker(Detector[TextJudgement]):
    """Workers of which one has far less room than the others."""

    code = "sizing.smallest-worker"
    severity = "warning"
    title = "Every worker gets the pool size of the smallest one"
    requires = ("log", "report")
    position = 680

    min_ratio = MUCH_LARGER

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[TextJudgement]:
        """Yield the worker that decides for all."""
        if not ledger.has_stream:
            yield from smallest_worker(WrittenView(ledger, settings))
