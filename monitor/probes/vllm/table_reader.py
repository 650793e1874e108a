"""Audits: reads vLLM's own tables out to the event stream, a slice between two steps, so that no step waits for a walk.

A vLLM that makes no passes is audited from the drain thread: its own thread waits for a request. One may come while the
tables are read. They are kept until the next heartbeat, and handed over only if nothing has happened since they were
begun: whatever had changed them in between has been reported by then. QueueCheck looks for unfinished requests in none
of the scheduler's queues: these are never scheduled again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Final

from ...contract.event_log import EventLog
from ...contract.kinds import Holder, Status
from ...contract.wire import PINS
from .emitter import Emitter
from .probe_state import STATUS_BY_NAME, ProbeState, status_of

BLOCKS_A_SLICE = 8
"""A block takes half a microsecond to read."""
SLICES_A_CYCLE: Final = 1000
"""At most, about: some seconds of steps for the largest pools."""


class Auditor:
    """Audits the engine of `state`."""

    def __init__(self, state: ProbeState, log: EventLog) -> None:
        self._state = state
        self._log = log
        self._blocks_a_slice = max(BLOCKS_A_SLICE, state.pool.num_gpu_blocks // SLICES_A_CYCLE)
        self._slices = self._forever()

    def slices(self, count: int) -> None:
        """Read out so many slices, at least one and at most a cycle. After the last one a new cycle begins."""
        for _ in range(min(max(count, 1), SLICES_A_CYCLE)):
            next(self._slices)

    def _forever(self) -> Iterator[None]:
        for cycle in count(1):
            yield from self.cycle(cycle)

    def cycle(self, cycle: int) -> Iterator[None]:
        """Read out everything once, under this number, and yield after each slice."""
        state, log = self._state, self._log
        log.audit_begin(cycle)
        yield
        for first in range(1, state.pool.num_gpu_blocks, self._blocks_a_slice):
            blocks = state.pool.blocks[first : first + self._blocks_a_slice]
            log.audit_blocks(
                first,
                [
                    block.ref_cnt * 4 + (2 if block.next_free_block is not None else 0) + (block.block_hash is not None)
                    for block in blocks
                ],
            )
            yield
        reported = read = 0
        for request_id in list(state.scheduler.requests):
            blocks = state.blocks_of(request_id)
            reported += self._request(request_id, blocks)
            read += 1 + len(blocks)
            if read >= self._blocks_a_slice:
                read = 0
                yield
        self._detached()
        free, cached_idle, used, _ = state.counts()
        log.audit_end(cycle, free, cached_idle, used, reported)
        yield

    def _request(self, request_id: str, blocks: list[int]) -> bool:
        """Whether there was something to report: a finished request without blocks is over for everyone but vLLM."""
        state = self._state
        request = state.scheduler.requests.get(request_id)
        number = state.numbers.get(request_id)
        if request is None or number is None:
            return False
        lease = state.deferred.get(request_id)
        if lease is not None and not blocks:
            return False
        self._log.audit_request(
            number,
            state.name(request_id),
            STATUS_BY_NAME[request.status.name],
            state.computed(request),
            request.num_output_tokens,
            blocks,
            holder=0 if lease is None else Holder.CONNECTOR,
            lease_deadline_ns=lease or 0,
        )
        return True

    def _detached(self) -> None:
        """Blocks that left their table and wait for a step in flight."""
        by_request: dict[int, list[int]] = {}
        for block, former in self._state.detached.items():
            for number, _ in former:
                by_request.setdefault(number, []).append(block)
        for number, blocks in by_request.items():
            self._log.audit_request(
                number,
                f"#{number}",
                Status.FINISHED_ABORTED,
                0,
                0,
                blocks,
                holder=Holder.FENCE,
                fence=self._state.step - 1,
                detached=True,
            )
        if pins := [*self._state.pins]:
            status = Status.FINISHED_STOPPED
            self._log.audit_request(
                PINS, "pinned", status, 0, 0, pins, holder=Holder.PIN, lease_deadline_ns=-1, detached=True
            )


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


CHECKS: Final = 3
"""A request on its way between two queues is in none for microseconds, not at so many heartbeats in a row."""


class QueueCheck:
    """Checks the requests of `state` from the drain thread, while the engine works or sleeps."""

    def __init__(self, state: ProbeState, log: EventLog) -> None:
        self._state = state
        self._log = log
        self._missing: dict[str, int] = {}
        """Requests that were in no queue at the last check, and at how many in a row."""

    def check(self, queued: int) -> None:
        """Report a request at the third heartbeat in a row at which it is in no queue. queued: how many are in one.

        The names are compared only if there are more unfinished requests than that.
        """
        state = self._state
        if len(state.numbers) - len(state.deferred) <= queued:
            self._missing.clear()
            return
        try:
            known = {request.request_id for request in list(state.scheduler.running)}
            for queue in state.queues():
                known.update(request.request_id for request in list(queue))
            unfinished = [name for name in list(state.numbers) if name not in known and name not in state.deferred]
        except RuntimeError:  # a queue changed while it was read: the next heartbeat sees
            return
        self._missing = {name: self._missing.get(name, 0) + 1 for name in unfinished}
        for name, times in self._missing.items():
            request, number = state.scheduler.requests.get(name), state.numbers.get(name)
            if times == CHECKS and request is not None and number is not None and not request.is_finished():
                self._log.not_queued(number, status_of(request))
