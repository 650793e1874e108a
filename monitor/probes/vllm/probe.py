"""The probe: hooks into one vLLM scheduler, its cache manager and its block pool, and says what they do.

Everything runs in the engine's own thread, where vLLM does the thing that is said, so events are in the order of what
happened. What happens at every step is kept short; all else hangs on calls that vLLM makes for few requests a step.

    hook                              what it says
    ------------------------------    -------------------------------------------------------------------------------
    Scheduler.add_request             arrived, queued, waiting on a grammar; a streaming session goes on
    Scheduler.schedule                step launched, looked up, admitted, waiting on remote KV, ready; passed over
    Scheduler.update_from_output      first token, progressed, step completed; then a slice of the audit
    Scheduler._preempt_request        allocation failed, preempted, queued
    KVCacheManager.free               the same, in releases up to 0.11, which preempt within `schedule`
    Scheduler._free_request           finished; free deferred, if the blocks are still there afterwards
    Scheduler._free_blocks            completion delivered, for those
    Scheduler._handle_stopped_request   a streaming session waits
    Scheduler._update_from_kv_xfer_finished   remote load
    KVCacheManager.pop_blocks_for_free   detached, behind the step in flight
    BlockPool.get_new_blocks, touch, free_blocks   allocated, reused, released, reclaimed
    BlockPool.cache_full_blocks, …    cached, evicted
"""

from __future__ import annotations

import itertools
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from hashlib import blake2b
from types import CodeType
from typing import Any, Final

from kvscope.monitor.events import trace_context
from kvscope.monitor.events.event_log import Clock, EventLog
from kvscope.monitor.events.kinds import Cause, Evict, Holder, Kind, Limit, Load, Preempt, Release, Status
from kvscope.monitor.events.wire import NO_REQUEST
from kvscope.monitor.probes.vllm.hooks import Hooks
from kvscope.monitor.probes.vllm.owner import beneficiary, caller, gives
from kvscope.monitor.probes.vllm.table_reader import Auditor
from kvscope.monitor.probes.vllm.vllm_description import describe, lease_ns
from kvscope.monitor.publishing.packer import Vitals

RESERVED: Final = 1
"""vLLM's null block, which is block 0 and never handed out."""
LOOK_EVERY_NS: Final = 10_000_000
"""How often, between two steps, what was noted is said and handed over, and a slice of the audit read."""
PROGRESS_EVERY_NS: Final = 50_000_000
"""How often the tokens of running requests are said. Batches go out no more often, and the last of one counts."""
NO_STEP: Final = (-1, 0)
SUFFIX: Final = re.compile(r"-[0-9a-f]{8}$")
"""What vLLM adds to a client's request id (from 0.14 on) to make its own."""
STATUSES: Final = {status.name: status for status in Status} | {
    "WAITING_FOR_FSM": Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
}
"""By vLLM's names: its numbers shift between releases."""
BLOCKED: Final = (
    Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
    Status.WAITING_FOR_REMOTE_KVS,
    Status.WAITING_FOR_STREAMING_REQ,
)
ALLOCATED, CACHED = int(Kind.ALLOCATED), int(Kind.CACHED)
STEP_LAUNCHED, STEP_COMPLETED = int(Kind.STEP_LAUNCHED), int(Kind.STEP_COMPLETED)
_BLOCKS: Final = frozenset((ALLOCATED, CACHED))
STEP: Final = 0
"""Of a note: launched and completed, and nothing between."""
NO_LIMIT = Limit.NONE  # looked up once: a member of an enum is slow to find
RELEASES: Final = {Status.FINISHED_ABORTED: Release.ABORTED, Status.FINISHED_ERROR: Release.ERROR}


