"""corrupt.stale-remote-read: blocks were read from another engine after their lease had ended."""

from __future__ import annotations

from collections.abc import Iterator

from kvscope.monitor.detectors.detector import Detector
from kvscope.monitor.detectors.judgement import TextJudgement
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.detectors.written.lost_blocks import stale_reads
from kvscope.monitor.detectors.written.written_view import WrittenView
from kvscope.monitor.ledger.engine_ledger import EngineLedger


class StaleRemoteRead(Detector[TextJudgement]):
    """A read of blocks that may be another request's by then."""

    code = "corrupt.stale-remote-read"
    severity = "critical"
    title = "Another engine read blocks after their lease had ended"
    requires = ("log", "report")
    position = 530

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[TextJudgement]:
        """Yield the reads that came too late."""
        if not ledger.has_stream:
            yield from stale_reads(WrittenView(ledger, settings))
