"""leak.deferred-free-stalled: blocks fenced behind a step that is over, and not freed."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.text import clock_time, counted, duration, percent
from ...contract.kinds import Holder
from ...ledger.engine_ledger import EngineLedger
from ...ledger.records import Deferral
from ..detector import Settings, StreamDetector, Threshold
from ..engine_pace import at_pace_s
from ..judgement import LIVE_REQUEST, Alternative, HoldsBlocks, began_later, seen
from ..thrash.preemption_cascade import PreemptionCascade
from .block_effects import ROOM_IS_GONE_FOR_GOOD
from .deferred_blocks import kept, overdue_deferrals, received_for_s


def _passed_ns(ledger: EngineLedger, deferral: Deferral) -> int:
    """Return when the cause of its wait was over, in monotonic ns, or 0 if it is not."""
    state, beat = ledger.state, ledger.state.heartbeat
    if deferral.fence_passed_ns:
        return deferral.fence_passed_ns
    if deferral.fence > state.last_step and (state.in_flight or (beat is not None and beat.step_in_flight >= 0)):
        return 0
    return deferral.since_ns  # its step was never launched, or its end was lost


class DeferredFreeStalled(StreamDetector[HoldsBlocks]):
    """Blocks behind a fence that was passed and not taken down.

    Sees: blocks that ended requests released, still fenced behind a step that has completed or was never launched.
    Confirmed when: the engine has had time for its next pass since, and no event is missing.
    Likely when: events were lost.
    Not when: the step has not ended: its blocks are rightly kept (stuck.engine-stalled).
    """

    code = "leak.deferred-free-stalled"
    severity = "error"
    title = "Freed blocks wait for a step that has completed"

    grace_s = Threshold(2, "s", "what a step was waited for comes back in the pass in which it is over, or the next")
    alternatives = (LIVE_REQUEST, Alternative("the step that the blocks wait for still runs", "that step is complete"))
    causes = ROOM_IS_GONE_FOR_GOOD.of(PreemptionCascade, began_later)

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[HoldsBlocks]:
        """Yield the fences that were passed and not taken down."""
        state = ledger.state
        passed = {
            deferral.request: since_ns
            for deferral in state.deferrals.values()
            if deferral.holder == Holder.FENCE and (since_ns := _passed_ns(ledger, deferral))
        }
        grace = at_pace_s(ledger, settings, self.grace_s)
        late, pending = overdue_deferrals(
            ledger,
            [state.deferrals[number] for number in passed],
            lambda d: (received_for_s(ledger, passed[d.request]), grace),
        )
        if not late:
            return
        held, at = kept(ledger, late), ledger.at
        first = min(late, key=lambda deferral: passed[deferral.request])
        since = ledger.wall(passed[first.request])
        over_at = at(first.fence_passed_at if first.fence_passed_ns else first.since_at)
        yield self.holding(
            ledger,
            pending=pending,
            since_ns=since,
            position=over_at,
            requests=held.ids,
            share_of_pool=round(held.share, 4),
            blocks=tuple(held.blocks),
            evidence=(
                seen("requests_held", len(held.deferrals), "requests", at(*held.kept_at)),
                seen("blocks_held", len(held.blocks), "blocks", at(*held.blocks_at)),
                seen("share_of_pool", round(held.share, 4), "of the pool", at(*held.blocks_at)),
                seen("fence_step", first.fence, "step", at(first.since_at)),
                seen("last_step", state.last_step, "step", at(state.places.completed)),
                seen("since_step_end_s", round(ledger.age_s(passed[first.request]), 1), "s", over_at),
            ),
            explanation=(
                f"{counted(len(held.blocks), 'block')} ({percent(held.share)} of the pool) that"
                f" {counted(len(held.deferrals), 'request')} released {'is' if len(held.blocks) == 1 else 'are'} still"
                f" fenced behind a step that might have written to them. The first of these steps, {first.fence},"
                f" completed at {clock_time(since)}, {duration(ledger.age_s(passed[first.request]))} ago, and the"
                " blocks are still not free."
            ),
            missing="the lost events" if state.damaged else "",
        )
