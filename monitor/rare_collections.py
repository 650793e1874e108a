"""Garbage collection of processes that hold the columns of many blocks."""

from __future__ import annotations

import gc
from typing import Final

SERVICE_THRESHOLDS: Final = 50_000, 20, 10
"""When the garbage collector of a service examines young, older, and old objects. With its own thresholds it walks the
columns of all blocks of every state in memory (a third of a second for a million) at each second query for a past
time. Hardly anything there is in a cycle.
"""
LAB_THRESHOLDS: Final = 100_000, 20, 100
"""The same in the lab's processes, where it walked the blocks of engine and ledger for up to a third of a run's time.
Only what a run leaves behind is in cycles.
"""


def collect_rarely(thresholds: tuple[int, int, int] = SERVICE_THRESHOLDS) -> None:
    """Let the garbage collector of this process ignore the objects of now, and examine the rest rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*thresholds)
