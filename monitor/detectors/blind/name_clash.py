"""blind.name-clash: several engine processes use one name."""

from __future__ import annotations

from collections.abc import Iterator

from kvscope.monitor.detectors.detector import Detector
from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.text import clock_time, counted


class NameClash(Detector[Judgement]):
    """Engine processes under one name that are alive at once: one of them is shown, the others are not."""

    code = "blind.name-clash"
    severity = "info"
    title = "Several engines share one name"
    requires = ("stream",)
    position = 860

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the other epochs that are alive beside the current one."""
        since_ns, others = ledger.overlaps.other_epochs(ledger.now_ns)
        if not others:
            return
        position = str(ledger.last_received_at)
        yield Judgement(
            code=self.code,
            engine=ledger.engine,
            verdict="confirmed",
            since_ns=since_ns,
            position=position,
            evidence=(
                Evidence("epoch_shown", str(ledger.epoch), "", "stream", position),
                *(Evidence("epoch_not_shown", str(epoch), "", "stream") for epoch in others[:3]),
            ),
            explanation=(
                f"{counted(len(others) + 1, 'engine process', 'engine processes')} send events under the name"
                f" {ledger.engine}: the one started {clock_time(ledger.epoch)} is shown, but"
                f" {', '.join(clock_time(epoch) for epoch in others[:3])} {'is' if len(others) == 1 else 'are'} not."
                " Heartbeats of both keep coming, so neither replaced the other."
            ),
            do_now=("Find the engines with that name: compare the process ids and ports of their event streams.",),
            change=("Give each engine its own name: KVSCOPE_ENGINE_ID=NAME@HOST:PORT/RANK.",),
            wont_help=("Restarting the monitor: the names stay the same.",),
        )
