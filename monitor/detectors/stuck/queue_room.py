"""Room for the head of the waiting queue: what it needs, and whether it is short of blocks."""

from __future__ import annotations

from typing import Final

from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.ledger.held_back import is_short_of_blocks
from kvscope.monitor.state.records import RequestState


def head_short_of_blocks(ledger: EngineLedger) -> RequestState | None:
    """Return the head of the queue if it was refused for blocks that the pool could have, or else None."""
    head = ledger.head()
    return head if head is not None and is_short_of_blocks(ledger.state, head) else None


NEVER_FITS_WONT_HELP: Final = (
    "Waiting, or lowering the load: even an empty pool is too small.",
    "Restarting: the same request blocks the queue again.",
)
