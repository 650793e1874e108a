"""The steps of a server's data-parallel ranks: when each last made one, and how long others may go on."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

from kvscope.monitor.detectors.thresholds import Threshold
from kvscope.monitor.ledger.engine_ledger import EngineLedger

AFTER_S: Final = Threshold(
    2,
    "s",
    "ranks that wait for one another stop within a step of each other. A rank that steps on for longer does not wait",
)
"""A threshold of stuck.rank-diverged. Below it every rank that stands still is stuck.engine-stalled."""


def last_step_ns(ledger: EngineLedger) -> int:
    """Return when it last launched a step, or its metrics showed the end of one, or 0 if that is not known."""
    if ledger.has_stream:
        return ledger.wall(ledger.state.launched_ns)
    moved = [later.at_ns or 0 for earlier, later in pairwise(ledger.samples) if later.steps != earlier.steps]
    return moved[-1] if moved else 0
