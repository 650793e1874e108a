"""stuck.parked-loads: those who wait behind the head of the queue hold what it is short of, while nothing runs."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.text import counted, duration, listed, percent
from ...ledger.engine_ledger import EngineLedger
from ...ledger.queue_state import Living, was_found_behind
from ...ledger.records import RequestState
from ...ledger.wait_graph import WaitGraph
from ..detector import Causes, Settings, StreamDetector, Threshold
from ..judgement import ENGINE_PAUSED, NO_WORK, Alternative, ShortOfBlocks, holds_what_it_needs, seen
from .head_of_line import HeadOfLine
from .waiting_requests import head_short_of_blocks, missing_after_loss


class ParkedLoads(StreamDetector[ShortOfBlocks]):
    """Waiting requests whose fetched KV holds what the head of the queue needs.

    Sees: nothing runs, and requests behind the head of the queue hold, for their fetched KV, the blocks that it lacks.
    Confirmed when: each waits for the other, and their blocks would be enough.
    Likely when: events were lost.
    Not when: a request runs or a fetch goes on that will free blocks; others hold what the head lacks; enough are free.
    """

    code = "stuck.parked-loads"
    severity = "error"
    title = "Requests with fetched KV hold the blocks that the head of the queue lacks"

    grace_s = Threshold(
        5, "s", "nothing runs and nothing is fetched, so nothing can change. This only excludes a client that gives up"
    )
    alternatives = (
        NO_WORK,
        ENGINE_PAUSED,
        Alternative("a running fetch that will free blocks", "no fetch is under way"),
        Alternative("a running request that will free blocks", "no request runs"),
    )
    # Others behind the same head would fit.
    causes = Causes[ShortOfBlocks]().of(HeadOfLine, holds_what_it_needs)

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[ShortOfBlocks]:
        """Yield the requests that hold fetched KV against the head of the queue."""
        if (head := head_short_of_blocks(ledger)) is None:
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
        since = max(state.launched_ns, state.mode_since_ns, head.since_ns, *(record.since_ns for record in holders))
        age, grace = (ledger.looked_ns - since) / 1e9, settings(self.grace_s)
        if age < grace / 2:
            return
        held_at = at(*(record.since_at for record in holders))
        since_at = at(state.places.launched, head.since_at, *(record.since_at for record in holders))
        yield self.short_of_blocks(
            ledger,
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
                seen("head_request", head.id, "request", at(head.passed_over_at)),
                seen("blocks_needed", head.blocks_needed, "blocks", at(head.refused_at)),
                seen("blocks_free_for_it", head.blocks_free_then, "blocks", at(head.refused_at)),
                seen("blocks_parked", len(held), "blocks", held_at),
                seen("share_of_pool", round(len(held) / state.usable, 4), "of the pool", held_at),
                seen("running", 0, "requests", at(state.places.moved)),
                seen("waiting", len(living.waiting), "requests", at(state.places.moved)),
                seen("no_step_s", round(age, 1), "s", since_at),
            ),
            explanation=(
                f"Nothing runs. {head.id}, at the head of the queue, is short of"
                f" {counted(head.blocks_needed - head.blocks_free_then, 'block')}; {counted(len(held), 'block')}"
                f" ({percent(len(held) / state.usable)} of the pool) belong to {listed([r.id for r in holders])}, whose"
                f" KV has been fetched and which {'waits' if len(holders) == 1 else 'wait'} behind it. Each has waited"
                f" for the other for {duration(age)}."
            ),
            numbers={"the head of the queue": head.id, "one of the holders": holders[-1].id},
            missing=missing_after_loss(ledger),
        )
