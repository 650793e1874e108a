"""leak.deferred-free-stalled: blocks fenced behind a step that is over, and not freed.

While the step itself does not end, its blocks are rightly kept: that is stuck.engine-stalled.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvscope.monitor.detectors.detector import Causes, Detector
from kvscope.monitor.detectors.engine_pace import at_pace_s
from kvscope.monitor.detectors.judgement import Evidence, HoldsBlocks
from kvscope.monitor.detectors.leak.block_effects import ROOM_IS_GONE_FOR_GOOD
from kvscope.monitor.detectors.leak.deferred_blocks import kept, overdue_deferrals, received_for_s
from kvscope.monitor.detectors.thrash.preemption_cascade import PreemptionCascade
from kvscope.monitor.detectors.thresholds import Settings, Threshold
from kvscope.monitor.detectors.ties import began_later
from kvscope.monitor.events.kinds import Holder
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.state.records import Deferral
from kvscope.monitor.text import clock_time, counted, duration, percent


def _passed_ns(ledger: EngineLedger, deferral: Deferral) -> int:
    """Return when the cause of its wait was over, in monotonic ns, or 0 if it is not."""
    state, beat = ledger.state, ledger.state.heartbeat
    if deferral.fence_passed_ns:
        return deferral.fence_passed_ns
    if deferral.fence > state.last_step and (state.in_flight or (beat is not None and beat.step_in_flight >= 0)):
        return 0
    return deferral.since_ns  # its step was never launched, or its end was lost


class DeferredFreeStalled(Detector[HoldsBlocks]):
    """Blocks behind a fence that was passed and not taken down."""

    code = "leak.deferred-free-stalled"
    severity = "error"
    title = "Freed blocks wait for a step that has completed"
    requires = ("stream",)
    position = 140

    grace_s = Threshold(2, "s", "what a step was waited for comes back in the pass in which it is over, or the next")

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[HoldsBlocks]:
        """Yield the fences that were passed and not taken down."""
        if ledger.has_stream:
            yield from self._from_stream(ledger, settings)

    def causes(self) -> Causes[HoldsBlocks]:
        """Return what it may cause."""
        return ROOM_IS_GONE_FOR_GOOD.of(PreemptionCascade, began_later)

    def _from_stream(self, ledger: EngineLedger, settings: Settings) -> Iterator[HoldsBlocks]:
        """Fences that were passed and not taken down."""
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
        yield HoldsBlocks(
            code=self.code,
            engine=ledger.engine,
            verdict="likely" if state.damaged else "confirmed",
            pending=pending,
            since_ns=since,
            position=over_at,
            requests=held.ids,
            share_of_pool=round(held.share, 4),
            blocks=tuple(held.blocks),
            evidence=(
                Evidence("requests_held", len(held.deferrals), "requests", position=at(*held.kept_at)),
                Evidence("blocks_held", len(held.blocks), "blocks", position=at(*held.blocks_at)),
                Evidence("share_of_pool", round(held.share, 4), "of the pool", position=at(*held.blocks_at)),
                Evidence("fence_step", first.fence, "step", position=at(first.since_at)),
                Evidence("last_step", state.last_step, "step", position=at(state.places.completed)),
                Evidence("since_step_end_s", round(ledger.age_s(passed[first.request]), 1), "s", position=over_at),
            ),
            explanation=(
                f"{counted(len(held.blocks), 'block')} ({percent(held.share)} of the pool) that"
                f" {counted(len(held.deferrals), 'request')} released {'is' if len(held.blocks) == 1 else 'are'}"
                " still fenced behind a step that might have written to them. The first of these steps,"
                f" {first.fence}, completed at {clock_time(since)}, {duration(ledger.age_s(passed[first.request]))}"
                " ago, and the blocks are still not free."
            ),
            do_now=("Drain this engine before the pool is full, then restart it: only a restart frees the blocks.",),
            change=(
                "Disable asynchronous scheduling, so that nothing is fenced (vLLM and kvscope's engine:"
                " --no-async-scheduling). This costs some throughput.",
                "The engine missed the end of a step. This is an engine bug: report it with the step's number, and"
                " upgrade (vLLM has fenced frees since 0.24, with a connector that consumes KV).",
            ),
            wont_help=(
                "Lowering the load or max_num_seqs: no live request holds these blocks.",
                "Waiting: the step that they wait for has completed.",
                "Resetting the prefix cache: it fails while these blocks are referenced.",
            ),
            missing="the lost events" if state.damaged else "",
        )
