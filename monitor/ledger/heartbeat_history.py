"""The heartbeats in a row: whether the scheduler makes passes, and whether it polls its connector."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

from kvscope.monitor.ledger.late_sends import LateSends
from kvscope.monitor.state.outside_waits import OutsideWait
from kvscope.monitor.state.records import UNKNOWN_POSITION, Heartbeat

QUEUE_LENGTHS: Final = 8


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
            if _in_the_same_pass(before, last):
                self.queue_lengths.pop()
        self.queue_lengths.append(QueueLength(wall_ns, last.running + last.waiting, last.step_in_flight >= 0))
        polled = before is None or last.connector_polls != before.connector_polls or (asks_in_passes and passed)
        if before is not None:
            self.late_sends.look(before, last, polled, at, ended)
        if polled:
            self.polled_ns, self.polled_at = last.at_ns, at


def _in_the_same_pass(before: Heartbeat, last: Heartbeat) -> bool:
    """Return whether the pass of the heartbeat before still runs: in its step, or with requests queued and no step."""
    if last.step_in_flight != before.step_in_flight:
        return False
    hangs = 0 < last.scheduler_passes == before.scheduler_passes and last.running + last.waiting > 0
    return last.step_in_flight >= 0 or hangs
