"""Limits of an episode on any engine under test: of its drain, of passes that do nothing, and of garbage collection."""

from __future__ import annotations

from typing import Final

STILL_S: Final = 60.0
"""A drain ends when nothing has moved for so long and nothing is on its way, or nothing is left."""
DRAIN_SLICE_S: Final = 20.0
SLICES: Final = 50
"""Parts of the drain, after each of which its steps are counted."""
ENOUGH_STEPS: Final = 2
"""A drain ends after so many times the steps that its requests would take one after the other."""
PATIENT_STEPS: Final = 10_000
"""After so many steps of a drain, an output ends with its next token. What still gets tokens, and has room for all that
it asked for, would get the rest too.
"""
MOST_DRAIN_STEPS: Final = 40_000
"""Beyond that the truth is undecided, and the run does not count."""

EMPTY_PASS_S: Final = (0.05, 0.25)
"""From least to most. An engine that can schedule nothing passes a hundred times a second or more, in the lab less."""


LAB_THRESHOLDS: Final = 100_000, 20, 100
"""When the garbage collector of a lab's process examines young, older, and old objects. With its own thresholds it
walked the blocks of engine and ledger for up to a third of a run's time. Only what a run leaves behind is in cycles.
"""


def empty_pass_s(base_s: float) -> float:
    """Return the seconds of a pass that schedules nothing, for an engine whose steps take `base_s` and more."""
    return min(max(EMPTY_PASS_S[0], 4 * base_s), EMPTY_PASS_S[1])


class DrainCut(RuntimeError):
    """The truth is undecided, because the drain would have taken too long."""


class NotFinished(BaseException):
    """A run took longer than it may. No handler of an engine's or a detector's errors catches it."""