class Probe:
    """Watches `scheduler`, which has just been made, and from `start` on says what it does to `log`.

    hash_key: of the prefix hashes; random if empty. Raises AttributeError or KeyError, and has hooked nothing, if the
    scheduler is not of the shape that it knows.
    """

    def __init__(self, scheduler: Any, log: EventLog, hash_key: bytes = b"", clock: Clock = time) -> None:
        self.scheduler = scheduler
        self.manager = scheduler.kv_cache_manager
        self.pool = self.manager.block_pool
        self.log = log
        self._clock_ns = clock.monotonic_ns
        self.hooks = Hooks(self._unheard)
        self.numbers: dict[str, int] = {}
        """By vLLM's request id, which is not the one that clients know."""
        self.deferred: dict[str, int] = {}
        """Finished requests whose blocks the connector still needs, with their lease deadline (0: none)."""
        self.detached: dict[int, deque[tuple[int, Release]]] = {}
        """Blocks that wait for a step in flight to end: whose they were, and why they were freed."""
        self.hashes: dict[int, bytes] = {}
        """What the blocks in the prefix cache were said to hold: vLLM's own hashes, which the drain thread keys."""
        self.launched: deque[tuple[Any, ...]] = deque()
        """Steps whose output has not come yet: kind, number, when, of whom how many tokens, vLLM's own, the limit."""
        self._counts_in_flight = counts_in_flight()
        self._updating: object = None
        """The step whose output the scheduler was given last, where vLLM does not count what is in flight."""
        self.step = 0
        self.empty_passes = 0
        self.polls = 0
        self._names: dict[str, int] = {}
        self._next = itertools.count(1)
        log.keyed = partial(_keyed, partial(blake2b, digest_size=8, key=hash_key or os.urandom(32)))
        self._lease_ns = lease_ns(scheduler)
        self._block_sizes = [manager.block_size for manager in self.manager.coordinator.single_type_managers]
        self._max_running = scheduler.max_num_running_reqs
        self._max_tokens = scheduler.max_num_scheduled_tokens
        self._free_queue = self.pool.free_block_queue
        self._total: int = self.pool.num_gpu_blocks
        self._usable = self._total - RESERVED
        self._why: Release | None = None
        """Why blocks are freed by the call that is under way."""
        self._blocked: dict[str, Any] = {}
        self._preempted: set[str] = set()
        self._without_token: dict[str, Any] = {}
        self._gave_blocks: list[str] = []
        """Whom the pool gave blocks in this pass of the scheduler, and perhaps in some before."""
        self._giver: CodeType | None = None
        """What mostly asks the pool for blocks: a cache manager's method that has the request's id."""
        self._short = False
        """Whether somebody was preempted in it."""
        self._timed = False
        """Whether the log was told when the call under way is made."""
        self._eventful = True
        """Whether somebody has come, waits or was preempted, or anything else was said than that all decode."""
        self._passed_over: dict[str, tuple[Cause, int]] = {}
        self._shortage: tuple[str, int, int] | None = None
        self._notes: list[tuple[Any, ...]] = []
        """What happens at every step and has not been said yet, in order: a kind, and what `_catch_up` says of it."""
        self._everybody: list[int] = []
        """The numbers of all requests; empty if they may have changed."""
        self._auditor = Auditor(self)
        self._next_look_ns = self._next_progress_ns = 0
        names = ("kv_holding_waiting", "skipped_waiting", "waiting")
        self._pauses = hasattr(scheduler, "_pause_state")
        self._queue_names = [name for name in names if hasattr(scheduler, name)]

    # ---------------------------------------------------------------- what others ask

    def vitals(self) -> Vitals:
        """What heartbeats say, from the drain thread. What the front end holds beyond these is not known here."""
        launched = next(iter(tuple(self.launched)), None)
        running, waiting = len(self.scheduler.running), sum(len(queue) for queue in self._queues())
        step, since_ns = NO_STEP if launched is None else launched[1:3]
        passes = self.step + self.empty_passes
        return Vitals(step, since_ns, running, waiting, running + waiting, self.polls, passes)

    def counts(self) -> tuple[int, int, int, int]:
        """The pool's own: free, used, total; vLLM does not count cached-idle blocks (-1)."""
        free: int = self._free_queue.num_free_blocks
        return free, -1, self._usable - free, self._total

    def blocks_of(self, request_id: str) -> list[int]:
        """The request's block table, of all KV cache groups."""
        tables = [m.req_to_blocks.get(request_id, ()) for m in self.manager.coordinator.single_type_managers]
        return [block.block_id for table in tables for block in table if not block.is_null]

    def computed(self, request: Any) -> int:
        """Tokens whose KV is there: vLLM counts what steps in flight compute too."""
        total: int = request.num_computed_tokens
        return max(0, total - self._in_flight(request))

    def _in_flight(self, request: Any) -> int:
        if self._counts_in_flight:
            told: int = request.num_in_flight_tokens
            return told
        steps = (output for *_, output, _ in self.launched if output is not self._updating)
        return sum(output.num_scheduled_tokens.get(request.request_id, 0) for output in steps)

    def name(self, request_id: str) -> str:
        """The id that the client knows, unless another living request goes by it too."""
        name = SUFFIX.sub("", request_id)
        return name if self._names.get(name) == self.numbers[request_id] else request_id

    # ---------------------------------------------------------------- the beginning

    def start(self) -> None:
        """Say that the engine's life begins, and hook in."""
        description = describe(self.scheduler)
        self.log.started(self._total, RESERVED, self.scheduler.block_size, description.to_json())
        self.flush()
        scheduler, manager, pool, wrap = self.scheduler, self.manager, self.pool, self.hooks.wrap
        wrap(scheduler, "add_request", after=self._added)
        wrap(scheduler, "schedule", after=self._scheduled)
        wrap(scheduler, "update_from_output", None if self._counts_in_flight else self._update, self._updated)
        wrap(scheduler, "finish_requests", self._later)
        if not wrap(scheduler, "_preempt_request", self._preempt, self._preempted_one):
            wrap(manager, "free", self._preempt_by_free, self._preempted_by_free)
        wrap(scheduler, "_free_request", self._finish, self._finished)
        wrap(scheduler, "_free_blocks", self._free, self._freed)
        wrap(scheduler, "_handle_stopped_request", after=self._stopped)
        wrap(scheduler, "_update_from_kv_xfer_finished", self._transfers)
        wrap(manager, "pop_blocks_for_free", after=self._popped)
        wrap(pool, "get_new_blocks", after=self._allocated)
        wrap(pool, "touch", self._touched)
        wrap(pool, "free_blocks", self._released)
        wrap(pool, "cache_full_blocks", after=self._cached_full)
        wrap(pool, "cache_partial_block", after=self._cached_partial)
        wrap(pool, "move_block_hashes", after=self._moved)
        wrap(pool, "evict_blocks", after=self._evicted)
        wrap(pool, "reset_prefix_cache", after=self._reset)
        wrap(pool, "unpin_blocks", self._unpinned)

    def stop(self) -> None:
        """Say that it ends in good order."""
        self._later()
        self._now.stopped()
        self.flush()

    def flush(self) -> None:
        """Hand over what happened until now, for the drain thread to send."""
        self._catch_up()
        self.log.flush(self.step - 1, self.step - 1, self.counts())

    def _missed(self) -> None:
        """Something happened that could not be said: readers take the audits for truth from here."""
        self.log.dropped_batches += 1
        self.log.dropped_events += 1

    def _unheard(self) -> None:
        """A call that a broken hook did not see, perhaps the one that would have said what was noted."""
        self._notes.clear()
        self._missed()

    @property
    def _now(self) -> EventLog:
        """The log, up to date and told the time: for all that does not say its own. Most steps have nothing such."""
        self._catch_up()
        self._say_time()
        return self.log

    def _say_time(self) -> None:
        if not self._timed:
            self._timed = self._eventful = True
            self.log.tick()

    def _later(self, *_args: Any, **_kwargs: Any) -> None:
        """What follows happens at a time of its own."""
        self._timed = False

    # ---------------------------------------------------------------- arrivals and ends

    def _added(self, _: None, request: Any) -> None:
        request_id = request.request_id
        if request_id in self.numbers:
            self._session_goes_on(request_id)
            return
        self._catch_up()
        number = self.numbers[request_id] = next(self._next)
        self._everybody = []
        self._eventful = True
        self._names.setdefault(SUFFIX.sub("", request_id), number)
        prompt = request.num_prompt_tokens
        longest = min(prompt + request.max_tokens, self.scheduler.max_model_len)
        self.log.arrived(  # which says its own time
            number,
            self.name(request_id),
            prompt,
            request.max_tokens,
            request.priority,
            self._blocks_for(prompt),
            self._blocks_for(longest),
        )
        trace = trace_context.parse((getattr(request, "trace_headers", None) or {}).get("traceparent"))
        if trace is not None:
            self.log.traced(number, trace)
        self.log.queued(number, Cause.NEW)
        self._block(request)

    def _session_goes_on(self, request_id: str) -> None:
        request = self._blocked.get(request_id)
        if request is not None and _status(request) == Status.WAITING:
            self._unblock(request_id)

    def _stopped(self, finished: bool, request: Any) -> None:
        if finished:
            return
        number = self.numbers[request.request_id]
        if _status(request) == Status.WAITING_FOR_STREAMING_REQ:
            self._block(request)
        else:
            self._now.queued(number, Cause.NEW)

    def _finish(self, request: Any, *_args: Any, **_kwargs: Any) -> None:
        status, number = _status(request), self.numbers[request.request_id]
        self._progressed([request])
        self._now.finished(number, status)
        self._why = RELEASES.get(status, Release.FINISHED)

    def _finished(self, _: Any, request: Any, *_args: Any, **_kwargs: Any) -> None:
        self._why = None
        request_id = request.request_id
        for kept in (self._blocked, self._without_token, self._passed_over):
            kept.pop(request_id, None)
        self._preempted.discard(request_id)
        if request_id not in self.scheduler.requests:
            return
        deadline = self._clock_ns() + self._lease_ns if self._lease_ns else 0
        self.deferred[request_id] = deadline
        blocks = self.blocks_of(request_id)
        if blocks:
            self._now.free_deferred(self.numbers[request_id], blocks, Holder.CONNECTOR, lease_deadline_ns=deadline)

    def _free(self, request: Any) -> None:
        if request.request_id in self.deferred:
            self._now.completion_delivered(self.numbers[request.request_id])
            self._why = Release.TRANSFER_DONE

    def _freed(self, _: None, request: Any) -> None:
        """The last that is heard of a request."""
        self._catch_up()
        request_id = request.request_id
        self._everybody = []
        if self.deferred.pop(request_id, None) is not None:
            self._why = None
        number, name = self.numbers.pop(request_id), SUFFIX.sub("", request_id)
        if self._names.get(name) == number:
            del self._names[name]

    def _preempt(self, request: Any, *_args: Any, **_kwargs: Any) -> None:
        number, blocks = self.numbers[request.request_id], len(self.blocks_of(request.request_id))
        reason, for_number = Preempt.RESET, NO_REQUEST
        found = beneficiary()
        if found is not None:
            winner, tokens = found
            reason = Preempt.PRIORITY if request.priority > winner.priority else Preempt.KV_BLOCKS
            for_number = self.numbers[winner.request_id]
            held = len(self.blocks_of(winner.request_id))
            needed = max(1, self._blocks_for(winner.num_computed_tokens + tokens) - held)
            self._now.allocation_failed(for_number, needed, self._free_queue.num_free_blocks)
            self._short = True
        self._progressed([request])
        self._now.preempted(number, reason, for_number, blocks, request.num_computed_tokens)
        self._why = Release.PREEMPTED

    def _preempted_one(self, _: None, request: Any, *_args: Any, **_kwargs: Any) -> None:
        self._why = None
        self._preempted.add(request.request_id)
        self._now.queued(self.numbers[request.request_id], Cause.PREEMPTED, at_front=True)

    def _preempt_by_free(self, request: Any) -> None:
        """Up to 0.11 `schedule` preempts itself, and frees no other request that runs; what ends has its status."""
        if _status(request) == Status.RUNNING and beneficiary() is not None:
            self._preempt(request)

    def _preempted_by_free(self, _: None, request: Any) -> None:
        if self._why == Release.PREEMPTED:
            self._preempted_one(None, request)

    def _transfers(self, kv_connector_output: Any) -> None:
        """The connector's news, before the scheduler acts on them."""
        for request_id in kv_connector_output.finished_recving or ():
            request = self.scheduler.requests.get(request_id)  # early releases let go of it if aborted
            if request is not None and _status(request) == Status.WAITING_FOR_REMOTE_KVS:
                failed = request_id in getattr(self.scheduler, "failed_recving_kv_req_ids", ())
                outcome = Load.FAILED if failed else Load.DELIVERED
                self._now.remote_load(self.numbers[request_id], outcome, request.num_computed_tokens)

    # ---------------------------------------------------------------- a step

    def _scheduled(self, output: Any) -> None:
        count = len(output.num_scheduled_tokens)
        # Mostly everybody decodes a token: then no request need be looked at.
        if self._eventful or count != len(self.numbers) or count != output.total_num_scheduled_tokens:
            limit, numbers, tokens = self._look_at_whom(output)
        else:
            limit, numbers, tokens = NO_LIMIT, None, None
        clock_ns = self._clock_ns  # read, and then called: to call it as if it were a method takes longer
        now = clock_ns()
        if count:
            step = self.step
            self.step = step + 1
            note = (STEP_LAUNCHED, step, now, numbers, tokens, output, limit)
            self.launched.append(note)
            self._notes.append(note)
        else:
            self.empty_passes += 1
        if now >= self._next_look_ns:
            self._look_around(now)
        elif not count:
            self.flush()

    def _look_at_whom(self, output: Any) -> tuple[Limit, list[int], list[int]]:
        """Says who begins or ends to run or to wait; what limits the step, and who computes how many tokens in it."""
        scheduled: dict[str, int] = output.num_scheduled_tokens
        if self._blocked:
            for request_id in [i for i, request in self._blocked.items() if _status(request) not in BLOCKED]:
                self._unblock(request_id)
        for request_id in self._gave_blocks:
            if request_id not in scheduled and request_id in self.scheduler.requests:
                self._block(self.scheduler.requests[request_id])
        for new in output.scheduled_new_reqs:
            self._admit(new.req_id, scheduled)
        if self._preempted:
            for request_id in self._preempted & scheduled.keys():
                # 0.10 by priority: a step may be launched with a request that was preempted to make room for it.
                if _status(self.scheduler.requests[request_id]) == Status.RUNNING:
                    self._admit(request_id, scheduled)
        limit = Limit.NONE
        # The cheap question first: mostly all that there are were given tokens.
        if len(scheduled) < len(self.numbers):
            limit = self._look_at_who_waits(scheduled, output.total_num_scheduled_tokens)
        self._gave_blocks.clear()
        self._short = self._timed = False
        self._eventful = bool(self._preempted or self._blocked or self._without_token)
        return limit, [self.numbers[request_id] for request_id in scheduled], [*scheduled.values()]

    def _look_around(self, now: int) -> None:
        """What is done now and then: before the model runs, so that what a long step is about is known meanwhile."""
        self._next_look_ns = now + LOOK_EVERY_NS
        if now >= self._next_progress_ns:
            self._next_progress_ns = now + PROGRESS_EVERY_NS
            self._progressed(self.scheduler.running)
        self._catch_up()
        self._auditor.slice()
        self.flush()
        self._gave_blocks.clear()
        self._timed = False

    def _update(self, scheduler_output: Any, *_args: Any, **_kwargs: Any) -> None:
        self._updating = scheduler_output

    def _updated(self, _: Any, scheduler_output: Any, model_runner_output: Any) -> None:
        if model_runner_output.kv_connector_output is not None:
            self.polls += 1
        if self._eventful:
            for request_id in [i for i, request in self._without_token.items() if request.num_output_tokens]:
                del self._without_token[request_id]
                self._now.first_token(self.numbers[request_id])
            self._timed = False
        if scheduler_output.num_scheduled_tokens:
            clock_ns = self._clock_ns
            now = clock_ns()
            free, notes, launched = self._free_queue.num_free_blocks, self._notes, self.launched
            while launched:
                note = launched.popleft()
                _, step, at_ns, numbers, tokens, output, limit = note
                if notes and notes[-1] is note:
                    notes[-1] = (STEP, step, at_ns, numbers, tokens, now, limit, free)
                else:
                    notes.append((STEP_COMPLETED, step, now, now - at_ns, limit, free))
                if output is scheduler_output:
                    break
        scheduler = self.scheduler
        if not scheduler.running or (self._pauses and scheduler._pause_state):
            self.flush()  # else another step follows

    def _catch_up(self) -> None:
        """Say what was noted: all at once it costs less than at each step, between vLLM's own work.

        Most notes are of one step or of one block, for which plain loops cost less than comprehensions.
        """
        if not self._notes:
            return
        notes, self._notes = self._notes, []
        log, usable = self.log, self._usable
        everybody = self._everybody = self._everybody or [*self.numbers.values()]
        one_each = [1] * len(everybody)
        of_pass: list[tuple[Any, ...]] = []
        for note in notes:
            kind = note[0]
            if kind in _BLOCKS:
                of_pass.append(note)
                continue
            at_ns = note[2]
            if of_pass:
                log.tick(at_ns)
                self._say_blocks(of_pass)
                of_pass = []
            if kind == STEP:
                _, step, _, numbers, tokens, done_ns, limit, free = note
                log.step(step, numbers or everybody, tokens or one_each, limit, free, -1, usable - free, at_ns, done_ns)
            elif kind == STEP_LAUNCHED:
                _, step, _, numbers, tokens, _, _ = note
                log.step_launched(step, numbers or everybody, tokens or one_each, at_ns)
            else:
                _, step, _, duration_ns, limit, free = note
                log.step_completed(step, duration_ns, limit, free, -1, usable - free, at_ns)
        if of_pass:
            self._say_time()
            self._say_blocks(of_pass)

    def _say_blocks(self, notes: Iterable[tuple[Any, ...]]) -> None:
        for kind, request_id, blocks, group in notes:
            number = self.numbers.get(request_id, NO_REQUEST)
            if kind == CACHED:
                self._say_cached(self.log, number, blocks)
            else:
                self._say_allocated(number, blocks, group)

    def _progressed(self, requests: Sequence[Any]) -> None:
        self._catch_up()
        if requests:
            numbers = self.numbers
            if self._counts_in_flight:  # as `computed` has it, without a call for each
                computed = [max(0, r.num_computed_tokens - r.num_in_flight_tokens) for r in requests]
            else:
                computed = [self.computed(r) for r in requests]
            outputs = [r.num_output_tokens for r in requests]
            self.log.progressed([numbers[r.request_id] for r in requests], computed, outputs)

    def _admit(self, request_id: str, scheduled: dict[str, int]) -> None:
        request, number = self.scheduler.requests[request_id], self.numbers[request_id]
        self._preempted.discard(request_id)
        self._passed_over.pop(request_id, None)
        if not request.num_output_tokens:
            self._without_token[request_id] = request
        computed = request.num_computed_tokens - scheduled[request_id]
        if self.manager.enable_caching:
            self._now.looked_up(number, request.num_tokens, computed)
        self._now.admitted(number, computed)

    def _block(self, request: Any) -> None:
        """If it waits for something outside of the scheduler, say so, once."""
        status = _status(request)
        if status in BLOCKED and request.request_id not in self._blocked:
            self._blocked[request.request_id] = request
            self._now.waiting_on(self.numbers[request.request_id], status)

    def _unblock(self, request_id: str) -> None:
        del self._blocked[request_id]
        self._now.ready(self.numbers[request_id])

    def _queues(self) -> list[Any]:
        """The waiting queues that this release has, first served first."""
        scheduler = self.scheduler
        return [getattr(scheduler, name) for name in self._queue_names]

    def _look_at_who_waits(self, scheduled: dict[str, int], tokens: int) -> Limit:
        """What kept the step from being larger: said of who runs without tokens, and of the first who could run."""
        scheduler = self.scheduler
        if len(scheduled) < len(scheduler.running):
            cause = Cause.TOKEN_BUDGET if tokens >= self._max_tokens else Cause.ZERO_TOKENS
            for request in scheduler.running:
                if request.request_id not in scheduled and not self._in_flight(request):
                    self._pass_over(request, cause)
        head = self._head()
        if head is None:
            return Limit.DEFERRED if any(self._queues()) else Limit.NONE
        if self._short:
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
        needed = self._blocks_for(head.num_tokens) - len(self.blocks_of(head.request_id))
        free = self._free_queue.num_free_blocks
        if needed <= free and getattr(head, "has_encoder_inputs", False):
            self._pass_over(head, Cause.ENCODER)
            return Limit.ENCODER
        if self._shortage != (head.request_id, needed, free):
            self._shortage = head.request_id, needed, free
            self._now.allocation_failed(self.numbers[head.request_id], needed, free)
        self._pass_over(head, Cause.KV_BLOCKS)
        return Limit.KV

    def _head(self) -> Any:
        """The first in the queues that does not wait for something else; only the very first under a priority."""
        for queue in self._queues():
            waiting: Iterable[Any] = itertools.islice(queue, 64) if isinstance(queue, deque) else _peek(queue)
            for request in waiting:
                if request.request_id not in self._blocked and request.request_id in self.numbers:
                    return request
        return None

    def _pass_over(self, request: Any, cause: Cause) -> None:
        """A state, not an event a step: said when the cause changes, and as the count doubles."""
        before, times = self._passed_over.get(request.request_id, (cause, 0))
        times = times + 1 if before == cause else 1
        self._passed_over[request.request_id] = cause, times
        if times & (times - 1) == 0:
            self._now.not_scheduled(self.numbers[request.request_id], cause, times)

    def _blocks_for(self, tokens: int) -> int:
        """What so many tokens fill in all KV cache groups, windows not counted."""
        return sum(-(-tokens // size) for size in self._block_sizes)

    # ---------------------------------------------------------------- blocks

    def _allocated(self, blocks: Sequence[Any]) -> None:
        if not blocks:
            return
        frame = sys._getframe(2)  # beyond the wrapper
        if frame.f_code is self._giver:
            known = frame.f_locals
            request_id, group = known["request_id"], known["self"].kv_cache_group_id
        else:
            who = caller(self.scheduler)
            if who is None:
                self._missed()
                return
            request_id, group, _ = who
            if gives(frame):
                self._giver = frame.f_code
        if request_id not in self.numbers:
            self._missed()
            return
        self._gave_blocks.append(request_id)
        self._notes.append((ALLOCATED, request_id, blocks, group))

    def _say_allocated(self, number: int, blocks: Sequence[Any], group: int) -> None:
        ids: list[int] = []
        evicted: list[bytes] = []
        hashes = self.hashes
        for one in blocks:
            block: int = one.block_id
            ids.append(block)
            if block in hashes:
                evicted.append(hashes.pop(block))
        self.log.allocated(number, ids, evicted, group)

    def _touched(self, blocks: Iterable[Any], *_args: Any, **_kwargs: Any) -> None:
        ids = [block.block_id for block in _flat(blocks) if not block.is_null]
        if not ids:
            return
        who = caller(self.scheduler)
        if who is None or who[0] not in self.numbers:
            self._missed()
            return
        request_id, group, _ = who
        self._gave_blocks.append(request_id)
        self._now.reused(self.numbers[request_id], ids, group)

    def _released(
        self, ordered_blocks: Iterable[Any], *rest: Any, **more: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        blocks = list(ordered_blocks)  # it may be read only once
        pool = self.pool
        ids = [b.block_id for b in blocks if not b.is_null and getattr(b, "pool", pool) in (pool, None)]
        if ids:
            self._catch_up()
            who = caller(self.scheduler)
            if who is None or who[0] not in self.numbers:
                self._reclaimed(ids)
            else:
                request_id, group, function = who
                by_window = Release.OUT_OF_WINDOW if function != "free" else Release.ROLLED_BACK
                self._now.released(self.numbers[request_id], ids, self._why or by_window, group)
        return (blocks, *rest), more

    def _reclaimed(self, ids: list[int]) -> None:
        for reason, block in [(self._take_detached(block), block) for block in ids]:
            if reason is None:
                self._missed()
            else:
                self._now.reclaimed([block], reason)

    def _take_detached(self, block: int) -> Release | None:
        former = self.detached.get(block)
        if not former:
            return None
        _, reason = former.popleft()
        if not former:
            del self.detached[block]
        return reason

    def _popped(self, blocks: Sequence[Any], request: Any) -> None:
        number = self.numbers[request.request_id]
        ids = [block.block_id for block in blocks if not block.is_null]
        if not ids:
            return
        reason = self._why or Release.ROLLED_BACK
        for block in ids:
            self.detached.setdefault(block, deque()).append((number, reason))
        self._now.free_deferred(number, ids, Holder.FENCE, fence=self.step - 1)
        self._now.detached(number, ids)

    def _cached_full(
        self, _: None, request: Any, blocks: Sequence[Any], num_cached_blocks: int, num_full_blocks: int
    ) -> None:
        self._notes.append((CACHED, request.request_id, blocks[num_cached_blocks:num_full_blocks], 0))

    def _cached_partial(self, _: Any, *args: Any, **kwargs: Any) -> None:
        blocks = [value for value in (*args, *kwargs.values()) if hasattr(value, "block_id")]
        self._say_cached(self._now, NO_REQUEST, blocks)

    def _moved(self, _: None, src_block: Any, dst_block: Any) -> None:
        self._say_evicted([src_block.block_id], Evict.INVALIDATED)
        self._say_cached(self._now, NO_REQUEST, [dst_block])

    def _say_cached(self, log: EventLog, number: int, blocks: Iterable[Any]) -> None:
        ids: list[int] = []
        told: list[bytes] = []
        for one in blocks:
            value = one.block_hash
            if value is not None and not one.is_null:
                block = one.block_id
                raw = self.hashes[block] = value if isinstance(value, bytes) else repr(value).encode()
                ids.append(block)
                told.append(raw)
        if ids:
            log.cached(number, ids, told)

    def _evicted(self, _: None, block_ids: Iterable[int]) -> None:
        self._say_evicted(
            [block for block in block_ids if self.pool.blocks[block].block_hash is None], Evict.INVALIDATED
        )

    def _reset(self, done: bool) -> None:
        if done:
            self._timed = False
            self._say_evicted(list(self.hashes), Evict.RESET)

    def _say_evicted(self, blocks: Sequence[int], cause: Evict) -> None:
        self._catch_up()
        known = [block for block in blocks if self.hashes.pop(block, None) is not None]
        if known:
            self._now.evicted(known, cause)

    def _unpinned(self, *_args: Any, **_kwargs: Any) -> None:
        """A connector's own references: whose they are is not known, so only the audits tell of them."""
        self._missed()


def _keyed(keyed: Callable[..., Any], value: bytes) -> int:
    """64 bits that tell equal prefixes from others and nothing more, never 0."""
    return int.from_bytes(keyed(value).digest(), sys.byteorder, signed=True) or 1


def counts_in_flight() -> bool:
    """Whether requests of this vLLM say themselves what steps in flight compute: from 0.26 on."""
    from vllm.v1.request import Request

    return "num_in_flight_tokens" in Request.__init__.__code__.co_names


def _status(request: Any) -> Status:
    return STATUSES[request.status.name]


def _flat(blocks: Iterable[Any]) -> Iterable[Any]:
    """Blocks, or lists of them by KV cache group, as releases up to 0.12 have it."""
    for one in blocks:
        if hasattr(one, "block_id"):
            yield one
        else:
            yield from one


def _peek(queue: Any) -> list[Any]:
    return [queue.peek_request()] if queue else []
