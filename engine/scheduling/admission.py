"""Admission, preemption and KV transfers: which waiting requests run, and whose blocks they get."""

from __future__ import annotations

from kvscope.monitor.contract.kinds import Cause, Holder, Limit, Load, Preempt, Release, Status

from ..blocks.kv_cache_manager import Prefix
from ..connectors.base import KVConnector, KVLoad
from ..requests.request import Request
from .scheduler_state import SchedulerOutput, SchedulerState


class PreemptionPolicy:
    """Preempts requests of `state`: the last admitted one or, under the priority policy, the least urgent."""

    def __init__(self, state: SchedulerState) -> None:
        self.count = 0
        """Preemptions since the engine started."""
        self._state = state

    def victim(self) -> Request:
        """Return the running request that is to lose its blocks."""
        running = self._state.running
        if self._state.by_priority:
            return max(running, key=lambda r: (r.priority, r.arrived_ns, r.number))
        return running[-1]

    def preempt(self, plan: SchedulerOutput, victim: Request, beneficiary: Request) -> int:
        """Preempt a running request, and return the tokens that this frees of the plan's budget."""
        freed = plan.drop(victim)
        self._state.running.remove(victim)
        if self._state.rules.damps_readmission:
            self._state.seqs_allowed = max(1, len(self._state.running))
        self._take_back(victim, beneficiary)
        return freed

    def unblock(self, head: Request, loading: bool) -> bool:
        """Free the blocks of the last waiting request that holds any, if only waiting requests hold blocks.

        Otherwise no request would ever free one. Returns whether any were freed.
        """
        state = self._state
        if state.running or state.in_flight or loading or state.manager.num_fenced:
            return False
        holders = [r for r in state.waiting if r is not head and r.number in state.manager.tables]
        if not holders or state.faults.triggers("stuck.parked-loads", head.id):
            return False
        state.waiting.remove(holders[-1])
        self._take_back(holders[-1], head)
        return True

    def _take_back(self, victim: Request, beneficiary: Request) -> None:
        """Take the blocks of a request that is in no queue, and put it back into the waiting one."""
        state = self._state
        self.count += 1
        blocks = sum(map(len, state.manager.held(victim.number)))
        reason = Preempt.PRIORITY if victim.priority > beneficiary.priority else Preempt.KV_BLOCKS
        state.log.preempted(victim.number, reason, beneficiary.number, blocks, victim.num_computed_tokens)
        state.free(victim, Release.PREEMPTED)
        victim.num_computed_tokens = victim.num_in_flight_tokens = 0
        victim.num_preemptions += 1
        victim.status, victim.cause = Status.PREEMPTED, Cause.PREEMPTED
        if state.rules.queues_at_front:
            state.waiting.put_front(victim)
        else:
            state.waiting.put_back(victim)
        state.log.queued(victim.number, Cause.PREEMPTED, at_front=True)


class ConnectorTransfers:
    """Loads of `connector` (None: there is none) for requests, and the blocks that it keeps after their end."""

    def __init__(self, state: SchedulerState, connector: KVConnector | None, lease_s: float) -> None:
        self.connector = connector
        self.lease_ns = round(lease_s * 1e9)
        """How long the connector may keep a finished request's blocks (0: until it reports completion)."""
        self.deferred: dict[int, int] = {}
        """Finished requests whose blocks the connector still needs, with their lease deadline (0: none)."""
        self.loading: dict[int, KVLoad] = {}
        self._state = state

    def defers(self, request: Request, completed_normally: bool) -> bool:
        """Keep a finished request's blocks if the connector still needs them, and return whether it does."""
        log, number = self._state.log, request.number
        (blocks, *_) = self._state.manager.held(number)  # with a connector there is one KV group
        if number in self.loading:
            # The fetch still writes to them.
            log.free_deferred(number, blocks, Holder.CONNECTOR)
            self.deferred[number] = 0
            return True
        if completed_normally and self.connector is not None and self.connector.request_finished(request, blocks):
            deadline = log.clock.monotonic_ns() + self.lease_ns if self.lease_ns else 0
            log.free_deferred(number, blocks, Holder.CONNECTOR, lease_deadline_ns=deadline)
            self.deferred[number] = deadline
            return True
        return False

    def find_outside(self, request: Request, num_hits: int) -> int:
        """How many blocks after the prefix hit the connector could bring, never all: one token must be computed."""
        if self.connector is None:
            return 0
        return self.connector.find(request, num_hits, (request.num_tokens - 1) // self._state.manager.block_size)

    def start_load(self, request: Request, first: int, count: int) -> None:
        """Have the connector fetch `count` blocks from `first` on, and park the request meanwhile."""
        assert self.connector is not None
        (table,) = self._state.manager.tables[request.number]
        load = KVLoad(request, first, table[first : first + count])
        self.loading[request.number] = load
        self._state.park(request, Status.WAITING_FOR_REMOTE_KVS)
        self.connector.start_load(load)

    def take_loads(self) -> None:
        """Let the requests go on whose fetch has ended, with the tokens that it delivered."""
        assert self.connector is not None
        state = self._state
        for number, delivered in self.connector.loaded():
            request = state.requests[number]
            lost = "leak.remote-load-lost" if request.is_finished else "stuck.remote-load"
            if state.faults.triggers(lost, request.id):
                continue
            load = self.loading.pop(number)
            tokens = len(load.blocks) * state.manager.block_size
            state.log.remote_load(number, Load.DELIVERED if delivered else Load.FAILED, tokens)
            if request.is_finished:
                self._free_deferred(number, Release.ABORTED)
                continue
            if delivered:
                request.num_computed_tokens += tokens
                state.manager.advance(request)
            state.unpark(request)

    def take_completions(self, has_work: bool) -> None:
        """Free the blocks that the connector needs no longer, and those that it kept for longer than its lease."""
        if self.connector is None:
            return
        faults = self._state.faults
        if not has_work and self.deferred and faults.triggers("leak.idle-not-polled", ""):
            return
        for number in self.connector.completed():
            request = self._state.requests.get(number)
            if request is None or faults.triggers("leak.finished-held", request.id):
                continue
            if self.lease_ns and faults.triggers("leak.lease-burst", request.id):
                continue
            self._state.log.completion_delivered(number)
            self._free_deferred(number, Release.TRANSFER_DONE)
        if self.lease_ns:
            self._end_leases()

    def _end_leases(self) -> None:
        now = self._state.log.clock.monotonic_ns()
        assert self.connector is not None
        for number in [n for n, deadline in self.deferred.items() if 0 < deadline <= now]:
            self.connector.lease_ended(number)
            self._free_deferred(number, Release.LEASE_EXPIRED)

    def _free_deferred(self, number: int, reason: Release) -> None:
        del self.deferred[number]
        self._state.free(self._state.requests.pop(number), reason)


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
