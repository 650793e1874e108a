"""The shared parts of the detectors of preemptions: the recent ones, their passes, the cost of a pass, and the counter.

Where metrics are all there is, the engine's own counter shows preemptions. vLLM's moves with the next token of a
preempted request, so that it shows fewer than there were. It decides from four samples at any interval up to a third of
the window.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import ClassVar, Final, NamedTuple

from ..base.text import counted, percent
from ..contract.kinds import Preempt
from ..contract.samples import Sample
from ..ledger.engine_ledger import EngineLedger, Point
from ..ledger.records import Preemption
from .advice import metrics_dialect, seen_by
from .detector import Detector, FromMetrics, SampleNeed, Settings, Threshold
from .judgement import Evidence, Judgement, seen
from .runbook_files import CaseOfAdvice
from .sample_math import FEWEST_SAMPLES, apart_s

RESET_REASON = int(Preempt.RESET)  # as a plain number: it is compared with thousands of reasons
LOST_EVENTS = "the lost events"


LEAST_FILLED: Final = Threshold(
    0.5, "of the pool", "a pool that would hold twice what it is filled with has room, and its size preempts no request"
)
"""A threshold of sizing.kv-too-small."""


def recent_preemptions(ledger: EngineLedger, settings: Settings, seconds: float) -> list[Preemption]:
    """Return the preemptions of the last `seconds` that were made for want of room, the first one first.

    An engine may preempt beside free blocks, or because its requests hold blocks that no token fills. Neither is want
    of room, whatever reason it reports.
    """
    since = ledger.now_ns - seconds * 1e9 - ledger.wall(1) + 1  # on the engine's monotonic clock, as they are
    made = list(ledger.preempted)
    first = bisect_left(made, since, key=lambda one: one.at_ns)
    passes = preemption_passes([one for one in made[first:] if one.reason != RESET_REASON])
    least = settings(LEAST_FILLED)
    return [one for together in passes if filled_share(ledger, together[0]) >= least for one in together]


def filled_share(ledger: EngineLedger, first: Preemption) -> float:
    """Return the share of the pool that was in use for tokens just before a pass preempted `first`.

    Each running request may have begun a block in each KV group. A group that keeps a window, or one state, needs fewer
    blocks than its tokens would fill: the share is then an upper bound.
    """
    state, groups = ledger.state, max(1, len(ledger.description.groups))
    needed = groups * (first.running_tokens / max(state.block_size, 1) + first.running)
    return (1 - first.free / max(state.usable, 1)) * min(1.0, needed / max(first.running_blocks, 1))


def preemption_passes(preempted: list[Preemption]) -> list[list[Preemption]]:
    """Group the preemptions by the scheduler's passes."""
    return [list(together) for _, together in groupby(preempted, key=lambda one: one.at_ns)]


def preempted_names(preempted: list[Preemption]) -> tuple[str, ...]:
    """Return the requests that were preempted, each once, in order."""
    return tuple(dict.fromkeys(one.id for one in preempted))


def point_at(ledger: EngineLedger, wall_ns: float) -> Point:
    """Return the first point of this epoch that is no earlier than `wall_ns`, or the last there is."""
    points = ledger.points
    return points[min(bisect_left(points, max(wall_ns, ledger.epoch), key=lambda point: point.at_ns), len(points) - 1)]


def freed_nothing(together: list[Preemption]) -> bool:
    """Return whether not one block was freed between the first and the last preemption of a pass."""
    return together[-1].released == together[0].released and sum(one.blocks for one in together[:-1]) > 0


def cost_of(ledger: EngineLedger, last: list[Preemption]) -> tuple[Evidence, ...]:
    """Return the evidence of what a pass preempted, and what that took."""
    first_at, last_at = ledger.at(last[0].at), ledger.at(last[-1].at)
    return (
        seen("preempted_in_one_pass", len(last), "requests", last_at),
        seen("running_before", last[0].running, "requests", first_at),
        seen("blocks_preempted", sum(one.blocks for one in last), "blocks", last_at),
        seen("tokens_lost", sum(one.tokens_lost for one in last), "tokens", last_at),
    )


