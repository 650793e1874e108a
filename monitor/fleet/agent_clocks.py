"""How far the clocks of agents are off, by when their messages were sent and stored: no I/O and no clock."""

from __future__ import annotations

from typing import Final, NamedTuple

from ..base.latest_entries import LatestEntries
from .bus_connection import StreamMessage
from .bus_messages import CLOCK_OFF_S, BusMessage, time_of

MAX_CLOCKS: Final = 100
"""Agents whose clocks were off that are remembered."""
BEHIND_AFTER_S: Final = 60.0
"""A message that an outage of a link or of NATS holds back looks as if the agent's clock were behind. So a clock counts
as behind when all messages have been late for this long: those of one outage are stored together, when it ends.
"""


class ClockOffset(NamedTuple):
    """An agent's clock against that of the NATS server, in s.

    ahead_s: positive as the last message shows it, or negative: the least by which a message was late since then.
    since_s, last_s: when a message showed it first and last (monotonic s). corrected: messages that have the time of
    their receipt in place of their own.
    """

    agent: str
    ahead_s: float
    since_s: float
    last_s: float
    corrected: int


class AgentClocks:
    """The agents whose clocks are off by more than CLOCK_OFF_S, or were ahead until a moment ago."""

    def __init__(self) -> None:
        self.corrected = 0
        """Messages that have the time of their receipt in place of their own."""
        self._offsets: LatestEntries[str, ClockOffset] = LatestEntries(MAX_CLOCKS)

    def take(self, message: BusMessage, received: StreamMessage) -> None:
        """Take a message as its agent wrote it."""
        sent_s = received.sent_ns / 1e9 - received.stored_s if received.sent_ns else 0.0
        written_s = time_of(message) / 1e9 - received.stored_s  # what waited in a spool was written earlier
        is_ahead = written_s > CLOCK_OFF_S
        self.corrected += is_ahead
        ahead_s = max(sent_s, written_s) if is_ahead else sent_s
        before = self._offsets.get(message.agent)
        if abs(ahead_s) <= CLOCK_OFF_S:
            if before is not None and before.ahead_s < 0:  # a clock that is behind has no message that is in time
                del self._offsets[message.agent]
            return
        arrived_s = received.arrived_s()
        since_s, corrected = arrived_s, 0
        if before is not None and (before.ahead_s > 0) == (ahead_s > 0):
            since_s, corrected = before.since_s, before.corrected
            if ahead_s < 0:
                ahead_s = max(ahead_s, before.ahead_s)
        self._offsets[message.agent] = ClockOffset(message.agent, ahead_s, since_s, arrived_s, corrected + is_ahead)

    def off(self, after_s: float) -> list[ClockOffset]:
        """Return the clocks that messages since `after_s` (monotonic) show to be off."""
        return [
            each
            for each in self._offsets.values()
            if each.last_s > after_s and (each.ahead_s > 0 or each.last_s - each.since_s >= BEHIND_AFTER_S)
        ]
