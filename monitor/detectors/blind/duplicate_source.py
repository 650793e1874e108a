"""blind.duplicate-source: two sources bring the same engine's events."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.text import counted
from ...ledger.engine_ledger import EngineLedger
from ..detector import Settings, StreamDetector
from ..judgement import Judgement, seen


class DuplicateSource(StreamDetector[Judgement]):
    """One engine whose every batch comes twice.

    Sees: heartbeats of one epoch that were received more than once in the last seconds.
    Confirmed when: always, since each batch is numbered.
    """

    code = "blind.duplicate-source"
    severity = "info"
    title = "Two sources report the same engine"
    outlasts_epoch = True

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield that recent heartbeats came more than once."""
        since_ns, repeats = ledger.overlaps.repeats(ledger.now_ns)
        if not repeats:
            return
        yield self.finding(
            ledger,
            since_ns=since_ns,
            position=str(ledger.last_received_at),
            evidence=(seen("repeated_heartbeats", repeats, "heartbeats", str(ledger.last_received_at)),),
            explanation=(
                f"Events of {ledger.engine} come from two sources: {counted(repeats, 'heartbeat')} of the last seconds"
                " arrived twice. Each batch counts once, so the figures are right, but reading costs twice as much."
            ),
        )
