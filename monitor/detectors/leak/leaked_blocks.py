"""Blocks that a leak has taken: no living request holds them, and none of their holders is expected to free them.

What may be the first transfers of an engine, and slow, is not among them.
"""

from __future__ import annotations

from typing import NamedTuple

from kvscope.monitor.detectors.leak.deferred_blocks import kept, may_be_first_transfers, overdue_sends
from kvscope.monitor.detectors.leak.lost_references import UNACCOUNTED_GRACE_S
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.ledger.engine_ledger import EngineLedger


class LeakedBlocks(NamedTuple):
    """The blocks, and whether nothing but a defect frees them: a connector that shows no lease may yet."""

    blocks: frozenset[int]
    for_good: bool


def leaked_blocks(ledger: EngineLedger, settings: Settings) -> LeakedBlocks:
    """Return the blocks that no owner explains, and those that a connector keeps for too long."""
    late, pending = overdue_sends(ledger, settings)
    pending = pending or may_be_first_transfers(ledger, settings, kept(ledger, late))
    sending: set[int] = set() if pending else set().union(*(deferral.blocks for deferral in late))
    since, grace = ledger.state.since, settings(UNACCOUNTED_GRACE_S)
    lost = [block for block in ledger.state.unaccounted() if ledger.age_s(since[block]) >= grace]
    return LeakedBlocks(frozenset(sending.union(lost)), not sending)
