"""Blocks that an idle engine still counts as used: conservation holds for them though events were lost.

With no request running and none waiting, each used block is one that a finished request holds through an announced
deferral, or one without an owner. The engine's own counters show how many there are, whatever the lost events said.
"""

from __future__ import annotations

from typing import Final

from kvscope.monitor.ledger.engine_ledger import EngineLedger

IDLE_HEARTBEATS: Final = 3
"""So many heartbeats in a row since the loss that show an idle engine, one a second: a request that ended in the last
pass has given back its blocks by then.
"""


def used_while_idle(ledger: EngineLedger) -> int | None:
    """Return how many blocks the engine counts as used while idle, beyond the announced deferrals; None if it is not
    known to be idle since the last lost event.
    """
    beats = list(ledger.beats.queue_lengths)[-IDLE_HEARTBEATS:]
    since_ns = ledger.wall(ledger.state.lost_ns)
    if len(beats) < IDLE_HEARTBEATS or any(queued or at_ns <= since_ns for at_ns, queued in beats):
        return None
    announced = set().union(*(deferral.blocks for deferral in ledger.state.deferrals.values()))
    return max(ledger.used_by_engine - len(announced), 0)
