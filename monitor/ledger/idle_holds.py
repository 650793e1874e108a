"""Blocks that an idle engine still counts as used: conservation holds for them though events were lost.

With no request running and none waiting, each used block is one that a finished request holds through an announced
deferral, or one without an owner. The engine's own counters show how many there are, even after lost events.
"""

from __future__ import annotations

from typing import Final

from kvscope.monitor.ledger.engine_ledger import EngineLedger

IDLE_HEARTBEATS: Final = 3
"""Heartbeats in a row since the loss that must show an idle engine, one a second: a request that ended in the last pass
has freed its blocks by then.
"""


def used_while_idle(ledger: EngineLedger) -> int | None:
    """Return how many blocks the engine counts as used while idle, beyond the announced deferrals, or None if it is not
    known to be idle since the last lost event.
    """
    beats = list(ledger.beats.queue_lengths)[-IDLE_HEARTBEATS:]
    since_ns = ledger.wall(ledger.state.lost_ns)
    if len(beats) < IDLE_HEARTBEATS or any(beat.requests or beat.at_ns <= since_ns for beat in beats):
        return None
    announced = set().union(*(deferral.blocks for deferral in ledger.state.deferrals.values()))
    return max(ledger.used_by_engine - len(announced), 0)
