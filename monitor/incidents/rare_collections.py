"""Garbage collection in the lab's processes."""

from __future__ import annotations

import gc
from typing import Final

COLLECT: Final = 100_000, 20, 100
"""When the garbage collector examines young, older and old objects. With its own thresholds it walks the blocks of
engine and ledger again and again, for up to a third of a run's time. Only what a run leaves behind is in cycles.
"""


def collect_rarely() -> None:
    """Let the garbage collector of this process ignore the objects of now, and examine the rest rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT)
