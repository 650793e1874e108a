"""Whether every block of the pool counts once: the conservation law, checked on the live ledger."""

from __future__ import annotations

from typing import NamedTuple

from kvscope.monitor.analysis.event_history import HistoryLine, block_history, request_names
from kvscope.monitor.ledger.balance import Balance
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.state.invariants import disputed_blocks


class Imbalance(NamedTuple):
    """A pool whose parts do not add up to its total."""

    balance: Balance
    since_ns: int
    """The wall time of the first sample of the pool that did not add up, of those in a row until now."""
    position: str
    blocks: list[int]
    """The blocks whose references differ from the holders that the ledger knows, lowest first."""
    history: list[HistoryLine]
    """The event history of the first of them, oldest first."""


def find_imbalance(ledger: EngineLedger) -> Imbalance | None:
    """Return how the pool fails to add up, or None if it does, or if lost events explain a difference."""
    if not ledger.has_stream or ledger.state.damaged:
        return None
    parts = ledger.balance()
    if parts.holds:
        return None
    since_ns, position = ledger.now_ns, str(ledger.last_received_at)
    repaired_ns = ledger.losses[-1].at_ns if ledger.losses else 0
    for point in reversed(ledger.points):
        if point.balance.holds or point.at_ns <= repaired_ns:
            break
        since_ns, position = point.at_ns, str(point.position or position)
    blocks = disputed_blocks(ledger.state)
    history = block_history(ledger.recent, blocks[0], request_names(ledger)) if blocks else []
    return Imbalance(parts, since_ns, position, blocks, history)
