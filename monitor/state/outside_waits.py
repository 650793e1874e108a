"""How long recent waits for something outside the scheduler took: transfers of KV, and grammars."""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

MAX_WAITS_KEPT: Final = 128


class OutsideWait(NamedTuple):
    """A wait that ended, on the engine's monotonic clock. `blocks`: the blocks transferred, 0 for a grammar."""

    began_ns: int
    ended_ns: int
    blocks: int


class WaitHistory:
    """The recent waits of one kind that ended."""

    def __init__(self) -> None:
        self.ended: deque[OutsideWait] = deque(maxlen=MAX_WAITS_KEPT)

    def note(self, began_ns: int, ended_ns: int, blocks: int = 0) -> None:
        """Add one that has ended."""
        self.ended.append(OutsideWait(began_ns, ended_ns, blocks))

    def longest_s(self, blocks: int = 0) -> float:
        """Return how long one of so many blocks took at most, in proportion where it is larger than any seen, or 0 if
        none was seen.
        """
        longest = max((wait.ended_ns - wait.began_ns for wait in self.ended), default=0) / 1e9
        largest = max((wait.blocks for wait in self.ended), default=0)
        return longest * max(1.0, blocks / max(largest, 1))

    def still_since_ns(self, began_ns: int) -> int:
        """Return since when one that began then has been without a sign of progress.

        While others that began before it end, it may stand behind them. One that began later and has ended shows that
        it does not.
        """
        if any(wait.began_ns > began_ns for wait in self.ended):
            return began_ns
        return max(began_ns, max((wait.ended_ns for wait in self.ended), default=0))


class OutsideWaits:
    """The recent waits of one epoch: for a connector to send, to fetch or to unpin KV, and for a grammar."""

    def __init__(self) -> None:
        self.sends = WaitHistory()
        self.fetches = WaitHistory()
        self.grammars = WaitHistory()
        self.pins = WaitHistory()
