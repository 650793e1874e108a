"""thrash.cascade: one pass preempts many, though nothing becomes free by it."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.text import clock_time, counted
from ...ledger.engine_ledger import EngineLedger
from ..detector import Causes, Settings, StreamDetector, Threshold
from ..judgement import Alternative, Judgement, hits_mostly_its_requests, seen
from ..preemptions import LOST_EVENTS, cost_of, freed_nothing, preempted_names, preemption_passes, recent_preemptions
from ..sizing.kv_too_small import KvTooSmall


class PreemptionCascade(StreamDetector[Judgement]):
    """Passes that preempted many requests and freed no block.

    Sees: several preemptions in one pass, and not one block freed between the first and the last.
    Confirmed when: no event is missing.
    Likely when: events were lost.
    Not when: preemptions freed room (thrash.preemption).
    """

    code = "thrash.cascade"
    severity = "warning"
    title = "One pass preempts many requests without freeing a block"
    recurs = True

    min_requests = Threshold(
        3, "requests", "of two, only the first can be seen to have given nothing back, which may be a chance"
    )
    remember_s = Threshold(120, "s", "a full pool fills up repeatedly, and each time belongs to the same incident")
    alternatives = (Alternative("preemptions that freed room", "the free blocks before and after each"),)
    causes = Causes[Judgement]().of(KvTooSmall, hits_mostly_its_requests)

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the passes that preempted many requests and freed no block."""
        if not ledger.preempted:
            return
        recent = recent_preemptions(ledger, settings, settings(self.remember_s))
        fewest = settings(self.min_requests)
        found = [one for one in preemption_passes(recent) if len(one) >= fewest and freed_nothing(one)]
        if not found:
            return
        last = found[-1]
        blocks, lost = sum(one.blocks for one in last), sum(one.tokens_lost for one in last)
        yield self.finding(
            ledger,
            since_ns=ledger.wall(found[0][0].at_ns),
            position=ledger.at(found[0][0].at),
            requests=preempted_names([one for together in found for one in together]),
            evidence=(
                *cost_of(ledger, last),
                seen(
                    "blocks_freed_during_pass", last[-1].released - last[0].released, "blocks", ledger.at(last[-1].at)
                ),
                seen("cascades_seen", len(found), "times", ledger.at(last[-1].at)),
            ),
            explanation=(
                f"At {clock_time(ledger.wall(last[0].at_ns))} one pass of the scheduler preempted"
                f" {counted(len(last), 'request')} of the {last[0].running} running, but not one block became free: the"
                f" {counted(blocks, 'block')} that they released wait for a step in flight that may still write to"
                f" them, so each preemption led to the next. {counted(lost, 'token')} will be recomputed. Seen"
                f" {counted(len(found), 'time')}."
            ),
            missing=LOST_EVENTS if ledger.state.damaged else "",
        )