COUNT_WINDOW_S: Final = Threshold(
    180, "s", "three scrapes of a Prometheus server at 60 s: a burst in one interval is over in the next"
)
MIN_COUNTED: Final = Threshold(
    10, "preemptions", "where only the counter is known: fewer are long requests met by chance"
)
COUNTED_NEED: Final = SampleNeed(
    FEWEST_SAMPLES + 1, COUNT_WINDOW_S, "the pool is full, and preemptions are counted in each third of the time"
)
FULL_AT: Final = Threshold(0.9, "of the pool", "a pool that preempts for want of blocks is full between preemptions")


class CountedPreemptions(NamedTuple):
    """The counters of the last window."""

    first: Sample
    last: Sample
    preemptions: int
    finished: int
    """Requests that ended meanwhile, in whatever way."""
    running: int
    """That run at the end: of long requests few end in a window, and each of these may have been preempted once."""
    highest_usage: float

    @property
    def per_request(self) -> float:
        """Preemptions for each request that ran."""
        return self.preemptions / max(self.finished + self.running, 1)

    def evidence(self) -> tuple[Evidence, ...]:
        """Return the counters as evidence."""
        source, span = self.last.source, f"{self.first.position} to {self.last.position}"
        return (
            Evidence("preemptions", self.preemptions, "preemptions", source, span),
            Evidence("finished", self.finished, "requests", source, span),
            Evidence("running", self.running, "requests", source, self.last.position),
            Evidence("preemptions_per_request", round(self.per_request, 2), "", source, span),
            Evidence("usage", round(100 * self.highest_usage, 1), "%", source, span),
            Evidence("waiting", self.last.waiting or 0, "requests", source, self.last.position),
        )

    def text(self) -> str:
        """Return the counts in a sentence."""
        return (
            f"The engine counted {self.preemptions:,} preemptions while {counted(self.finished, 'request')} ended and"
            f" {self.running:,} ran on ({self.per_request:.1f} for each), with usage up to"
            f" {percent(self.highest_usage)}."
        )


def counted_preemptions(ledger: EngineLedger, settings: Settings) -> CountedPreemptions | None:
    """Return the counts of the last window, or None where they are too few, not exposed, or in one burst."""
    if not ledger.samples or (ledger.samples[-1].preemptions or 0) < settings(MIN_COUNTED):
        return None
    window: list[Sample] = []
    for sample in reversed(ledger.samples):
        if sample.preemptions is None or sample.finished is None or sample.shown_usage is None or not sample.at_ns:
            break
        window.append(sample)
        if (apart_s(sample, window[0]) or 0) >= settings(COUNT_WINDOW_S):
            break
    window.reverse()
    if len(window) <= FEWEST_SAMPLES or (apart_s(window[0], window[-1]) or 0) < settings(COUNT_WINDOW_S):
        return None
    first, last = window[0], window[-1]
    moved = (last.preemptions or 0) - (first.preemptions or 0)
    parts = [(len(window) - 1) * n // FEWEST_SAMPLES for n in range(FEWEST_SAMPLES + 1)]
    in_each = [(window[to].preemptions or 0) - (window[at].preemptions or 0) for at, to in pairwise(parts)]
    if moved < settings(MIN_COUNTED) or not all(in_each):
        return None
    ended = (last.finished or 0) - (first.finished or 0) + (last.aborted or 0) - (first.aborted or 0)
    # SGLang retracts requests as well where another pool is full (stuck.slots-exhausted).
    highest = max(sample.shown_usage or 0.0 for sample in window)
    if highest < settings(FULL_AT):
        return None
    return CountedPreemptions(first, last, moved, ended, last.running or 0, highest)


class FromPreemptionCounter(FromMetrics, Detector[Judgement]):
    """Mixed into a code of preemptions: finds it by the engine's own counter."""

    min_per_request: ClassVar[Threshold]
    counted_means: ClassVar[str]
    unseen: ClassVar[str]

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the counts of the last window."""
        counts = counted_preemptions(ledger, settings)
        if counts is not None and counts.per_request >= settings(self.min_per_request):
            yield self.finding(
                ledger,
                since_ns=counts.first.at_ns or 0,
                position=counts.first.position,
                evidence=counts.evidence(),
                explanation=f"{counts.text()} {self.counted_means}",
                missing=f"{self.unseen}: {seen_by(ledger)}",
                **self.advice_of_count(ledger),
            )

    def advice_of_count(self, ledger: EngineLedger) -> CaseOfAdvice:
        """Return which advice of the runbook holds."""
        return {"case": "SGLang"} if metrics_dialect(ledger) == "sglang" else {}
