"""Hooks on the passes of the scheduler: steps, admissions, and what kept each step from being larger."""

from __future__ import annotations

from typing import Any, Final

from ...contract.event_log import Clock
from ...contract.kinds import EngineMode, Limit, Status
from .emitter import STEP_COMPLETED, STEP_LAUNCHED, WHOLE_STEP, Emitter
from .hooks import Hooks
from .probe_state import ProbeState, status_of
from .request_hooks import RequestHooks
from .table_reader import Auditor
from .wait_causes import WaitCauses

FLUSH_EVERY_NS: Final = 10_000_000
"""How often, between two steps, notes are written and handed over, and a slice of the audit is read."""
STEP_NS_A_SLICE: Final = 100_000_000
"""A longer step is followed by a slice for each of these: a cycle is done within two minutes of steps."""
PROGRESS_EVERY_NS: Final = 50_000_000
"""How often the tokens of running requests are reported. Batches go out no more often, and the last of one counts."""
NO_LIMIT: Final = Limit.NONE  # looked up once: a member of an enum is slow to find


class SchedulerHooks:
    """Reports the passes of the scheduler of `state`."""

    def __init__(self, state: ProbeState, emitter: Emitter, requests: RequestHooks, clock: Clock) -> None:
        self.empty_passes = 0
        self._state = state
        self._emitter = emitter
        self._requests = requests
        self._causes = WaitCauses(state, emitter)
        self._auditor = Auditor(state, emitter.log)
        self._clock_ns = clock.monotonic_ns
        self._scheduler = state.scheduler
        self._numbers = state.numbers
        self._launched = state.launched
        self._notes = emitter.notes
        self._free_queue = state.free_queue
        self._pauses = hasattr(state.scheduler, "_pause_state")
        self._next_flush_ns = self._next_progress_ns = 0
        self._stepped_ns = 0
        """How long the steps since the last slice of the audit took."""
        self._usual_tokens = 0
        """A step with more is handed over before it runs: readers know the others' length from steps like them."""

    def wrap(self, hooks: Hooks) -> None:
        """Install the hooks."""
        hooks.wrap(self._scheduler, "schedule", after=self._scheduled)
        hooks.wrap(self._scheduler, "set_pause_state", after=self._paused)
        self._causes.wrap(hooks)
        before = None if self._state.counts_in_flight else self._update
        hooks.wrap(self._scheduler, "update_from_output", before, self._updated)

    def _scheduled(self, output: Any) -> None:
        count = len(output.num_scheduled_tokens)
        # Mostly all requests decode a token: then none need be inspected.
        if self._emitter.eventful or count != len(self._numbers) or count != output.total_num_scheduled_tokens:
            limit, numbers, tokens = self._inspect_pass(output)
        else:
            limit, numbers, tokens = NO_LIMIT, None, None
        clock_ns = self._clock_ns  # read, and then called: to call it as if it were a method takes longer
        now = clock_ns()
        if count:
            state = self._state
            step = state.step
            state.step = step + 1
            note = (STEP_LAUNCHED, step, now, numbers, tokens, output, limit)
            self._launched.append(note)
            self._notes.append(note)
        else:
            self.empty_passes += 1
        total: int = output.total_num_scheduled_tokens
        if now >= self._next_flush_ns or total > self._usual_tokens:
            self._flush_pass(now)
            self._usual_tokens = 2 * total
        elif not count:
            self._emitter.flush()

    def _inspect_pass(self, output: Any) -> tuple[Limit, list[int], list[int]]:
        """Report which requests begin or end to run or to wait. Return the step's limit, requests and their tokens."""
        state, requests = self._state, self._scheduler.requests
        scheduled: dict[str, int] = output.num_scheduled_tokens
        if state.blocked:
            self._requests.unblock_ready()
        for request_id in state.gave_blocks:
            if request_id not in scheduled and request_id in requests:
                self._requests.block(requests[request_id])
        admitted = [new.req_id for new in output.scheduled_new_reqs]
        for request_id in admitted:
            self._admit(request_id, scheduled)
        if state.preempted:
            for request_id in state.preempted & scheduled.keys():
                # 0.10 by priority: a step may be launched with a request that was preempted to make room for it.
                if status_of(requests[request_id]) == Status.RUNNING:
                    self._admit(request_id, scheduled)
                    admitted.append(request_id)
        limit = Limit.NONE
        # The cheap question first: mostly all requests were given tokens.
        if len(scheduled) < len(self._numbers):
            limit = self._causes.inspect(scheduled, output.total_num_scheduled_tokens, admitted)
        for noted in (state.gave_blocks, state.lookups, state.matches, state.popped, state.without_encoder):
            noted.clear()
        state.preempted_in_pass = self._emitter.timed = False
        state.free_before_copies = None
        self._emitter.eventful = bool(state.preempted or state.blocked or state.without_token)
        return limit, [self._numbers[request_id] for request_id in scheduled], [*scheduled.values()]

    def _admit(self, request_id: str, scheduled: dict[str, int]) -> None:
        state, emitter = self._state, self._emitter
        request, number = self._scheduler.requests[request_id], self._numbers[request_id]
        state.preempted.discard(request_id)
        state.passed_over.pop(request_id, None)
        if not request.num_output_tokens:
            state.without_token[request_id] = request
        computed = request.num_computed_tokens - scheduled[request_id]
        if state.manager.enable_caching and _reads_prefix_cache(request):
            emitter.stamped.looked_up(number, request.num_tokens, computed)
        emitter.stamped.admitted(number, computed)

    def _flush_pass(self, now: int) -> None:
        """Done now and then: before the model runs, so that the events of a long step are known meanwhile."""
        self._next_flush_ns = now + FLUSH_EVERY_NS
        if now >= self._next_progress_ns:
            self._next_progress_ns = now + PROGRESS_EVERY_NS
            self._requests.progressed(self._scheduler.running)
        self._emitter.write_notes()
        self._auditor.slices(self._stepped_ns // STEP_NS_A_SLICE)
        self._stepped_ns = 0
        self._emitter.flush()
        self._state.gave_blocks.clear()
        self._emitter.timed = False

    @property
    def passes(self) -> int:
        """Calls of `schedule`."""
        return self._state.step + self.empty_passes

    @property
    def polls(self) -> int:
        """Passes in which a KV connector was asked: each carries its metadata to the workers, whose answer comes back.

        The answer itself counts nothing: where the executor is in this process, one without news is None.
        """
        return self.passes if getattr(self._scheduler, "connector", None) is not None else 0

    def _paused(self, _: None, pause_state: Any) -> None:
        self._report_mode(EngineMode.__members__.get(pause_state.name, EngineMode.PAUSED_ALL))

    def slept(self, _: Any) -> None:
        """Log that the executor has given its memory up."""
        self._report_mode(EngineMode.ASLEEP)

    def woken(self, _: Any) -> None:
        """Log that the executor has its memory, or a part of it, again."""
        paused = getattr(self._scheduler, "_pause_state", None)
        self._report_mode(EngineMode.__members__.get(getattr(paused, "name", ""), EngineMode.UNPAUSED))

    def _report_mode(self, mode: EngineMode) -> None:
        self._emitter.expire_time()
        self._emitter.write_notes()
        self._emitter.log.engine_mode(mode)
        self._emitter.flush()  # no step may follow

    def _update(self, scheduler_output: Any, *_args: Any, **_kwargs: Any) -> None:
        self._state.updating = scheduler_output

    def _updated(self, _: Any, scheduler_output: Any, *_args: Any) -> None:
        if self._emitter.eventful:
            without_token = self._state.without_token
            for request_id in [i for i, request in without_token.items() if request.num_output_tokens]:
                del without_token[request_id]
                self._emitter.stamped.first_token(self._numbers[request_id])
            self._emitter.timed = False
        if scheduler_output.num_scheduled_tokens:
            clock_ns = self._clock_ns
            now = clock_ns()
            free, notes, launched = self._free_queue.num_free_blocks, self._notes, self._launched
            while launched:
                note = launched.popleft()
                _, step, at_ns, numbers, tokens, output, limit = note
                self._stepped_ns += now - at_ns
                if notes and notes[-1] is note:
                    notes[-1] = (WHOLE_STEP, step, at_ns, numbers, tokens, now, limit, free)
                else:
                    notes.append((STEP_COMPLETED, step, now, now - at_ns, limit, free))
                if output is scheduler_output:
                    break
        scheduler = self._scheduler
        if not scheduler.running or (self._pauses and scheduler._pause_state):
            self._emitter.flush()  # else another step follows


def _reads_prefix_cache(request: Any) -> bool:
    """Whether the prefix cache is looked up for a request: not where its prompt's log probabilities are asked for."""
    skips = getattr(request, "skip_reading_prefix_cache", None)
    if skips is None:  # earlier releases
        skips = getattr(getattr(request, "sampling_params", None), "prompt_logprobs", None) is not None
    return not skips
