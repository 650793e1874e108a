"""Reads vLLM's own tables out to the event stream, a slice between two steps, so that no step waits for a walk."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Final

from kvscope.monitor.events.event_log import EventLog
from kvscope.monitor.events.kinds import Holder, Status
from kvscope.monitor.events.wire import PINS
from kvscope.monitor.probes.vllm.probe_state import STATUS_BY_NAME, ProbeState

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
