"""stuck.parked-loads: those who wait behind the head of the queue hold what it is short of, while nothing runs.

No request gives a block back, so none goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvscope.monitor.analysis.wait_graph import WaitGraph
from kvscope.monitor.detectors.detector import Causes, Detector
from kvscope.monitor.detectors.judgement import Evidence, ShortOfBlocks
from kvscope.monitor.detectors.stuck.head_of_line import HeadOfLine
from kvscope.monitor.detectors.stuck.queue_room import head_short_of_blocks
from kvscope.monitor.detectors.stuck.waiting_requests import missing_after_loss, stream_verdict
from kvscope.monitor.detectors.thresholds import Settings, Threshold
from kvscope.monitor.detectors.ties import holds_what_it_needs
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.ledger.living_requests import Living, was_found_behind
from kvscope.monitor.state.records import RequestState
from kvscope.monitor.text import counted, duration, listed, percent

PARKED_LOADS_CHANGE: Final = (
    "vLLM: upgrade to a release that schedules requests with fetched KV first and reserves room for fetches in"
    " flight (#44560, 0.31 and later).",
    "Until then, allow fewer fetches at once: lower --max-num-seqs so that max_num_seqs × blocks of the longest"
    " prompt fit in the pool.",
)


class ParkedLoads(Detector[ShortOfBlocks]):
    """Waiting requests whose fetched KV holds what the head of the queue needs."""

    code = "stuck.parked-loads"
    severity = "error"
    title = "Requests with fetched KV hold the blocks that the head of the queue lacks"
    requires = ("stream",)
    position = 220

    grace_s = Threshold(
        5, "s", "nothing runs and nothing is fetched, so nothing can change. This only excludes a client that gives up"
    )

    def causes(self) -> Causes[ShortOfBlocks]:
        """Return what it may cause: others behind the same head would fit."""
        return Causes[ShortOfBlocks]().of(HeadOfLine, holds_what_it_needs)

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[ShortOfBlocks]:
        """Yield the requests that hold fetched KV against the head of the queue."""
        if not ledger.has_stream or (head := head_short_of_blocks(ledger)) is None:
            return
        if WaitGraph(ledger).cycle_of(head):
            yield from self._judge_holders(ledger, settings, ledger.living(), head)

    def _judge_holders(
        self, ledger: EngineLedger, settings: Settings, living: Living, head: RequestState
    ) -> Iterator[ShortOfBlocks]:
        """Each waits for the other: those who wait behind the head with blocks hold what it lacks."""
        state, at = ledger.state, ledger.at
        holders = [r for r in living.waiting if r is not head and r.blocks and (was_found_behind(r) or not r.ready_ns)]
        if not holders:
            return
        held = sorted({block for record in holders for block in record.blocks})
        if head.blocks_needed > head.blocks_free_then + len(held):
            return  # even with these it is short of blocks: the holder of those is the problem
        since = max(state.launched_ns, head.since_ns, *(record.since_ns for record in holders))
        age, grace = (ledger.looked_ns - since) / 1e9, settings(self.grace_s)
        if age < grace / 2:
            return
        usable = state.total - state.reserved
        held_at = at(*(record.since_at for record in holders))
        since_at = at(state.places.launched, head.since_at, *(record.since_at for record in holders))
        yield ShortOfBlocks(
            code=self.code,
            engine=ledger.engine,
            verdict=stream_verdict(ledger),
            pending=age < grace
            or (ledger.looked_ns - state.lost_ns) / 1e9 < grace
            or not all(map(state.is_certain_request, (head, *holders))),
            since_ns=ledger.wall(since),
            position=since_at,
            requests=tuple(record.id for record in holders),
            blocks=tuple(held),
            blocks_needed=head.blocks_needed,
            blocks_free_for_it=head.blocks_free_then,
            evidence=(
                Evidence("head_request", head.id, "request", position=at(head.passed_over_at)),
                Evidence("blocks_needed", head.blocks_needed, "blocks", position=at(head.refused_at)),
                Evidence("blocks_free_for_it", head.blocks_free_then, "blocks", position=at(head.refused_at)),
                Evidence("blocks_parked", len(held), "blocks", position=held_at),
                Evidence("share_of_pool", round(len(held) / usable, 4), "of the pool", position=held_at),
                Evidence("running", 0, "requests", position=at(state.places.moved)),
                Evidence("waiting", len(living.waiting), "requests", position=at(state.places.moved)),
                Evidence("no_step_s", round(age, 1), "s", position=since_at),
            ),
            explanation=(
                f"Nothing runs. {head.id}, at the head of the queue, is short of"
                f" {counted(head.blocks_needed - head.blocks_free_then, 'block')}; {counted(len(held), 'block')}"
                f" ({percent(len(held) / usable)} of the pool) belong to {listed([r.id for r in holders])}, whose KV"
                f" has been fetched and which {'waits' if len(holders) == 1 else 'wait'} behind it. Each has waited"
                f" for the other for {duration(age)}."
            ),
            do_now=(
                f"Abort {head.id}, or {holders[-1].id} (close its connection): the blocks that one frees let the"
                " other run.",
            ),
            change=PARKED_LOADS_CHANGE,
            wont_help=(
                "Waiting: nothing runs, so no request frees a block.",
                "Lowering the load: the stuck requests stay stuck.",
            ),
            missing=missing_after_loss(ledger),
        )
