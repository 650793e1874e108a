"""corrupt.conservation: the blocks under all holders do not add up to the pool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ...base.text import clock_time, counted
from ...ledger.engine_ledger import EngineLedger
from ...ledger.pool_imbalance import Imbalance, find_imbalance
from ..advice import named
from ..detector import Settings, StreamDetector
from ..judgement import Alternative, Judgement, seen

MAX_IMBALANCE_EVENTS: Final = 6


class Conservation(StreamDetector[Judgement]):
    """Total is not free + cached-idle + running + waiting + finished + reserved + UNACCOUNTED.

    Sees: the blocks under all holders add up to another number than the pool has.
    Confirmed when: no event was lost.
    Likely when: events were lost, but an audit has repaired the ledger since.
    Not when: lost events explain the difference.
    """

    code = "corrupt.conservation"
    severity = "critical"
    title = "The blocks of the pool do not add up"
    alternatives = (Alternative("a block counted twice", "each block is counted under one owner"),)

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield a judgement if the parts of the pool differ from its total and no lost event explains that."""
        imbalance = find_imbalance(ledger)
        if imbalance is not None:
            yield self._judge_imbalance(ledger, imbalance)

    def _judge_imbalance(self, ledger: EngineLedger, imbalance: Imbalance) -> Judgement:
        parts, blocks = imbalance.balance, imbalance.blocks
        total, counted_blocks, at = parts.total, parts.total + parts.difference, str(ledger.last_received_at)
        disputed = counted(len(blocks), "block")
        first = f" Block {blocks[0]} is the first of {disputed} whose references differ." if blocks else ""
        engine = f" ({named(ledger)})" if named(ledger) else ""
        lossy = bool(ledger.losses)
        return self.finding(
            ledger,
            since_ns=imbalance.since_ns,
            position=imbalance.position,
            blocks=tuple(blocks),
            evidence=(
                seen("difference", parts.difference, "blocks", at),
                seen("pool_blocks", total, "blocks", ledger.at(ledger.state.places.started)),
                seen("counted_blocks", counted_blocks, "blocks", at),
                *(
                    seen("block_history", f"{clock_time(line.at_ns)} {line.text}", "", str(line.position))
                    for line in imbalance.history[-MAX_IMBALANCE_EVENTS:]
                ),
            ),
            explanation=(
                f"The pool has {counted(total, 'block')}, but {counted_blocks:,} are counted under all holders"
                f" ({parts.difference:+,}) since {clock_time(imbalance.since_ns)}.{first} Some block counts twice or"
                " not at all, so two requests may use it, or the pool may have lost it. "
                + (
                    "Events were lost, but an audit has repaired the ledger since."
                    if lossy
                    else "No event was lost, so no gap explains the difference."
                )
            ),
            numbers={"of the engine": f"of the engine{engine}"},
            missing="the lost events before the last audit" if lossy else "",
        )
