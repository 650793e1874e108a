"""imbalance.ranks: some ranks are full and queue while others have room."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...base.text import counted, percent
from ...contract.samples import Sample
from ...ledger.engine_ledger import EngineLedger
from ..detector import Detector, SampleNeed, Settings, Threshold
from ..judgement import Evidence, Judgement


class UnequalRanks(Detector[Judgement]):
    """Data-parallel ranks that are full beside ranks that are not.

    Sees: a rank that is full with a queue while another has room and none, for several samples in a row.
    Likely when: always, since sticky sessions and prefix-aware routing do this on purpose.
    Not when: a burst is dealt out within one interval.
    """

    code = "imbalance.ranks"
    severity = "warning"
    title = "Some ranks are full and queue while others have room"
    requires = ("metrics", "log")
    sample_need = SampleNeed(3, None, "one rank is full with a queue, and another has half of its pool free and none")

    min_samples = Threshold(
        3, "samples", "in a row: a burst is dealt out in one interval, and unequal lengths even out in the next"
    )
    full_usage = Threshold(0.95, "of the pool", "such a rank admits nothing while it has requests waiting")
    room_usage = Threshold(0.5, "of the pool", "with nothing waiting: it could have taken what queues elsewhere")

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield one finding for the server, of its first full rank, if another has had room for some samples."""
        if not ledger.siblings or not self._is_full(ledger, settings):
            return
        full = [other for other in ledger.siblings if self._is_full(other, settings)]
        idle = [other for other in ledger.siblings if self._has_room(other, settings)]
        if idle and not any(other.engine < ledger.engine for other in full):
            yield self._unequal(ledger, self._last(ledger, settings), 1 + len(full), idle)

    def _last(self, ledger: EngineLedger, settings: Settings) -> Sequence[Sample]:
        return ledger.samples[-round(settings(self.min_samples)) :]

    def _is_full(self, ledger: EngineLedger, settings: Settings) -> bool:
        last, usage = self._last(ledger, settings), settings(self.full_usage)
        return len(last) >= settings(self.min_samples) and all(
            sample.waiting and sample.usage is not None and sample.usage >= usage for sample in last
        )

    def _has_room(self, ledger: EngineLedger, settings: Settings) -> bool:
        last, usage = self._last(ledger, settings), settings(self.room_usage)
        return len(last) >= settings(self.min_samples) and all(
            not sample.waiting and sample.usage is not None and sample.usage <= usage for sample in last
        )

    def _unequal(
        self, ledger: EngineLedger, own: Sequence[Sample], full: int, idle: Sequence[EngineLedger]
    ) -> Judgement:
        """Judge the samples `own` of the first of the full ranks."""
        last, roomy = own[-1], idle[0].samples[-1]
        return self.finding(
            ledger,
            since_ns=own[0].at_ns or 0,
            position=own[0].position,
            evidence=(
                Evidence("full_ranks", full, "ranks", last.source, last.position),
                Evidence("ranks_with_room", len(idle), "ranks", last.source, roomy.position),
                Evidence("waiting", last.waiting or 0, "requests", last.source, last.position),
                Evidence("usage", round(100 * (last.usage or 0), 1), "%", last.source, last.position),
                Evidence(
                    "usage_of_a_rank_with_room", round(100 * (roomy.usage or 0), 1), "%", last.source, roomy.position
                ),
            ),
            explanation=(
                f"{counted(full, 'rank')} of {1 + len(ledger.siblings)} are full with {last.waiting or 0:,} requests"
                f" waiting here, and {counted(len(idle), 'rank')} have room: {idle[0].engine} uses"
                f" {percent(roomy.usage or 0)} and queues nothing. The load balancer does not see, or does not follow,"
                " the ranks' queues."
            ),
            missing="how requests are distributed: sticky sessions and prefix-aware routing do this on purpose",
        )
