"""imbalance.ranks: some ranks are full and queue while others have room."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from kvscope.monitor.detectors.detector import Detector
from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.events.samples import Sample
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.text import counted, percent

SAMPLES_IN_A_ROW: Final = 3
"""In a row: a burst is dealt out in one interval, and unequal lengths even out in the next."""
FULL_RANK_USAGE: Final = 0.95
ROOM_AT_USAGE: Final = 0.5
"""Of the pool, and nothing waiting: such a rank could have taken what queues elsewhere."""


class UnequalRanks(Detector[Judgement]):
    """Data-parallel ranks that are full beside ranks that are not."""

    code = "imbalance.ranks"
    severity = "warning"
    title = "Some ranks are full and queue while others have room"
    requires = ("metrics", "log")
    position = 450

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield nothing: one rank by itself is not unequal."""
        return iter(())

    def detect_rank(
        self, ledger: EngineLedger, siblings: Sequence[EngineLedger], settings: Settings
    ) -> Iterator[Judgement]:
        """Yield one finding for the server, of its first full rank, if another has had room for some samples."""
        if not _is_full_rank(ledger):
            return
        idle = [other for other in siblings if _has_room(list(other.samples)[-SAMPLES_IN_A_ROW:])]
        if idle and not any(other.engine < ledger.engine and _is_full_rank(other) for other in siblings):
            yield _unequal(ledger, siblings, idle)


def _unequal(ledger: EngineLedger, siblings: Sequence[EngineLedger], idle: Sequence[EngineLedger]) -> Judgement:
    own = list(ledger.samples)[-SAMPLES_IN_A_ROW:]
    last, roomy = own[-1], idle[0].samples[-1]
    full = 1 + sum(_is_full_rank(other) for other in siblings)
    return Judgement(
        code=UnequalRanks.code,
        engine=ledger.engine,
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
            f"{counted(full, 'rank')} of {len(siblings) + 1} are full with {last.waiting or 0:,} requests"
            f" waiting here, and"
            f" {counted(len(idle), 'rank')} have room: {idle[0].engine} uses {percent(roomy.usage or 0)} and queues"
            " nothing. The balancer does not see, or does not follow, the ranks' queues."
        ),
        do_now=("Compare the ranks: vllm:num_requests_waiting by engine.",),
        change=(
            "Balance by queue and KV usage instead of by turns, in a release whose front end gets the ranks' counts in"
            " time; or give each rank its own endpoint behind a router that reads them.",
        ),
        wont_help=("A larger pool for all ranks: the full ones stay the same ones.",),
        missing="how requests are dealt out: sticky sessions and prefix-aware routing do the same on purpose",
    )


def _is_full(sample: Sample) -> bool:
    return bool(sample.waiting) and sample.usage is not None and sample.usage >= FULL_RANK_USAGE


def _is_full_rank(ledger: EngineLedger) -> bool:
    last = list(ledger.samples)[-SAMPLES_IN_A_ROW:]
    return len(last) == SAMPLES_IN_A_ROW and all(_is_full(sample) for sample in last)


def _has_room(samples: Sequence[Sample]) -> bool:
    return len(samples) == SAMPLES_IN_A_ROW and all(
        not sample.waiting and sample.usage is not None and sample.usage <= ROOM_AT_USAGE for sample in samples
    )
