"""Fold the events of offload tiers: usage, operations and pins."""

from __future__ import annotations

from collections.abc import Mapping

from kvscope.monitor.events.kinds import TierOp
from kvscope.monitor.state.engine_state import EngineState
from kvscope.monitor.state.records import TierState


def fold_tier(state: EngineState, args: list[int], _texts: Mapping[int, str]) -> None:
    """Fold one operation on a tier: operation, tier, blocks used, capacity, then the keys it touched."""
    operation, number, used, capacity, *keys = args
    tier = state.tiers.setdefault(number, TierState(operations={}))
    tier.used, tier.capacity, tier.at = used, capacity, state.position
    tier.operations[operation] = tier.operations.get(operation, 0) + len(keys)
    if operation == TierOp.PINNED:
        _pin(state, tier.pins, keys)
    elif operation == TierOp.UNPINNED:
        _unpin(state, tier.pins, keys)
        tier.unpinned_ns = state.now_ns


def _pin(state: EngineState, pins: dict[int, tuple[int, ...]], keys: list[int]) -> None:
    for key in keys:
        count, *since = pins.get(key, (0, state.now_ns, state.position))
        pins[key] = count + 1, *since


def _unpin(state: EngineState, pins: dict[int, tuple[int, ...]], keys: list[int]) -> None:
    for key in keys:
        count, *_ = pins.pop(key, (0,))
        if count > 1:  # which of its pins was the oldest is not known: those that remain count from now on
            pins[key] = count - 1, state.now_ns, state.position
