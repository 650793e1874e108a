"""blind.name-clash: several engine processes use one name."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.text import clock_time, counted
from ...ledger.engine_ledger import EngineLedger
from ..detector import Settings, StreamDetector
from ..judgement import Evidence, Judgement, seen


class NameClash(StreamDetector[Judgement]):
    """Engine processes under one name that are alive at once: one of them is shown, the others are not.

    Sees: heartbeats of several epochs under one name that keep coming.
    Confirmed when: always, since none of them replaced another.
    """

    code = "blind.name-clash"
    severity = "info"
    title = "Several engines share one name"
    outlasts_epoch = True

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the other epochs that are alive beside the current one."""
        since_ns, others = ledger.overlaps.other_epochs(ledger.now_ns)
        if not others:
            return
        position = str(ledger.last_received_at)
        yield self.finding(
            ledger,
            since_ns=since_ns,
            position=position,
            evidence=(
                seen("epoch_shown", str(ledger.epoch), "", position),
                *(Evidence("epoch_not_shown", str(epoch), "", "stream") for epoch in others[:3]),
            ),
            explanation=(
                f"{counted(len(others) + 1, 'engine process', 'engine processes')} send events under the name"
                f" {ledger.engine}: the one started {clock_time(ledger.epoch)} is shown, but"
                f" {', '.join(clock_time(epoch) for epoch in others[:3])} {'is' if len(others) == 1 else 'are'} not."
                " Heartbeats of both keep coming, so neither replaced the other."
            ),
        )
