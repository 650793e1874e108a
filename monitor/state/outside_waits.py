"""How long recent waits for something outside the scheduler took: transfers of KV, and grammars."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Final, NamedTuple

MAX_WAITS_KEPT: Final = 128
ANOTHER_KIND: Final = 3
"""A wait that took so many times as long as another, in proportion to its size, is of another kind."""


class OutsideWait(NamedTuple):
    """A wait that ended, on the engine's monotonic clock. `blocks`: the blocks transferred, 0 for a grammar."""

    began_ns: int
    ended_ns: int
    blocks: int
    id: str = ""
    """The request, of a transfer to another engine."""

    @property
    def took_ns(self) -> int:
        """Return how long it took."""
        return self.ended_ns - self.began_ns

    def shows(self, other: OutsideWait) -> bool:
        """Return whether one of the other's size may take as long as the other took, judged by this one."""
        return ANOTHER_KIND * self.took_ns * max(1.0, other.blocks / max(self.blocks, 1)) >= other.took_ns


class WaitHistory:
    """The recent waits of one kind that ended."""

    def __init__(self) -> None:
        self.ended: deque[OutsideWait] = deque(maxlen=MAX_WAITS_KEPT)

    def note(self, began_ns: int, ended_ns: int, blocks: int = 0, name: str = "") -> None:
        """Add one that has ended."""
        self.ended.append(OutsideWait(began_ns, ended_ns, blocks, name))

    def longest_s(self, blocks: int = 0) -> float:
        """Return how long one of so many blocks took at most, in proportion where it is larger than any seen, or 0 if
        none was seen.
        """
        longest_ns, largest = self._most()
        return longest_ns / 1e9 * max(1.0, blocks / max(largest, 1))

    def still_since_ns(self, began_ns: int) -> int:
        """Return since when one that began then has been without a sign of progress.

        While others that began before it end, it may stand behind them. One that began later and has ended shows that
        it does not.
        """
        if any(wait.began_ns > began_ns for wait in self.ended):
            return began_ns
        return max(began_ns, max((wait.ended_ns for wait in self.ended), default=0))

    def _most(self) -> tuple[int, int]:
        """Return the longest time of one, and the most blocks of one."""
        return _most_of(self.ended)


def _most_of(waits: Collection[OutsideWait]) -> tuple[int, int]:
    return max((wait.took_ns for wait in waits), default=0), max((wait.blocks for wait in waits), default=0)


class SendHistory(WaitHistory):
    """The recent transfers that ended. Those that took far longer than all others were not usual: they hung, or the
    engine did not ask. They count once another like them, begun after one had ended, has ended too.
    """

    def __init__(self) -> None:
        super().__init__()
        self._usual: tuple[int, int] | None = None

    def note(self, began_ns: int, ended_ns: int, blocks: int = 0, name: str = "") -> None:
        """Add one that has ended."""
        super().note(began_ns, ended_ns, blocks, name)
        self._usual = None

    def _most(self) -> tuple[int, int]:
        if self._usual is None:
            self._usual = _most_of(self._usual_ones())
        return self._usual

    def _usual_ones(self) -> Collection[OutsideWait]:
        for longest in sorted(self.ended, key=lambda wait: -wait.took_ns):
            alike = [wait for wait in self.ended if wait.shows(longest)]
            first_end_ns = min(wait.ended_ns for wait in alike)
            if len(alike) == len(self.ended) or any(wait.began_ns >= first_end_ns for wait in alike):
                return [wait for wait in self.ended if wait.took_ns <= longest.took_ns]
        return ()


class OutsideWaits:
    """The recent waits of one epoch: for a connector to send, to fetch or to unpin KV, and for a grammar."""

    def __init__(self) -> None:
        self.sends = SendHistory()
        self.fetches = WaitHistory()
        self.grammars = WaitHistory()
        self.pins = WaitHistory()
