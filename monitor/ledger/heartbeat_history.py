"""The recent heartbeats of an engine: whether its scheduler makes passes and polls its connector.

An idle engine that does not poll learns that a transfer has ended only when something wakes it (LateSends).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

from .durations import ANOTHER_KIND, OutsideWait
from .records import UNKNOWN_POSITION, Heartbeat

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
    """The recent transfers of one epoch whose end an idle engine learned late."""

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


QUEUE_LENGTHS: Final = 8
INTERVAL_NS: Final = 1_000_000_000
"""From one heartbeat of a live engine to the next."""
PAUSE_NS: Final = 3 * INTERVAL_NS
"""Without a heartbeat for so long, the process does not run, or is not received."""
PAUSES: Final = 16


class QueueLength(NamedTuple):
    """How many requests the engine's own queues held at a heartbeat."""

    at_ns: int
    """Wall time."""
    requests: int
    in_step: bool
    """Whether a step was in flight. Requests that left the queues in its pass may be reported only at its end."""


class HeartbeatHistory:
    """The heartbeats of one epoch. Times are on the engine's monotonic clock unless noted."""

    def __init__(self) -> None:
        self.count = 0
        """Pairs of heartbeats received by this ledger."""
        self.passes_advanced = False
        """Whether the scheduler went over its queue between the last two heartbeats."""
        self.passed_ns = 0
        self.slept_since_ns = self.slept_until_ns = 0
        """The last time in which no pass was made and no step ran: from the last pass known before it, until the last
        heartbeat in it.
        """
        self.other_step_ns = 0
        """When a heartbeat last reported another step in flight than the last one does, or none."""
        self._pauses: deque[tuple[int, int]] = deque(maxlen=PAUSES)
        """From when a heartbeat was due until it came. The whole process did not run: it was stopped, or its machine
        was, or had no processor for it.
        """
        self.polled_ns = 0
        self.polled_at = UNKNOWN_POSITION
        """Where a heartbeat last reported polls of the KV connector since the one before."""
        self.late_sends = LateSends()
        self.queue_lengths: deque[QueueLength] = deque(maxlen=QUEUE_LENGTHS)
        """The lengths at the last heartbeats, with only the latest heartbeat of each pass: until a pass ends, the
        stream lacks its events, however many heartbeats come.
        """

    def add(
        self,
        before: Heartbeat | None,
        last: Heartbeat | None,
        wall_ns: int,
        at: int,
        asks_in_passes: bool,
        ended: Iterable[OutsideWait] = (),
    ) -> None:
        """Note a heartbeat that came at `wall_ns` and stands at `at` in the stream.

        asks_in_passes: the engine polls its connector in each pass, as vLLM does. Earlier probes counted only answers,
        of which there are none where vLLM's executor is in the engine's process. ended: recent transfers that ended,
        none while the engine is paused.
        """
        if last is None:
            return
        passed = before is not None and last.scheduler_passes > before.scheduler_passes
        if before is not None:
            self.count += 1
            self.passes_advanced = passed
            if passed:
                self.passed_ns = before.at_ns
            elif last.step_in_flight < 0 and before.step_in_flight < 0:
                self.slept_since_ns, self.slept_until_ns = self.passed_ns, last.at_ns
            if last.step_in_flight != before.step_in_flight:
                self.other_step_ns = before.at_ns
            if last.at_ns - before.at_ns >= PAUSE_NS:
                self._pauses.append((before.at_ns + INTERVAL_NS, last.at_ns))
            if _in_the_same_pass(before, last):
                self.queue_lengths.pop()
        self.queue_lengths.append(QueueLength(wall_ns, last.running + last.waiting, last.step_in_flight >= 0))
        polled = before is None or last.connector_polls != before.connector_polls or (asks_in_passes and passed)
        if before is not None:
            self.late_sends.look(before, last, polled, at, ended)
        if polled:
            self.polled_ns, self.polled_at = last.at_ns, at

    def paused_s(self, since_ns: int) -> float:
        """Return for how long the whole process did not run since then. What it was doing took no part of that time."""
        return sum(max(0, until_ns - max(from_ns, since_ns)) for from_ns, until_ns in self._pauses) / 1e9


def _in_the_same_pass(before: Heartbeat, last: Heartbeat) -> bool:
    """Return whether the pass of the heartbeat before still runs: in its step, or with requests queued and no step."""
    if last.step_in_flight != before.step_in_flight:
        return False
    hangs = 0 < last.scheduler_passes == before.scheduler_passes and last.running + last.waiting > 0
    return last.step_in_flight >= 0 or hangs
