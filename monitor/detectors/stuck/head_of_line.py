"""stuck.head-of-line: the head of the queue waits for blocks, and the room meanwhile would do for those behind it.

One head that waits for minutes, or several one after the other that together take much of the requests' time. From
metrics, by a queue that stands still beside a pool with room.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvscope.monitor.detectors.detector import Detector
from kvscope.monitor.detectors.engine_pace import at_pace_s
from kvscope.monitor.detectors.judgement import Evidence, ShortOfBlocks
from kvscope.monitor.detectors.stuck.queue_room import head_short_of_blocks
from kvscope.monitor.detectors.stuck.unadmitted_queue import (
    HEAD_OF_LINE_NEED,
    MIN_ROOM,
    UNADMITTED_S,
    head_of_line_by_samples,
)
from kvscope.monitor.detectors.stuck.waiting_requests import missing_after_loss, stream_verdict
from kvscope.monitor.detectors.thresholds import Settings, Threshold
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.ledger.held_back import HeldBackTime, fitting_together, requests_behind
from kvscope.monitor.ledger.living_requests import Living
from kvscope.monitor.state.records import RequestState
from kvscope.monitor.text import counted, duration, percent

WINDOW_MISSING: Final = (
    "how many blocks the engine would have asked for those behind: until it reaches one, only its prompt is known, and"
    " an engine may reserve more than that"
)
HEAD_OF_LINE_CHANGE: Final = (
    "Send long requests to a separate engine, so that short ones do not queue behind them.",
    "--scheduling-policy priority, and a higher priority value for requests that need many blocks, so that they wait"
    " behind the others.",
    "Enlarge the pool (--kv-cache-memory-bytes, a higher --gpu-memory-utilization).",
)
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
        "first come, first served is the rule, and a large request waits for others to end, but not for minutes",
    )
    idle_grace_s = Threshold(
        30,
        "s",
        "with nothing running no step frees a block: it waits for a transfer, as stuck.remote-load does for so long",
    )
    min_steps = Threshold(50, "steps", "so many times others may end and give the head their blocks, at any pace")
    min_free = Threshold(0.1, "of the pool", "less room is no loss to those that wait")
    min_heads = Threshold(3, "requests", "one or two that wait for less are large requests met by chance")
    min_lost = Threshold(
        0.1, "of the time", "of all requests' time in the pending period: clients notice when a tenth of it is lost"
    )
    unadmitted_s = UNADMITTED_S
    min_room = MIN_ROOM

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[ShortOfBlocks]:
        """Yield the head of the queue if those that hold the pool keep it waiting."""
        if not ledger.has_stream and ledger.samples and ledger.samples[-1].source != "log":
            steps, wont_help = settings(self.min_steps), HEAD_OF_LINE_WONT_HELP
            by_samples = head_of_line_by_samples(ledger, self.code, steps, settings, wont_help)
            yield from () if by_samples is None else (by_samples,)
        if not ledger.has_stream:
            return
        head = head_short_of_blocks(ledger)
        found = list(self._judge_head(ledger, settings, ledger.living(), head)) if head is not None else []
        if not found or found[0].pending:
            found = list(self._judge_window(ledger, settings)) or found
        yield from found

    def _judge_window(self, ledger: EngineLedger, settings: Settings) -> Iterator[ShortOfBlocks]:
        """Heads of the queue, one after the other, that held others back for a part of all requests' time."""
        window_s = at_pace_s(ledger, settings, self.grace_s, self.min_steps)
        lost = ledger.held_back.over(window_s, ledger.step_times.longest_s)
        least, fewest = settings(self.min_lost), settings(self.min_heads)
        if lost is None or len(lost.heads) < fewest:
            return
        # Time that is not known counts as time without a loss: it would be a tenth even then.
        if lost.lost_s < least * lost.present_s * window_s / lost.span_s or lost.seconds < least * window_s:
            return
        worst, usable = lost.worst, ledger.state.total - ledger.state.reserved
        share = lost.lost_s / lost.present_s
        heads = counted(len(lost.heads), "request")
        yield ShortOfBlocks(
            code=self.code,
            engine=ledger.engine,
            verdict="likely",
            since_ns=ledger.wall(lost.since.at_ns),
            position=ledger.at(lost.since.refused_at),
            requests=lost.heads,
            blocks_needed=worst.needed,
            blocks_free_for_it=worst.free,
            evidence=_window_evidence(ledger, lost, share),
            explanation=(
                f"In the last {duration(lost.span_s)}, requests that would have fitted lost {percent(share)} of all"
                f" requests' time behind a head of the queue that did not fit: {heads} blocked the queue one after the"
                f" other, for {duration(lost.seconds)} in all. {worst.head} needed"
                f" {counted(worst.needed, 'block')} where {worst.free:,} ({percent(worst.free / max(usable, 1))} of the"
                " pool) were free, and held back"
                f" {counted(worst.held_back, 'request')} that would have fitted together."
            ),
            do_now=("Send fewer requests that need many blocks at once. The requests behind them then run sooner.",),
            change=HEAD_OF_LINE_CHANGE,
            wont_help=HEAD_OF_LINE_WONT_HELP,
            missing=missing_after_loss(ledger) or WINDOW_MISSING,
        )

    def _judge_head(
        self, ledger: EngineLedger, settings: Settings, living: Living, head: RequestState
    ) -> Iterator[ShortOfBlocks]:
        """Judge a head that waits for others to free blocks. In the room that it leaves unused, those behind could
        run.
        """
        state, at = ledger.state, ledger.at
        age = (ledger.looked_ns - head.since_ns) / 1e9
        grace = (
            at_pace_s(ledger, settings, self.grace_s, self.min_steps)
            if living.running
            else at_pace_s(ledger, settings, self.idle_grace_s)
        )
        usable = state.total - state.reserved
        # With enough free for it, the engine's count is another, which findings of a broken account are about.
        if age < grace / 2 or not settings(self.min_free) * usable <= state.free < head.blocks_needed:
            return
        behind = requests_behind(living, head)
        certain = state.is_certain_request
        counted_right = not state.damaged or ledger.used_by_engine == state.used
        known = counted_right and certain(head) and (ledger.looked_ns - state.lost_ns) / 1e9 >= grace
        behind = [record for record in behind if certain(record)] if known else behind
        fitting = fitting_together(state, ledger.description, behind, len(living.running))
        if not fitting:
            return
        own = max(head.blocks_to_admit, -(-(head.prompt_tokens + head.output_tokens) // max(1, state.block_size)))
        yield ShortOfBlocks(
            code=self.code,
            engine=ledger.engine,
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
                *HEAD_OF_LINE_CHANGE[:-1],
                HEAD_OF_LINE_CHANGE[-1]
                + (
                    ""
                    if head.blocks_needed <= own
                    else f" Its current tokens need only {own:,}: the engine requires more before it admits a"
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


def _window_evidence(ledger: EngineLedger, lost: HeldBackTime, share: float) -> tuple[Evidence, ...]:
    at, refused_at = ledger.at, ledger.at(lost.worst.refused_at)
    moved_at = at(ledger.state.places.moved)
    return (
        Evidence("blocks_needed", lost.worst.needed, "blocks", position=refused_at),
        Evidence("blocks_free_for_it", lost.worst.free, "blocks", position=refused_at),
        Evidence("waiting_that_fit", lost.worst.held_back, "requests", position=refused_at),
        Evidence("heads_short_of_blocks", len(lost.heads), "requests", position=refused_at),
        Evidence("held_back_s", round(lost.seconds, 1), "s", position=moved_at),
        Evidence("request_seconds_lost", round(lost.lost_s, 1), "request-seconds", position=moved_at),
        Evidence("request_seconds", round(lost.present_s, 1), "request-seconds", position=moved_at),
        Evidence("share_of_time_lost", round(share, 4), "of the time", position=moved_at),
    )
