"""Room for the head of the waiting queue: what it needs, and whether it is short of blocks."""

from __future__ import annotations

from typing import Final

from kvscope.monitor.events.kinds import Cause
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.state.records import RequestState


def head_short_of_blocks(ledger: EngineLedger) -> RequestState | None:
    """Return the head of the queue if it was refused for blocks that the pool could have; else None."""
    head = ledger.head()
    if head is None or head.cause != Cause.KV_BLOCKS or head.blocks_needed <= head.blocks_free_then:
        return None
    return head if head.blocks_needed <= ledger.state.total - ledger.state.reserved else None


def blocks_to_run(ledger: EngineLedger, record: RequestState) -> int:
    """How many blocks a waiting request must get at once. A failed allocation names fewer: what was hit in the prefix
    cache is not asked for, though it must be there too. What a preempted request had generated is computed again with
    its prompt; with layers that keep only a window of it, only the engine can tell how much that takes.
    """
    needed = max(record.blocks_needed, record.blocks_to_admit)
    block_size = ledger.state.block_size
    if block_size and all(group.kind == "full_attention" for group in ledger.description.groups):
        needed = max(needed, -(-(record.prompt_tokens + record.output_tokens) // block_size))
    return needed


NEVER_FITS_WONT_HELP: Final = (
    "Waiting, or lowering the load: even an empty pool is too small.",
    "Restarting: the same request blocks the queue again.",
)
