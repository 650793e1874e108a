"""harm.held-blocks: much of the pool is held, no request that progresses has it, and no other finding explains it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...base.text import counted, duration, percent
from ...contract.kinds import EngineMode
from ...ledger.engine_ledger import EngineLedger
from ...ledger.harms import held_without_progress, known_until_ns
from ..detector import Settings, Threshold
from ..engine_pace import at_pace_s
from ..judgement import ENGINE_PAUSED, NO_WORK, HoldsBlocks, Judgement, seen
from .unclaimed_harm import HarmDetector, claimed_blocks


class HeldBlocks(HarmDetector[HoldsBlocks]):
    """Blocks that no one who progresses holds, for no reason that is known.

    Sees: blocks in use that no request which gets tokens has in its table, and no transfer, pin or session keeps.
    Confirmed when: the same blocks for a minute, a quarter of the pool together. The verdict is about the harm, not its
    cause.
    Likely when: events were lost.
    Not when: another finding names them.
    """

    code = "harm.held-blocks"
    severity = "warning"
    title = "Much of the pool is held by no one who progresses"

    grace_s = Threshold(60, "s", "the same blocks: a transfer of one request's KV takes milliseconds to seconds")
    least_share = Threshold(0.25, "of the pool", "with a quarter less, a load that fitted queues")
    alternatives = (NO_WORK, ENGINE_PAUSED)

    def detect_unclaimed(
        self, ledger: EngineLedger, settings: Settings, causes: Sequence[Judgement]
    ) -> Iterator[HoldsBlocks]:
        """Yield the blocks that nobody's progress accounts for."""
        state, at = ledger.state, ledger.at
        if state.stopped_ns or state.mode != EngineMode.UNPAUSED or state.damaged:
            return
        grace_s = at_pace_s(ledger, settings, self.grace_s)
        least = settings(self.least_share) * state.usable
        held = held_without_progress(ledger, known_until_ns(ledger) - round(grace_s * 1e9), least)
        claimed = claimed_blocks(causes) if held else set()
        held = {block: since_ns for block, since_ns in held.items() if block not in claimed}
        if not held or len(held) < least:
            return
        owners = {number for block in held for number in state.owners(block)}
        records = [state.requests[number] for number in sorted(owners) if number in state.requests]
        since_ns = max(held.values())
        share = len(held) / state.usable
        yield self.holding(
            ledger,
            share_of_pool=round(share, 4),
            since_ns=ledger.wall(since_ns),
            position=at(state.places.pool),
            requests=tuple(record.id for record in records),
            blocks=tuple(held),
            evidence=(
                seen("blocks_held", len(held), "blocks", at(state.places.pool)),
                seen("share_of_pool", round(share, 4), "of the pool", at(state.places.pool)),
                seen("holders_known", len(records), "requests", at(state.places.moved)),
                seen("blocks_free", state.free, "blocks", at(state.places.pool)),
            ),
            explanation=(
                f"{counted(len(held), 'block')} ({percent(share)} of the pool) have been held by no request that gets"
                f" tokens, for {duration(ledger.age_s(since_ns))} or longer. {counted(len(records), 'request')}"
                f" {'has' if len(records) == 1 else 'have'} them in a table. The engine is not paused and its scheduler"
                " makes passes. No other finding explains it, so the cause is not known."
            ),
        )
