"""blind.duplicate-source: two sources bring the same engine's events."""

from __future__ import annotations

from collections.abc import Iterator

from kvscope.monitor.detectors.detector import Detector
from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.text import counted


class DuplicateSource(Detector[Judgement]):
    """One engine whose every batch comes twice."""

    code = "blind.duplicate-source"
    severity = "info"
    title = "Two sources report the same engine"
    requires = ("stream",)
    position = 870

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield that recent heartbeats came more than once."""
        since_ns, repeats = ledger.overlaps.repeats(ledger.now_ns)
        if not repeats:
            return
        yield Judgement(
            code=self.code,
            engine=ledger.engine,
            verdict="confirmed",
            since_ns=since_ns,
            position=str(ledger.last_received_at),
            evidence=(Evidence("repeated_heartbeats", repeats, "heartbeats", "stream", str(ledger.last_received_at)),),
            explanation=(
                f"Events of {ledger.engine} come from two sources: {counted(repeats, 'heartbeat')} of the last"
                " seconds arrived twice. Each batch counts once, so the figures are right, but reading costs twice"
                " as much."
            ),
            do_now=("Compare the targets of the monitor: monitor doctor URL shows its sources.",),
            change=("Name each engine's event stream once among the targets.",),
        )
