"""Transfers whose end an idle engine learned only when something woke it: it had not polled its connector."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

from kvscope.monitor.state.outside_waits import ANOTHER_KIND, OutsideWait
from kvscope.monitor.state.records import Heartbeat

MAX_LATE_SENDS: Final = 128


class LateSend(NamedTuple):
    """A transfer that the connector reported right after a sleep, and the sleep, on the engine's monotonic clock."""

    sent: OutsideWait
    slept_since_ns: int
    slept_until_ns: int
    at: int
    """The position of the heartbeat that shows it."""

    @property
    def slept_s(self) -> float:
        """Return for how long the engine did not ask."""
        return (self.slept_until_ns - self.slept_since_ns) / 1e9

    @property
    def chance(self) -> float:
        """Return how likely a transfer that ends at any time from the begin of the sleep on ended only after it."""
        return (self.sent.ended_ns - self.slept_until_ns) / max(self.sent.ended_ns - self.slept_since_ns, 1)


class LateSends:
    """The recent ones of one epoch."""

    def __init__(self) -> None:
        self.recent: deque[LateSend] = deque(maxlen=MAX_LATE_SENDS)
        self._slept_since_ns = 0
        self._woken: tuple[int, int] | None = None

    def look(self, before: Heartbeat, last: Heartbeat, polled: bool, at: int, ended: Iterable[OutsideWait]) -> None:
        """Note the transfers that had begun before a sleep, and `ended` after it in much less time than it lasted.

        polled: the engine has polled its connector between the two heartbeats. What it learned then may be reported
        only after the second of them, and is noted with the next one.
        """
        if self._woken:
            since_ns, until_ns = self._woken
            self._woken = None
            self.recent.extend(
                LateSend(sent, since_ns, until_ns, at)
                for sent in ended
                if sent.began_ns <= since_ns and 0 < ANOTHER_KIND * (sent.ended_ns - until_ns) <= until_ns - since_ns
            )
        if polled:
            self._woken = (self._slept_since_ns, before.at_ns) if self._slept_since_ns else None
            self._slept_since_ns = 0
        elif _is_idle(before) and _is_idle(last):
            self._slept_since_ns = self._slept_since_ns or before.at_ns
        else:
            self._slept_since_ns = 0


def _is_idle(beat: Heartbeat) -> bool:
    return beat.step_in_flight < 0 and not (beat.running or beat.waiting)
