"""Why the scheduler passed requests over in a pass, and what kept the step from being larger.

vLLM does not report its reasons. They follow from the order in which `schedule` checks them, from what the pass left
behind, and from what it asked the cache and the connector for: hooks on those two calls note the answers. Anything else
is reported as unknown.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, Final

from ...contract.kinds import Cause, Limit, Status
from .emitter import Emitter
from .hooks import Hooks
from .probe_state import ProbeState

MAX_INSPECTED: Final = 64
"""Waiting requests that are inspected in a pass: those that can be skipped come first."""
LIMIT_BY_CAUSE: Final = {
    Cause.PREEMPTION_IN_STEP: Limit.KV,
    Cause.KV_BLOCKS: Limit.KV,
    Cause.TOKEN_BUDGET: Limit.TOKENS,
    Cause.MAX_NUM_SEQS: Limit.SEQUENCES,
    Cause.ENCODER: Limit.ENCODER,
    Cause.ZERO_TOKENS: Limit.TOKENS,
    Cause.PAUSED: Limit.PAUSED,
    Cause.UNKNOWN: Limit.UNKNOWN,
}


class WaitCauses:
    """Finds the causes for the requests of `state`."""

    def __init__(self, state: ProbeState, emitter: Emitter) -> None:
        self._state = state
        self._emitter = emitter
        scheduler = self._scheduler = state.scheduler
        self._slots: int = getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs)
        self._sessions_take_slots = hasattr(scheduler, "max_num_active_reqs")
        self._max_tokens: int = scheduler.max_num_scheduled_tokens
        lora = getattr(scheduler, "lora_config", None)
        self._max_loras: int = lora.max_loras if lora else 0
        self._by_priority = getattr(getattr(scheduler, "policy", None), "name", "") == "PRIORITY"
        self._shortage: tuple[str, int, int] | None = None

    def wrap(self, hooks: Hooks) -> None:
        """Install the hooks."""
        hooks.wrap(self._state.manager, "get_computed_blocks", after=self._looked_up)
        hooks.wrap(self._state.manager, "get_computed_blocks_for_connector", after=self._looked_up)
        hooks.wrap(self._scheduler, "_try_schedule_encoder_inputs", after=self._encoded)
        for queue in self._state.queues():
            hooks.wrap(queue, "pop_request", after=self._popped)
        if getattr(self._scheduler, "connector", None) is not None:
            hooks.wrap(self._scheduler.connector, "get_num_new_matched_tokens", after=self._matched)

    def _looked_up(self, result: tuple[Any, ...], request: Any) -> None:
        self._state.lookups[request.request_id] = result[0].blocks, result[1]

    def _popped(self, request: Any) -> None:
        self._state.popped.add(request.request_id)

    def _encoded(self, result: tuple[Any, int, int], request: Any) -> None:
        if result[1] == 0:  # of the tokens that the step was to compute of it, none come before the next image
            self._state.without_encoder.add(request.request_id)

    def _matched(self, result: tuple[int | None, bool], request: Any) -> None:
        self._state.matches[request.request_id] = result[0]

    def inspect(self, scheduled: dict[str, int], tokens: int, admitted: list[str]) -> Limit:
        """Report the cause of each request that was passed over and could have run, as far as the pass shows it.

        scheduled: tokens by request id. tokens: their sum. admitted: who of them began to run in this pass.
        """
        scheduler = self._scheduler
        if len(scheduled) < len(scheduler.running):
            self._running_without_tokens(scheduled, tokens)
        before = tokens - sum(scheduled.get(request_id, 0) for request_id in admitted)
        others = len(scheduler.running) - len(admitted)
        if self._state.blocked:
            self._ready_but_not_seen(self._closed(before, others, False))
        waiting = itertools.islice(self._waiting(), MAX_INSPECTED)
        for request, holds_blocks in waiting:
            request_id = request.request_id
            if request_id in self._state.blocked or request_id not in self._state.numbers:
                continue
            if (closed := self._closed(before, others, holds_blocks)) is not None:
                self._pass_over(request, closed)
                return LIMIT_BY_CAUSE[closed]
            if request_id in self._state.popped:
                self._pass_over(request, self._skipped(request, scheduled))
                continue
            cause = self._closed(tokens, len(scheduler.running), holds_blocks) or self._refused(request, tokens)
            self._pass_over(request, cause)
            return LIMIT_BY_CAUSE[cause]
        return Limit.DEFERRED if any(self._state.queues()) else Limit.NONE

    # ---------------------------------------------------------------- the causes, in the order of vLLM's checks

    def _closed(self, tokens: int, running: int, holds_blocks: bool) -> Cause | None:
        """Why a pass with so many tokens given and requests running takes no request from this queue.

        holds_blocks: it is the queue of those that hold blocks, which some releases serve in a pause too.
        """
        mode = self._mode()
        if mode == "PAUSED_ALL":
            return Cause.PAUSED
        if self._state.preempted_in_pass:
            return Cause.PREEMPTION_IN_STEP
        if mode == "PAUSED_NEW" and not holds_blocks:
            return Cause.PAUSED
        if tokens >= self._max_tokens:
            return Cause.TOKEN_BUDGET
        sessions = self._scheduler.num_waiting_for_streaming_input if self._sessions_take_slots else 0
        return Cause.MAX_NUM_SEQS if running + sessions >= self._slots else None

    def _mode(self) -> str:
        mode = getattr(self._scheduler, "_pause_state", None)
        return "UNPAUSED" if mode is None else str(mode.name)

    def _skipped(self, request: Any, scheduled: dict[str, int]) -> Cause:
        """Why the pass, which had taken this request from its queue, put it back and went on to the next."""
        if getattr(request, "num_stale_output_tokens", 0) and not request.drop_stale_output:
            return Cause.STEP_IN_FLIGHT
        lora = getattr(request, "lora_request", None)
        if self._max_loras and lora is not None:
            running = [r for r in self._scheduler.running if r.request_id in scheduled and r.lora_request]
            in_use = {r.lora_request.lora_int_id for r in running}
            if len(in_use) >= self._max_loras and lora.lora_int_id not in in_use:
                return Cause.LORA
        if request.request_id in self._state.without_encoder:
            return Cause.ENCODER
        return Cause.CONNECTOR if self._state.matches.get(request.request_id, 0) is None else Cause.UNKNOWN

    def _refused(self, request: Any, tokens: int) -> Cause:
        """Return the reason why the scheduling pass stopped at this request after trying to admit it."""
        state, request_id = self._state, request.request_id
        if request_id in state.without_encoder:
            return Cause.ENCODER
        budget = self._max_tokens - tokens
        free = state.free_queue.num_free_blocks if state.free_before_copies is None else state.free_before_copies
        hit = state.lookups.get(request_id, (state.needed.no_blocks, 0))
        external = state.matches.get(request_id) or 0
        if not external and not state.needed.chunk(request, budget, hit[1]):
            return Cause.ZERO_TOKENS
        needed = state.needed.to_admit(request, budget, hit, external)
        if needed > free:
            if self._shortage != (request_id, needed, free):
                self._shortage = request_id, needed, free
                self._emitter.stamped.allocation_failed(state.numbers[request_id], needed, free)
            return Cause.KV_BLOCKS
        return Cause.UNKNOWN

    def _running_without_tokens(self, scheduled: dict[str, int], tokens: int) -> None:
        paused = self._mode() == "PAUSED_ALL"
        later_scheduled = False  # a pass gives tokens in the order of this list: then some were left for this one
        for request in reversed(self._scheduler.running):
            if request.request_id in scheduled:
                later_scheduled = True
                continue
            if self._state.in_flight(request):
                continue
            if paused:
                cause = Cause.PAUSED
            elif tokens >= self._max_tokens and not later_scheduled:
                cause = Cause.TOKEN_BUDGET
            else:
                without = request.request_id in self._state.without_encoder
                cause = Cause.ENCODER if without else Cause.ZERO_TOKENS
            self._pass_over(request, cause)

    def _ready_but_not_seen(self, closed: Cause | None) -> None:
        """Report requests whose wait is over, and that vLLM promotes only when it reaches them.

        One that this pass took from its queue and put back was reached, and left as it was: it stands behind no head.
        """
        fetched = getattr(self._scheduler, "finished_recving_kv_req_ids", ())
        for request, status in list(self._state.blocked.values()):
            remote = status == Status.WAITING_FOR_REMOTE_KVS and request.request_id in fetched
            if request.request_id in self._state.popped:
                continue
            if remote or (status == Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR and _has_grammar(request)):
                self._pass_over(request, closed or Cause.BEHIND_HEAD)

    # ---------------------------------------------------------------- the queues

    def _waiting(self) -> Iterable[tuple[Any, bool]]:
        """Yield waiting requests in the order in which the scheduler takes them, and whether they come from the queue
        of those that hold blocks.
        """
        queues = dict(zip(self._state.queue_names, self._state.queues(), strict=True))
        first = queues.pop("kv_holding_waiting", ())
        yield from ((request, True) for request in first)
        others = [queue for queue in queues.values() if queue]
        if len(others) > 1 and self._by_priority:
            yield from ((request, False) for request in heapq.merge(*others))
        else:
            yield from ((request, False) for queue in others for request in queue)

    def _pass_over(self, request: Any, cause: Cause) -> None:
        """Report a state, not an event a step: when the cause changes, and as the count doubles.

        A request that has run since is passed over anew: readers dropped the cause when it made progress.
        """
        passed_over, computed = self._state.passed_over, request.num_computed_tokens
        before, computed_before, times = passed_over.get(request.request_id, (cause, computed, 0))
        times = times + 1 if (before, computed_before) == (cause, computed) else 1
        passed_over[request.request_id] = cause, computed, times
        if times & (times - 1) == 0:
            self._emitter.stamped.not_scheduled(self._state.numbers[request.request_id], cause, times)


def _has_grammar(request: Any) -> bool:
    """Whether its grammar is compiled or has failed to. Asking vLLM would wait for it."""
    grammar = getattr(request.structured_output_request, "_grammar", None)
    return grammar.done() if isinstance(grammar, Future) else grammar is not None
