"""When the drain of an episode ends, on any engine under test."""

from __future__ import annotations

from typing import Final

STILL_S: Final = 60.0
"""A drain ends when nothing has moved for so long and nothing is on its way, or nothing is left."""
DRAIN_SLICE_S: Final = 20.0
SLICES: Final = 50
"""Of the watched part: its steps are counted after each."""
ENOUGH_STEPS: Final = 2
"""A drain ends after so many times the steps that its requests would take one after the other."""
MOST_DRAIN_STEPS: Final = 40_000
"""Beyond that the truth is not decided, and the run is not counted."""


class DrainCut(RuntimeError):
    """What happened cannot be decided, because the drain would have taken too long."""
