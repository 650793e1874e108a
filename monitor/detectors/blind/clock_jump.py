"""blind.clock-jump: the engine's wall clock moved by itself."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.text import clock_time, counted, duration
from ...ledger.engine_ledger import EngineLedger
from ..detector import Settings, StreamDetector, Threshold
from ..judgement import Judgement, seen


class ClockJumped(StreamDetector[Judgement]):
    """Wall clocks that were set forward or back while the engine ran.

    Sees: wall time that moved against the engine's monotonic clock in the last minutes.
    Confirmed when: always, since both clocks are in each batch.
    """

    code = "blind.clock-jump"
    severity = "info"
    title = "The engine's wall clock jumped"
    outlasts_epoch = True

    remember_s = Threshold(600, "s", "times of the last minutes are compared with those of other systems")

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the jumps of the recent past, as one judgement."""
        remember_ns = settings(self.remember_s) * 1e9
        jumps = [jump for jump in ledger.clock.jumps if ledger.now_ns - jump.at_ns < remember_ns]
        if not jumps:
            return
        last = jumps[-1]
        position = f"{last.epoch}/{last.sequence}/0"
        ahead = "forward" if last.by_ns > 0 else "back"
        yield self.finding(
            ledger,
            since_ns=jumps[0].at_ns,
            position=position,
            evidence=(
                seen("clock_jump_s", round(last.by_ns / 1e9, 3), "s", position),
                seen("clock_jumps", len(jumps), "jumps", position),
            ),
            explanation=(
                f"The wall clock of the engine's machine jumped {ahead} by {duration(abs(last.by_ns) / 1e9)} at"
                f" {clock_time(last.at_ns)} ({counted(len(jumps), 'jump')} in all). Its monotonic clock was not"
                " affected, so ages, rates and pending periods are right. Times shown here continue from before the"
                " jump and differ by it from the engine's log."
            ),
        )
