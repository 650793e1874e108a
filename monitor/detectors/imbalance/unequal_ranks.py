"""imbalance.ranks: some ranks are full and queue while others have room."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvscope.monitor.detectors.detector import Detector
from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.sample_needs import SampleNeed
from kvscope.monitor.detectors.thresholds import Settings, Threshold
from kvscope.monitor.events.samples import Sample
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.text import counted, percent


class UnequalRanks(Detector[Judgement]):
    """Data-parallel ranks that are full beside ranks that are not."""

    code = "imbalance.ranks"
    severity = "warning"
    title = "Some ranks are full and queue while others have room"
    requires = ("metrics", "log")
    position = 450
    sample_need = SampleNeed(3, None, "one rank is full with a queue, and another has half of its pool free and none")

    min_samples = Threshold(
        3, "samples", "in a row: a burst is dealt out in one interval, and unequal lengths even out in the next"
    )
    full_usage = Threshold(0.95, "of the pool", "such a rank admits nothing while it has requests waiting")
    room_usage = Threshold(0.5, "of the pool", "with nothing waiting: it could have taken what queues elsewhere")

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield nothing: one rank by itself is not unequal."""
        return iter(())

    def detect_rank(
        self, ledger: EngineLedger, siblings: Sequence[EngineLedger], settings: Settings
    ) -> Iterator[Judgement]:
        """Yield one finding for the server, of its first full rank, if another has had room for some samples."""
        if not self._is_full(ledger, settings):
            return
        full = [other for other in siblings if self._is_full(other, settings)]
        idle = [other for other in siblings if self._has_room(other, settings)]
        if idle and not any(other.engine < ledger.engine for other in full):
            yield _unequal(self._last(ledger, settings), 1 + len(full), 1 + len(siblings), idle)

    def _last(self, ledger: EngineLedger, settings: Settings) -> list[Sample]:
        return list(ledger.samples)[-round(settings(self.min_samples)) :]

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


def _unequal(own: Sequence[Sample], full: int, ranks: int, idle: Sequence[EngineLedger]) -> Judgement:
    """Judge the samples `own` of the first of the full ranks."""
    last, roomy = own[-1], idle[0].samples[-1]
    return Judgement(
        code=UnequalRanks.code,
        engine=last.engine,
        verdict="likely",
        since_ns=own[0].at_ns or 0,
        position=own[0].position,
        evidence=(
            Evidence("full_ranks", full, "ranks", last.source, last.position),
            Evidence("ranks_with_room", len(idle), "ranks", last.source, roomy.position),
            Evidence("waiting", last.waiting or 0, "requests", last.source, last.position),
            Evidence("usage", round(100 * (last.usage or 0), 1), "%", last.source, last.position),
            Evidence("usage_of_a_rank_with_room", round(100 * (roomy.usage or 0), 1), "%", last.source, roomy.position),
        ),
        explanation=(
            f"{counted(full, 'rank')} of {ranks} are full with {last.waiting or 0:,} requests waiting here, and"
            f" {counted(len(idle), 'rank')} have room: {idle[0].engine} uses {percent(roomy.usage or 0)} and queues"
            " nothing. The load balancer does not see, or does not follow, the ranks' queues."
        ),
        do_now=("Compare the ranks: vllm:num_requests_waiting by engine.",),
        change=(
            "Balance by queue and KV usage instead of round robin, in a release whose front end receives the ranks'"
            " counts in time. Or give each rank its own endpoint behind a router that reads them.",
        ),
        wont_help=("A larger pool for all ranks: the same ranks fill up.",),
        missing="how requests are distributed: sticky sessions and prefix-aware routing do this on purpose",
    )
