"""The event stream of an engine: where it is published."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvscope.monitor.events.event_log import EventLog
from kvscope.monitor.publishing.packer import Vitals
from kvscope.monitor.publishing.publisher import ENGINE_RING_BYTES, Publisher
from kvscope.monitor.publishing.stall_capture import StallCapture, stacks_enabled


@dataclass(frozen=True)
class EventStream:
    """The endpoint and identity under which an engine publishes its events."""

    engine: str
    events: str
    replay: str
    journal: Path | None = None
    ring_bytes: int = ENGINE_RING_BYTES

    def publisher(self, log: EventLog, vitals: Callable[[], Vitals], thread: Callable[[], int | None]) -> Publisher:
        """Bind the stream's sockets. `thread` is the engine's, once it runs. Raises what Publisher raises."""
        return Publisher(
            log,
            self.engine,
            vitals,
            events=self.events,
            replay=self.replay,
            journal_dir=self.journal,
            ring_bytes=self.ring_bytes,
            stacks=StallCapture(log, thread) if stacks_enabled() else None,
        )
