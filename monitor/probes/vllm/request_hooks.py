"""Hooks on what the scheduler does with one request: arrivals, ends, preemptions, transfers."""

from __future__ import annotations

from typing import Any, Final

from ...contract import trace_context
from ...contract.event_log import Clock
from ...contract.kinds import Cause, Holder, Load, Preempt, Release, Status
from ...contract.wire import NO_REQUEST
from .emitter import Emitter
from .hooks import Hooks
from .owner import beneficiary
from .probe_state import BLOCKED_STATUSES, ProbeState, status_of
from .vllm_description import expired_leases, lease_ns, workers

RELEASE_BY_STATUS: Final = {Status.FINISHED_ABORTED: Release.ABORTED, Status.FINISHED_ERROR: Release.ERROR}


class RequestHooks:
    """Reports what becomes of each request of `state`."""

    def __init__(self, state: ProbeState, emitter: Emitter, clock: Clock) -> None:
        self._state = state
        self._emitter = emitter
        self._clock_ns = clock.monotonic_ns
        self._lease_ns = lease_ns(state.scheduler)
        self._workers = workers(state.scheduler)
        self._expired: frozenset[str] = frozenset()
        """Requests whose leases ended, by the connector's last report."""

    def wrap(self, hooks: Hooks) -> None:
        """Install the hooks."""
        scheduler, wrap = self._state.scheduler, hooks.wrap
        wrap(scheduler, "add_request", after=self._added)
        wrap(scheduler, "finish_requests", self._emitter.expire_time)
        if not wrap(scheduler, "_preempt_request", self._preempt, self._preempted):
            wrap(self._state.manager, "free", self._preempt_by_free, self._preempted_by_free)
        wrap(scheduler, "_free_request", self._finish, self._finished)
        wrap(scheduler, "_free_blocks", self._free, self._freed)
        wrap(scheduler, "_handle_stopped_request", after=self._stopped)
        wrap(scheduler, "_update_from_kv_xfer_finished", self._transfers)

    # ---------------------------------------------------------------- arrivals

    def _added(self, _: None, request: Any) -> None:
        state, emitter = self._state, self._emitter
        request_id = request.request_id
        if request_id in state.numbers:
            self._session_goes_on(request_id)
            return
        if request_id not in state.scheduler.requests:
            return  # the end of a session that waited: it is over by now
        emitter.write_notes()
        number = state.track(request_id)
        emitter.all_numbers = []
        emitter.eventful = True
        prompt = request.num_prompt_tokens
        longest = min(prompt + request.max_tokens, state.scheduler.max_model_len)
        emitter.log.arrived(  # which carries its own time
            number,
            state.name(request_id),
            prompt,
            request.max_tokens,
            request.priority,
            state.needed.from_scratch(prompt),
            state.needed.from_scratch(longest),
        )
        trace = trace_context.parse_traceparent((getattr(request, "trace_headers", None) or {}).get("traceparent"))
        if trace is not None:
            emitter.log.traced(number, trace)
        emitter.log.queued(number, Cause.NEW)
        self.block(request)
        if not state.scheduler.running:
            emitter.flush()  # the pass that follows may never return

    def _session_goes_on(self, request_id: str) -> None:
        request, _ = self._state.blocked.get(request_id, (None, None))
        if request is not None and status_of(request) == Status.WAITING:
            self.unblock(request_id)

    def _stopped(self, finished: bool, request: Any) -> None:
        if finished:
            return
        if status_of(request) == Status.WAITING_FOR_STREAMING_REQ:
            self.block(request)
        else:
            self._emitter.stamped.queued(self._state.numbers[request.request_id], Cause.NEW)

    def block(self, request: Any) -> None:
        """If it waits for something outside the scheduler, report it, once."""
        status = status_of(request)
        if status in BLOCKED_STATUSES and request.request_id not in self._state.blocked:
            self._state.blocked[request.request_id] = request, status
            self._state.passed_over.pop(request.request_id, None)
            self._emitter.stamped.waiting_on(self._state.numbers[request.request_id], status)

    def unblock(self, request_id: str) -> None:
        """Note that it no longer waits for that."""
        del self._state.blocked[request_id]
        self._state.passed_over.pop(request_id, None)
        self._emitter.stamped.ready(self._state.numbers[request_id])

    def unblock_ready(self) -> None:
        """Report requests whose status shows that their wait is over. One pass may find them another wait."""
        blocked = self._state.blocked
        for request_id, (request, status) in [*blocked.items()]:
            if status_of(request) != status:
                self.unblock(request_id)

    def progressed(self, requests: list[Any]) -> None:
        """Report how far these are."""
        state = self._state
        self._emitter.write_notes()
        if requests:
            numbers = state.numbers
            if state.counts_in_flight:  # as `computed` has it, without a call for each
                computed = [max(0, r.num_computed_tokens - r.num_in_flight_tokens) for r in requests]
            else:
                computed = [state.computed(r) for r in requests]
            outputs = [r.num_output_tokens for r in requests]
            self._emitter.log.progressed([numbers[r.request_id] for r in requests], computed, outputs)

    # ---------------------------------------------------------------- ends

    def _finish(self, request: Any, *_args: Any, **_kwargs: Any) -> None:
        status, number = status_of(request), self._state.numbers[request.request_id]
        self.progressed([request])
        self._emitter.stamped.finished(number, status)
        self._state.release_reason = RELEASE_BY_STATUS.get(status, Release.FINISHED)

    def _finished(self, _: Any, request: Any, *_args: Any, **_kwargs: Any) -> None:
        state = self._state
        state.release_reason = None
        request_id = request.request_id
        for kept in (state.blocked, state.without_token, state.passed_over):
            kept.pop(request_id, None)
        state.preempted.discard(request_id)
        if request_id not in state.scheduler.requests:
            return
        deadline = self._clock_ns() + self._lease_ns if self._lease_ns > 0 else self._lease_ns
        state.deferred[request_id] = deadline
        blocks = state.blocks_of(request_id)
        if blocks:
            number = state.numbers[request_id]
            self._emitter.stamped.free_deferred(number, blocks, Holder.CONNECTOR, lease_deadline_ns=deadline)

    def _free(self, request: Any) -> None:
        if request.request_id in self._expired:
            self._state.release_reason = Release.LEASE_EXPIRED
        elif request.request_id in self._state.deferred:
            self._emitter.stamped.completion_delivered(self._state.numbers[request.request_id])
            self._state.release_reason = Release.TRANSFER_DONE

    def _freed(self, _: None, request: Any) -> None:
        """Log the last event of a request."""
        state = self._state
        self._emitter.write_notes()
        self._emitter.all_numbers = []
        if state.deferred.pop(request.request_id, None) is not None:
            state.release_reason = None
        state.forget(request.request_id)

    # ---------------------------------------------------------------- preemptions and transfers

    def _preempt(self, request: Any, *_args: Any, **_kwargs: Any) -> None:
        state, emitter = self._state, self._emitter
        number, blocks = state.numbers[request.request_id], len(state.blocks_of(request.request_id))
        reason, for_number = Preempt.RESET, NO_REQUEST
        found = beneficiary()
        if found is not None:
            winner, tokens = found
            reason = Preempt.PRIORITY if request.priority > winner.priority else Preempt.KV_BLOCKS
            for_number = state.numbers[winner.request_id]
            free = state.free_queue.num_free_blocks
            needed = max(free + 1, state.needed.to_grow(winner, tokens))
            emitter.stamped.allocation_failed(for_number, needed, free)
            state.preempted_in_pass = True
        self.progressed([request])
        emitter.stamped.preempted(number, reason, for_number, blocks, request.num_computed_tokens)
        state.release_reason = Release.PREEMPTED

    def _preempted(self, _: None, request: Any, *_args: Any, **_kwargs: Any) -> None:
        state = self._state
        state.release_reason = None
        state.preempted.add(request.request_id)
        state.passed_over.pop(request.request_id, None)
        self._emitter.stamped.queued(state.numbers[request.request_id], Cause.PREEMPTED, at_front=True)

    def _preempt_by_free(self, request: Any) -> None:
        """Up to 0.11 `schedule` itself preempts, and frees no other running request: one that ends has its status."""
        if status_of(request) == Status.RUNNING and beneficiary() is not None:
            self._preempt(request)

    def _preempted_by_free(self, _: None, request: Any) -> None:
        if self._state.release_reason == Release.PREEMPTED:
            self._preempted(None, request)

    def _transfers(self, kv_connector_output: Any) -> None:
        """Log the connector's report, before the scheduler acts on it."""
        scheduler = self._state.scheduler
        sent = kv_connector_output.finished_sending
        if sent or self._expired:
            # The workers say which are no longer needed, and of how many of them the lease expired: of all, or unknown.
            every = expired_leases(kv_connector_output) == len(sent or ()) * self._workers
            self._expired = frozenset(sent or ()) if every else frozenset()
        for request_id in kv_connector_output.finished_recving or ():
            request = scheduler.requests.get(request_id)  # early releases drop it if aborted
            if request is not None and status_of(request) == Status.WAITING_FOR_REMOTE_KVS:
                failed = request_id in getattr(scheduler, "failed_recving_kv_req_ids", ())
                outcome = Load.FAILED if failed else Load.DELIVERED
                number = self._state.numbers[request_id]
                self._emitter.stamped.remote_load(number, outcome, request.num_computed_tokens)
