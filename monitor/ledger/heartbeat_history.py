"""The heartbeats in a row: whether the scheduler makes passes, and whether it polls its connector."""

from __future__ import annotations

from collections import deque
from typing import Final

from kvscope.monitor.state.records import UNKNOWN_POSITION, Heartbeat

QUEUE_LENGTHS: Final = 8


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
        self.queue_lengths: deque[tuple[int, int]] = deque(maxlen=QUEUE_LENGTHS)
        """When each of the last heartbeats came (wall), and how many requests the engine's own queues held."""

    def add(
        self, before: Heartbeat | None, last: Heartbeat | None, wall_ns: int, at: int, asks_in_passes: bool
    ) -> None:
        """Note a heartbeat that came at `wall_ns` and stands at `at` in the stream.

        asks_in_passes: the engine polls its connector in each pass, as vLLM does. Earlier probes counted only answers,
        of which there are none where vLLM's executor is in the engine's process.
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
        self.queue_lengths.append((wall_ns, last.running + last.waiting))
        if before is None or last.connector_polls != before.connector_polls or (asks_in_passes and passed):
            self.polled_ns, self.polled_at = last.at_ns, at
