"""collapse.preempt-all: usage falls from full to nothing as all that run are preempted in one pass."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.text import clock_time, counted, percent
from ...ledger.engine_ledger import EngineLedger
from ..detector import Causes, Settings, StreamDetector, Threshold
from ..judgement import Alternative, Judgement, hits_mostly_its_requests, seen
from ..preemptions import LOST_EVENTS, cost_of, freed_nothing, preempted_names, preemption_passes, recent_preemptions
from ..sizing.kv_too_small import KvTooSmall


class PreemptAll(StreamDetector[Judgement]):
    """Passes that preempted all running requests.

    Sees: one pass that preempted nearly all running requests, and freed their blocks.
    Confirmed when: no event is missing.
    Likely when: events were lost.
    Not when: no block became free by it (thrash.cascade); the requests finished (collapse.lockstep); one request lacked
    as many blocks; a reset of the prefix cache preempted them.
    """

    code = "collapse.preempt-all"
    severity = "error"
    title = "All running requests are preempted at once"
    lab_only = True
    recurs = True

    min_requests = Threshold(4, "requests", "of two or three, a prompt that needs many blocks may well preempt all")
    min_share = Threshold(
        0.9,
        "of the running",
        "a request short of a block preempts one other, or as many as have the blocks that it needs",
    )
    remember_s = Threshold(120, "s", "waves that are minutes apart belong to the same incident")
    alternatives = (Alternative("one large prompt", "the share of the running that lost their blocks"),)
    causes = Causes[Judgement]().of(KvTooSmall, hits_mostly_its_requests)

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the recent passes in which hardly any request was left running."""
        fewest, share = settings(self.min_requests), settings(self.min_share)
        found = [
            one
            for one in preemption_passes(recent_preemptions(ledger, settings, settings(self.remember_s)))
            if len(one) >= max(fewest, share * one[0].running)
            and not freed_nothing(one)
            and sum(each.blocks for each in one[:-1]) >= one[0].wanted
        ]
        if not found:
            return
        last = found[-1]
        usable = max(1, ledger.state.total - ledger.state.reserved)
        blocks, lost = sum(one.blocks for one in last), sum(one.tokens_lost for one in last)
        yield self.finding(
            ledger,
            since_ns=ledger.wall(found[0][0].at_ns),
            position=ledger.at(found[0][0].at),
            requests=preempted_names([one for together in found for one in together]),
            evidence=(
                *cost_of(ledger, last),
                seen("usage_before", round(100 * (1 - last[0].free / usable), 1), "%", ledger.at(last[0].at)),
                seen("collapses_seen", len(found), "times", ledger.at(last[-1].at)),
            ),
            explanation=(
                f"At {clock_time(ledger.wall(last[0].at_ns))} one pass of the scheduler preempted {len(last)} of"
                f" {last[0].running} running requests, although one would have made room: usage fell from"
                f" {percent(1 - last[0].free / usable)} by {counted(blocks, 'block')} freed by preemption instead of"
                f" completion, and {counted(lost, 'token')} will be recomputed. Seen {counted(len(found), 'time')}."
            ),
            missing=LOST_EVENTS if ledger.state.damaged else "",
        )
