"""The floors of an engine: the blocks that stay in use each time it drains to idle.

A cache makes none, since blocks without references are not in use. A leak makes each one higher than the last.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

MAX_FLOORS: Final = 64


class Floor(NamedTuple):
    """One drain: at which look it began, and the least that was in use until work came again."""

    at: int
    in_use: float
    where: str = ""
    """The position in the stream of the last event until it was that low, where there is one."""


class IdleFloors:
    """The last MAX_FLOORS floors, folded from samples of an engine. `at` and `in_use` are in the samples' units. `at`
    and `in_use` are in whatever the looks count in.
    """

    def __init__(self) -> None:
        self._floors: deque[Floor] = deque(maxlen=MAX_FLOORS)
        self._idle = False

    def look(self, at: int, *, idle: bool, worked: bool, in_use: float, where: str = "") -> None:
        """Add a sample, with whether the engine has worked since the one before."""
        if idle and (worked or not self._idle):
            self._floors.append(Floor(at, in_use, where))
        elif idle and in_use < self._floors[-1].in_use:
            self._floors[-1] = self._floors[-1]._replace(in_use=in_use, where=where)
        self._idle = idle

    @property
    def seen(self) -> list[Floor]:
        """All of them, the oldest first."""
        return list(self._floors)

    def rising(self) -> list[Floor]:
        """Return the floors since one was last lower than the one before it, without those that are not higher
        either.
        """
        risen: list[Floor] = []
        for floor in self._floors:
            if risen and floor.in_use < risen[-1].in_use:
                risen = []
            if not risen or floor.in_use > risen[-1].in_use:
                risen.append(floor)
        return risen

    def clear(self) -> None:
        """Another life of the engine begins."""
        self._floors.clear()
        self._idle = False
