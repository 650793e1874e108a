"""sizing.block-inflated: blocks so large that the requests that hold them leave most of each empty."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.text import counted, percent
from ...contract.kinds import Cause
from ...ledger.engine_ledger import EngineLedger
from ..detector import Settings, StreamDetector, Threshold
from ..judgement import Alternative, Judgement, seen
from ..preemptions import LOST_EVENTS


class BlockInflated(StreamDetector[Judgement]):
    """Blocks that are too large for the requests in them.

    Sees: blocks of hundreds of tokens, of which running requests hold half of the pool and fill less than half.
    Confirmed when: no event is missing. It is information while no request waits for blocks.
    Likely when: events were lost.
    Not when: few requests run; others hold the pool; their tokens fill half.
    """

    code = "sizing.block-inflated"
    severity = "warning"
    title = "Blocks are so large that they stay mostly empty"

    min_block = Threshold(256, "tokens", "blocks that are chosen, not made to fit other layers, are smaller")
    min_requests = Threshold(4, "requests", "fewer do not represent the load")
    min_usage = Threshold(0.5, "of the pool", "below this, no request is short of room")
    max_filled = Threshold(
        0.5, "of the reserved", "the last block of each request is half empty on average, the others are full"
    )
    alternatives = (Alternative("short requests by chance", "the mean over all requests"),)

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield how little of the held blocks is filled."""
        state = ledger.state
        if state.block_size < settings(self.min_block):
            return
        # Blocks are taken when a step is planned: before a prompt's last step has ended, they are empty for a moment.
        holders = [r for r in state.requests.values() if r.is_running and r.blocks and r.output_tokens]
        if len(holders) < settings(self.min_requests):
            return
        held = sum(record.computed_tokens for record in holders)
        blocks = sum(len(record.blocks) for record in holders)
        taken = len({block for record in holders for block in record.blocks})
        groups = max(1, len(ledger.description.groups))
        reserved = blocks * state.block_size // groups
        usable = max(1, state.total - state.reserved)
        if taken < settings(self.min_usage) * usable or held > settings(self.max_filled) * reserved:
            return  # where others hold the pool, the size of these blocks is not why it is full
        yield self.finding(
            ledger,
            severity=None if ledger.waiting_by_cause()[Cause.KV_BLOCKS] else "info",
            since_ns=ledger.wall(min(record.admitted_ns for record in holders)),
            position=ledger.at(min(holders, key=lambda record: record.admitted_ns).since_at),
            requests=tuple(record.id for record in holders),
            evidence=(
                seen("block_size", state.block_size, "tokens", ledger.at(state.places.started)),
                seen("kv_groups", groups, "groups", ledger.at(state.places.started)),
                seen("requests_holding", len(holders), "requests", ledger.at(state.places.moved)),
                seen("blocks_held", blocks, "blocks", ledger.at(state.places.pool)),
                seen("tokens_reserved", reserved, "tokens", ledger.at(state.places.pool)),
                seen("tokens_in_blocks", held, "tokens", ledger.at(state.places.progressed)),
                seen(
                    "share_filled",
                    round(held / reserved, 4),
                    "of the reserved",
                    ledger.at(state.places.pool, state.places.progressed),
                ),
                seen("share_of_pool", round(taken / usable, 4), "of the pool", ledger.at(state.places.pool)),
            ),
            explanation=(
                f"A block is {state.block_size:,} tokens, and the {len(holders)} running requests fill"
                f" {percent(held / reserved)} of the {counted(blocks, 'block')} that they hold,"
                f" {percent(taken / usable)} of the pool: most of that space is empty. On a hybrid model, an attention"
                " block is as large as the state of the other layers."
            ),
            missing=LOST_EVENTS if state.damaged else "",
        )
