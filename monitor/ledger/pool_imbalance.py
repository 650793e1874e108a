"""The conservation law on the live ledger: whether every block counts once, and what an idle engine still holds."""

from __future__ import annotations

from typing import Final, NamedTuple

from .balance import Balance
from .engine_ledger import EngineLedger
from .event_history import HistoryLine, block_history, request_names
from .invariants import disputed_blocks


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


IDLE_HEARTBEATS: Final = 3
"""Heartbeats in a row since the loss that must show an idle engine, one a second: a request that ended in the last pass
has freed its blocks by then.
"""


def used_while_idle(ledger: EngineLedger) -> int | None:
    """Return how many blocks the engine counts as used while idle, beyond the announced deferrals, or None if it is not
    known to be idle since the last lost event.

    With no request running or waiting, a finished request holds a block through an announced deferral, or the block has
    no owner. The engine's own counters show how many there are, even after lost events.
    """
    beats = list(ledger.beats.queue_lengths)[-IDLE_HEARTBEATS:]
    since_ns = ledger.wall(ledger.state.lost_ns)
    if len(beats) < IDLE_HEARTBEATS or any(beat.requests or beat.at_ns <= since_ns for beat in beats):
        return None
    announced = set().union(*(deferral.blocks for deferral in ledger.state.deferrals.values()))
    return max(ledger.used_by_engine - len(announced), 0)
