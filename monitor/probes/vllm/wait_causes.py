"""Why the scheduler passed requests over in a pass, and what kept the step from being larger."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from typing import Any

from kvscope.monitor.events.kinds import Cause, Limit
from kvscope.monitor.probes.vllm.emitter import Emitter
from kvscope.monitor.probes.vllm.probe_state import ProbeState


class WaitCauses:
    """Finds the causes for the requests of `state`."""

    def __init__(self, state: ProbeState, emitter: Emitter) -> None:
        self._state = state
        self._emitter = emitter
        scheduler = state.scheduler
        self._max_running = scheduler.max_num_running_reqs
        self._max_tokens = scheduler.max_num_scheduled_tokens
        self._pauses = hasattr(scheduler, "_pause_state")
        self._shortage: tuple[str, int, int] | None = None

    def inspect(self, scheduled: dict[str, int], tokens: int) -> Limit:
        """Report the cause of each running request without tokens, and of the first waiting one that could run."""
        state = self._state
        scheduler = state.scheduler
        if len(scheduled) < len(scheduler.running):
            cause = Cause.TOKEN_BUDGET if tokens >= self._max_tokens else Cause.ZERO_TOKENS
            for request in scheduler.running:
                if request.request_id not in scheduled and not state.in_flight(request):
                    self._pass_over(request, cause)
        head = self._head()
        if head is None:
            return Limit.DEFERRED if any(state.queues()) else Limit.NONE
        if state.preempted_in_pass:
            self._pass_over(head, Cause.PREEMPTION_IN_STEP)
            return Limit.KV
        if self._pauses and scheduler._pause_state.name != "UNPAUSED":
            self._pass_over(head, Cause.PAUSED)
            return Limit.NONE
        if tokens >= self._max_tokens:
            self._pass_over(head, Cause.TOKEN_BUDGET)
            return Limit.TOKENS
        if len(scheduler.running) >= self._max_running:
            self._pass_over(head, Cause.MAX_NUM_SEQS)
            return Limit.SEQUENCES
        needed = state.blocks_for(head.num_tokens) - len(state.blocks_of(head.request_id))
        free = state.free_queue.num_free_blocks
        if needed <= free and getattr(head, "has_encoder_inputs", False):
            self._pass_over(head, Cause.ENCODER)
            return Limit.ENCODER
        if self._shortage != (head.request_id, needed, free):
            self._shortage = head.request_id, needed, free
            self._emitter.stamped.allocation_failed(state.numbers[head.request_id], needed, free)
        self._pass_over(head, Cause.KV_BLOCKS)
        return Limit.KV

    def _head(self) -> Any:
        """The first in the queues that does not wait for something else; only the very first under a priority."""
        state = self._state
        for queue in state.queues():
            waiting: Iterable[Any] = itertools.islice(queue, 64) if isinstance(queue, deque) else _peek(queue)
            for request in waiting:
                if request.request_id not in state.blocked and request.request_id in state.numbers:
                    return request
        return None

    def _pass_over(self, request: Any, cause: Cause) -> None:
        """A state, not an event a step: reported when the cause changes, and as the count doubles."""
        passed_over = self._state.passed_over
        before, times = passed_over.get(request.request_id, (cause, 0))
        times = times + 1 if before == cause else 1
        passed_over[request.request_id] = cause, times
        if times & (times - 1) == 0:
            self._emitter.stamped.not_scheduled(self._state.numbers[request.request_id], cause, times)


def _peek(queue: Any) -> list[Any]:
    return [queue.peek_request()] if queue else []
