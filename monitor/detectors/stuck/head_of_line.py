"""stuck.head-of-line: the head of the queue waits for blocks, and the room meanwhile would do for those behind it.

From metrics, by a queue that stands still beside a pool with room.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvscope.monitor.detectors.detector import Detector
from kvscope.monitor.detectors.engine_pace import at_pace_s
from kvscope.monitor.detectors.judgement import Evidence, ShortOfBlocks
from kvscope.monitor.detectors.stuck.queue_room import blocks_to_run, head_short_of_blocks
from kvscope.monitor.detectors.stuck.unadmitted_queue import (
    HEAD_OF_LINE_NEED,
    MIN_ROOM,
    UNADMITTED_S,
    head_of_line_by_samples,
)
from kvscope.monitor.detectors.stuck.waiting_requests import (
    is_outside,
    missing_after_loss,
    stream_verdict,
    was_left_out,
)
from kvscope.monitor.detectors.thresholds import Settings, Threshold
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.ledger.living_requests import Living
from kvscope.monitor.state.records import RequestState
from kvscope.monitor.text import counted, duration, percent

HEAD_OF_LINE_WONT_HELP: Final = (
    "A higher --max-num-seqs or --max-num-batched-tokens: the request lacks blocks, not a batch slot.",
    "Restarting: the same requests queue in the same order.",
)


class HeadOfLine(Detector[ShortOfBlocks]):
    """One request that needs many blocks holds back others that would fit."""

    code = "stuck.head-of-line"
    severity = "warning"
    title = "A large request at the head of the queue holds back others that would fit"
    requires = ("stream", "metrics")
    position = 210
    sample_need = HEAD_OF_LINE_NEED

    grace_s = Threshold(
        120,
        "s",
        "first come first served is the rule, and a large request waits for others to end; not for minutes",
    )
    idle_grace_s = Threshold(
        30,
        "s",
        "with nothing running no step frees a block: it waits for a transfer, as stuck.remote-load does for so long",
    )
    min_steps = Threshold(50, "steps", "so many times others may end and give the head their blocks, at any pace")
    min_free = Threshold(0.1, "of the pool", "less room is no loss to those that wait")
    unadmitted_s = UNADMITTED_S
    min_room = MIN_ROOM

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[ShortOfBlocks]:
        """Yield the head of the queue if those that hold the pool keep it waiting."""
        if not ledger.has_stream and ledger.samples and ledger.samples[-1].source != "log":
            steps, wont_help = settings(self.min_steps), HEAD_OF_LINE_WONT_HELP
            found = head_of_line_by_samples(ledger, self.code, steps, settings, wont_help)
            yield from () if found is None else (found,)
        if ledger.has_stream and (head := head_short_of_blocks(ledger)) is not None:
            yield from self._judge_head(ledger, settings, ledger.living(), head)

    def _judge_head(
        self, ledger: EngineLedger, settings: Settings, living: Living, head: RequestState
    ) -> Iterator[ShortOfBlocks]:
        """The head waits for others to give blocks back. In the room that it leaves unused, those behind could run."""
        state, at = ledger.state, ledger.at
        age = (ledger.looked_ns - head.since_ns) / 1e9
        grace = (
            at_pace_s(ledger, settings, self.grace_s, self.min_steps)
            if living.running
            else at_pace_s(ledger, settings, self.idle_grace_s)
        )
        usable = state.total - state.reserved
        if age < grace / 2 or state.free < settings(self.min_free) * usable:
            return
        behind = [r for r in living.waiting if r is not head and not is_outside(r) and not was_left_out(r, head)]
        certain = state.is_certain_request
        counted_right = not state.damaged or ledger.used_by_engine == state.used
        known = counted_right and certain(head) and (ledger.looked_ns - state.lost_ns) / 1e9 >= grace
        behind = [record for record in behind if certain(record)] if known else behind
        fitting = [record for record in behind if 0 < blocks_to_run(ledger, record) - len(record.blocks) <= state.free]
        if not fitting:
            return
        own = max(head.blocks_to_admit, -(-(head.prompt_tokens + head.output_tokens) // max(1, state.block_size)))
        yield ShortOfBlocks(
            code=self.code,
            engine=ledger.engine,
            key=head.id,
            verdict=stream_verdict(ledger),
            pending=age < grace or not known,
            since_ns=ledger.wall(head.since_ns),
            position=at(head.since_at),
            requests=(head.id,),
            blocks_needed=head.blocks_needed,
            blocks_free_for_it=head.blocks_free_then,
            evidence=_head_evidence(ledger, head, own, age, (len(behind), len(fitting), len(living.running))),
            explanation=(
                f"For {duration(age)} request {head.id} has stood at the head of the queue: it needs"
                f" {counted(head.blocks_needed, 'block')} and {state.free:,} ({percent(state.free / usable)} of the"
                f" pool) are free. {counted(len(fitting), 'request')} behind it would fit in these, first"
                f" {fitting[0].id}, but {'waits' if len(fitting) == 1 else 'wait'} for it."
            ),
            do_now=(
                f"If {head.id} is not urgent, abort it and resend it when the load is lower. The requests behind it"
                " then run at once.",
            ),
            change=(
                "Send long requests to a separate engine, so that short ones do not queue behind them.",
                "--scheduling-policy priority, and a higher priority value for requests that need many blocks, so"
                " that they wait behind the others.",
                "Enlarge the pool (--kv-cache-memory-bytes, a higher --gpu-memory-utilization)"
                + (
                    "."
                    if head.blocks_needed <= own
                    else f". Its current tokens need only {own:,}: the engine requires more before it admits a"
                    " request, so a lower max_tokens admits it earlier."
                ),
            ),
            wont_help=HEAD_OF_LINE_WONT_HELP,
            missing=missing_after_loss(ledger),
        )


def _head_evidence(
    ledger: EngineLedger, head: RequestState, own: int, age: float, counts: tuple[int, int, int]
) -> tuple[Evidence, ...]:
    state, at = ledger.state, ledger.at
    usable = state.total - state.reserved
    behind, fitting, running = counts
    return (
        Evidence("blocks_needed", head.blocks_needed, "blocks", position=at(head.refused_at)),
        Evidence("blocks_free_for_it", head.blocks_free_then, "blocks", position=at(head.refused_at)),
        Evidence("blocks_free", state.free, "blocks", position=at(state.places.pool)),
        Evidence("blocks_for_own_tokens", own, "blocks", position=at(head.arrived_at)),
        Evidence("share_free", round(state.free / usable, 4), "of the pool", position=at(state.places.pool)),
        Evidence("waiting_behind", behind, "requests", position=at(state.places.moved)),
        Evidence("waiting_that_fit", fitting, "requests", position=at(state.places.moved, state.places.pool)),
        Evidence("running", running, "requests", position=at(state.places.moved)),
        Evidence("waited_s", round(age, 1), "s", position=at(head.since_at)),
    )
