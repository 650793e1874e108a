"""Audits a vLLM that makes no passes, from the drain thread: its own thread waits for a request and reads out nothing.

A request may come while the tables are read. They are kept until the next heartbeat, and handed over only if nothing
has happened since they were begun: whatever had changed them in between has been reported by then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvscope.monitor.events.event_log import EventLog
from kvscope.monitor.probes.vllm.emitter import Emitter
from kvscope.monitor.probes.vllm.probe_state import ProbeState
from kvscope.monitor.probes.vllm.table_reader import Auditor

NS_A_BLOCK: Final = 500_000
"""Half a microsecond to read a block, a thousand times: no more of the time is spent, however often it falls idle."""


class IdleAudit:
    """Audits the engine of `state` when it falls idle. passes: how many it has made."""

    def __init__(self, state: ProbeState, emitter: Emitter, passes: Callable[[], int]) -> None:
        self._state = state
        self._emitter = emitter
        self._passes = passes
        self._cycles = self._next_ns = 0
        self._read: EventLog | None = None
        self._read_at: tuple[int, ...] = ()
        """The mark of the engine while the tables that are kept were read."""
        self._audited_at: tuple[int, ...] = ()
        """Its mark at the last audit: it is not audited again before something happens."""

    def check(self, idle: bool) -> None:
        """Read the tables of an idle engine, or hand over what was read at the last heartbeat."""
        mark, kept = self._mark(), self._read
        self._read = None
        now = self._emitter.log.clock.monotonic_ns()
        if not idle or mark == self._audited_at:
            return
        if kept is not None and mark == self._read_at:
            self._hand_over(kept, mark)
        elif now >= self._next_ns:
            self._next_ns = now + self._state.pool.num_gpu_blocks * NS_A_BLOCK
            self._read, self._read_at = self._read_tables(mark), mark

    def _mark(self) -> tuple[int, ...]:
        """Return what differs once anything has happened to the engine."""
        emitter = self._emitter
        return self._passes(), emitter.log.flushes, len(emitter.notes), len(self._state.scheduler.requests)

    def _read_tables(self, mark: tuple[int, ...]) -> EventLog | None:
        """Return a log with a whole cycle, or None if something happened meanwhile."""
        log = EventLog(self._emitter.log.clock)
        self._cycles += 1
        try:
            for _ in Auditor(self._state, log).cycle(self._cycles):
                if self._mark() != mark:
                    return None
        except Exception:  # a table changed while it was read; and no audit may cost the heartbeat that asks for it
            return None
        return log

    def _hand_over(self, kept: EventLog, mark: tuple[int, ...]) -> None:
        log, step = self._emitter.log, self._state.step - 1
        kept.dropped_batches, kept.dropped_events = log.dropped_batches, log.dropped_events
        kept.flush(step, step, self._state.counts())
        audit = kept.flushed.popleft()
        log.flushed.append(audit)
        self._audited_at = mark
        if self._mark() != mark:  # events of a later time may stand before it
            log.flushed.remove(audit)
            self._audited_at = ()
