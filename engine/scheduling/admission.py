"""Admission: let waiting requests run, in order, as long as there is room for their whole prompts."""

from __future__ import annotations

from kvscope.engine.blocks.kv_cache_manager import Prefix
from kvscope.engine.requests.request import Request
from kvscope.engine.scheduling.deferred_free import ConnectorTransfers
from kvscope.engine.scheduling.preemption import PreemptionPolicy
from kvscope.engine.scheduling.scheduler_state import SchedulerState
from kvscope.engine.scheduling.step_plan import SchedulerOutput
from kvscope.monitor.events.kinds import Cause, Limit, Status


def outgrows_pool(state: SchedulerState, request: Request) -> bool:
    """Whether a request that the pool cannot hold goes on all the same, by the fault stuck.self-preempt."""
    return state.faults.triggers_on_request("stuck.self-preempt", request.id)


class Admission:
    """Admits requests of `state` to steps. Blocks that a connector can bring are fetched first."""

    def __init__(
        self, state: SchedulerState, preemption: PreemptionPolicy, transfers: ConnectorTransfers, max_model_len: int
    ) -> None:
        # Totals of the prefix cache since the engine started, in tokens. Hits are the pool's own.
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._state = state
        self._preemption = preemption
        self._transfers = transfers
        self._max_model_len = max_model_len

    def admit(self, plan: SchedulerOutput, budget: int) -> None:
        """Add waiting requests to the plan, in order, within `budget` tokens."""
        state = self._state
        dropped = []
        if state.rules.awaits_dropped_steps:
            dropped = [r for r in state.waiting if r.num_preemptions and state.is_in_flight(r)]
        for request in dropped:
            state.waiting.remove(request)
        self._admit_ready(plan, budget)
        for request in reversed(dropped):
            state.waiting.put_front(request)

    def _admit_ready(self, plan: SchedulerOutput, budget: int) -> None:
        state, manager = self._state, self._state.manager
        while len(state.waiting):
            request = state.waiting.head()
            if budget == 0:
                plan.limit = Limit.TOKENS
                return state.pass_over(request, Cause.TOKEN_BUDGET)
            if len(state.running) >= state.seqs_allowed:
                plan.limit = Limit.SEQUENCES
                return state.pass_over(request, Cause.MAX_NUM_SEQS)
            room_for = self._room_for(request)
            # Fetched KV is in the request's blocks already, and a request with room for one chunk only gets no hits.
            # Nor for one whose prompt's log probabilities are asked for: they come of computing all of it.
            known = request.number in manager.tables or not room_for or request.prompt_logprobs is not None
            prefix = None if known else manager.find_prefix(request)
            hits = prefix.num_blocks if prefix is not None else 0
            computed = request.num_computed_tokens + hits * manager.block_size
            outside = 0 if known else self._transfers.find_outside(request, hits)
            to_load = outside * manager.block_size
            num_tokens = to_load or min(request.num_tokens - computed, budget)
            if not manager.allocate(request, num_tokens, prefix, room_for, fetched=outside > 0):
                if self._preemption.unblock(request, bool(self._transfers.loading)):
                    continue
                plan.limit = Limit.KV
                return state.pass_over(request, Cause.KV_BLOCKS)
            state.waiting.take()
            request.num_computed_tokens = computed
            request.times_passed_over = 0
            if manager.hasher is not None and prefix is not None:
                self._report_lookup(request, prefix, computed, to_load)
            if outside:
                self._transfers.start_load(request, hits, outside)
                continue
            state.running.append(request)
            request.status, request.cause = Status.RUNNING, Cause.NONE
            request.admitted_ns = request.admitted_ns or state.log.clock.monotonic_ns()
            state.log.admitted(request.number, request.num_computed_tokens)
            plan.add(request, num_tokens)
            budget -= num_tokens
        return None

    def _room_for(self, request: Request) -> int:
        """Return the tokens that there must be room for when it is admitted: all that it has, unless a fault changes
        that.
        """
        manager, faults = self._state.manager, self._state.faults
        if not manager.fits(request.num_tokens) and outgrows_pool(self._state, request):
            return 0
        if faults.triggers_on_request("stuck.head-of-line", request.id):
            longest = min(request.num_prompt_tokens + request.params.max_tokens, self._max_model_len)
            return min(longest, manager.pool.usable // len(manager.windows) * manager.block_size)
        return request.num_tokens

    def _report_lookup(self, request: Request, prefix: Prefix, computed: int, to_load: int) -> None:
        """Count and report the prefix hit: for each KV group of what those before it have, with `to_load` tokens."""
        self.prefix_queries += request.num_tokens
        self.prefix_hits += computed
        asked = request.num_tokens
        for group, blocks in enumerate(prefix.found):
            found = blocks * self._state.manager.block_size + to_load
            self._state.log.looked_up(request.number, asked, found, group)
            asked = found
