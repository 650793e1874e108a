"""Decides what each step computes: continuous batching over a block pool. Imports no torch.

A step serves the running requests first, in order, then admits waiting ones, all within `max_num_batched_tokens` and
`max_num_seqs`; a prompt may be computed in chunks over several steps. When a running request cannot get a block, the
last admitted one (or, under the priority policy, the least urgent) is preempted: it loses its blocks and will be
computed again. A waiting request is admitted only when its whole prompt would fit now, and the first that does not
fit holds back those behind it. After a preemption no more may run at once than are left, and one more with each step.
A request that has come to fill the whole pool ends there, as it would at `max_model_len`: nothing could make room.

A step may be planned while the one before it runs: a request that will have sampled a token by then is given its next
one. What such a request loses in the meantime, by its end or by a preemption, becomes free only when the last step
that it is part of is complete: until then that step may write to its blocks. As long as freed blocks wait for that,
nobody else is preempted for want of a block.

A request that waits for something outside, such as its grammar or KV that a connector fetches, is parked beside the
queue and blocks nobody; when that has come it is ready, and stands in the queue again at its place.

Everything that happens to a request or a queue is said to the log where it happens.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import NamedTuple

from kvscope.engine.blocks.kv_cache_manager import KVCacheManager, Prefix
from kvscope.engine.connectors.base import KVConnector, KVLoad
from kvscope.engine.faults import Faults
from kvscope.engine.requests.request import Request
from kvscope.engine.scheduling.waiting_queue import FCFSQueue, PriorityQueue, WaitingQueue
from kvscope.monitor.events.event_log import EventLog
from kvscope.monitor.events.kinds import Cause, Holder, Limit, Load, Preempt, Release, Status

logger = logging.getLogger(__name__)


class Share(NamedTuple):
    """A request's part of a step: `num_tokens` tokens from `start` on; `samples` if its next token comes of it."""

    request: Request
    start: int
    num_tokens: int
    samples: bool
    num_preemptions: int = 0
    """How often the request had been preempted when this was planned."""


@dataclass
class SchedulerOutput:
    """One step: what to compute of each request, in order."""

    step: int
    shares: list[Share] = field(default_factory=list)
    limit: Limit = Limit.NONE


class Scheduler:
    """Schedules over `manager`. One thread only."""

    def __init__(
        self,
        manager: KVCacheManager,
        log: EventLog,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        policy: str = "fcfs",
        connector: KVConnector | None = None,
        lease_s: float = 0.0,
        faults: Faults | None = None,
    ) -> None:
        self.manager = manager
        self.log = log
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.by_priority = policy == "priority"
        self.connector = connector
        self.lease_ns = round(lease_s * 1e9)
        """How long the connector may keep a finished request's blocks; 0: until it says that it is done."""
        self.faults = faults or Faults()
        self.requests: dict[int, Request] = {}
        self.running: list[Request] = []
        self.waiting: WaitingQueue = PriorityQueue() if self.by_priority else FCFSQueue()
        self.parked: dict[int, Request] = {}
        """Requests that wait for something outside the scheduler, by number."""
        self._ready: list[Request] = []
        self._seqs_allowed = max_num_seqs
        """How many may run at once now: fewer than max_num_seqs for a while after a preemption."""
        self._loading: dict[int, KVLoad] = {}
        self.deferred: dict[int, int] = {}
        """Finished requests whose blocks the connector still needs, with their lease deadline (0: none)."""
        self.step = 0
        """The next step to be planned."""
        self.completed_step = -1
        self.passes = 0
        # Over the engine's life. Queries and hits of the prefix cache are in tokens; hits are the pool's own.
        self.num_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0

    @property
    def has_work(self) -> bool:
        """Whether a request is running, or waiting for its turn."""
        return bool(self.running or len(self.waiting) or self._ready)

    @property
    def num_waiting(self) -> int:
        """Requests that are neither running nor finished, those included that wait for something outside."""
        return len(self.waiting) + len(self.parked) + len(self._ready)

    @property
    def in_flight(self) -> bool:
        """Whether a step was planned and is not complete."""
        return self.completed_step + 1 < self.step

    # ---------------------------------------------------------------- arrivals and ends

    def add(self, request: Request) -> None:
        """Take a request in; one whose output has a grammar waits for that first."""
        manager = self.manager
        longest = min(request.num_prompt_tokens + request.params.max_tokens, self.max_model_len)
        self.requests[request.number] = request
        self.log.arrived(
            request.number,
            request.id,
            request.num_prompt_tokens,
            request.params.max_tokens,
            request.priority,
            manager.blocks_for(request.num_prompt_tokens),
            manager.blocks_for(longest),
        )
        if request.params.structured_outputs is not None:
            return self.park(request, Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)
        request.status, request.cause = Status.WAITING, Cause.NEW
        self.waiting.put(request)
        return self.log.queued(request.number, Cause.NEW)

    def finish(self, request: Request, status: Status) -> None:
        """End a request wherever it is, and free its blocks unless the connector needs them for a while."""
        if request.status == Status.RUNNING:
            self.running.remove(request)
        elif request.number in self.parked:
            del self.parked[request.number]
        elif request in self._ready:
            self._ready.remove(request)
        else:
            self.waiting.remove(request)
        request.status, request.cause = status, Cause.NONE
        self.log.finished(request.number, status)
        (blocks, *_) = self.manager.held(request.number)  # with a connector there is one KV group
        if request.number in self._loading:
            # What is fetched is still written to them.
            self.log.free_deferred(request.number, blocks, Holder.CONNECTOR)
            self.deferred[request.number] = 0
            return
        completed_normally = status in (Status.FINISHED_STOPPED, Status.FINISHED_LENGTH_CAPPED)
        if completed_normally and self.connector is not None and self.connector.request_finished(request, blocks):
            deadline = self.log.clock.monotonic_ns() + self.lease_ns if self.lease_ns else 0
            self.log.free_deferred(request.number, blocks, Holder.CONNECTOR, lease_deadline_ns=deadline)
            self.deferred[request.number] = deadline
            return
        del self.requests[request.number]
        self._free(request, Release.FINISHED if completed_normally else _RELEASE_OF[status])

    def abort(self, number: int) -> Request | None:
        """The client wants no more of it. The request, or None if it has ended already."""
        request = self.requests.get(number)
        if request is None or request.is_finished:
            return None
        self.finish(request, Status.FINISHED_ABORTED)
        return request

    def take_completions(self) -> None:
        """Free what the connector needs no longer, and what it has kept for longer than its lease."""
        if self.connector is None:
            return
        if not self.has_work and self.deferred and self.faults.strikes("leak.idle-not-polled", ""):
            return
        for number in self.connector.completed():
            request = self.requests.get(number)
            if request is None or self.faults.strikes("leak.finished-held", request.id):
                continue
            if self.lease_ns and self.faults.strikes("leak.lease-burst", request.id):
                continue
            self.log.completion_delivered(number)
            self._free_deferred(number, Release.TRANSFER_DONE)
        if self.lease_ns:
            self._end_leases()

    def take_loads(self) -> None:
        """Let the requests go on whose fetch has ended, with what came of it."""
        assert self.connector is not None
        for number, delivered in self.connector.loaded():
            request = self.requests[number]
            lost = "leak.remote-load-lost" if request.is_finished else "stuck.remote-load"
            if self.faults.strikes(lost, request.id):
                continue
            load = self._loading.pop(number)
            tokens = len(load.blocks) * self.manager.block_size
            self.log.remote_load(number, Load.DELIVERED if delivered else Load.FAILED, tokens)
            if request.is_finished:
                self._free_deferred(number, Release.ABORTED)
                continue
            if delivered:
                request.num_computed_tokens += tokens
                self.manager.advance(request)
            self.ready(request)

    def park(self, request: Request, status: Status) -> None:
        """Set a request aside that is in no queue, until `ready`; `status` says what it waits for."""
        request.status, request.cause = status, CAUSE_OF_WAIT[status]
        self.parked[request.number] = request
        self.log.waiting_on(request.number, status)

    def ready(self, request: Request) -> None:
        """What a parked request waited for has come: the next pass looks at it again."""
        del self.parked[request.number]
        request.status, request.cause = Status.WAITING, Cause.NEW
        self._ready.append(request)
        self.log.ready(request.number)

    def _end_leases(self) -> None:
        now = self.log.clock.monotonic_ns()
        assert self.connector is not None
        for number in [n for n, deadline in self.deferred.items() if 0 < deadline <= now]:
            self.connector.lease_ended(number)
            self._free_deferred(number, Release.LEASE_EXPIRED)

    def _free_deferred(self, number: int, reason: Release) -> None:
        del self.deferred[number]
        self._free(self.requests.pop(number), reason)

    def _free(self, request: Request, reason: Release) -> None:
        """Free its blocks, at once or behind the step in flight that may still write to them."""
        self.manager.free(request, reason, request.last_step if request.last_step > self.completed_step else None)

    # ---------------------------------------------------------------- a step

    def schedule(self) -> SchedulerOutput:
        """Plan the next step. An empty plan means that nothing could be done now."""
        self.passes += 1
        plan = SchedulerOutput(self.step)
        self._promote()
        prompts_first = self.faults.strikes("collapse.lockstep", "")
        budget = self._schedule_running(plan, prompts_first)
        if budget >= 0:
            self._admit(plan, budget)
        elif len(self.waiting):
            self._pass_over(self.waiting.head(), Cause.PREEMPTION_IN_STEP)
        if prompts_first and not plan.shares:
            self._schedule_running(plan)
        if plan.shares:
            self.step += 1
            if self._seqs_allowed < self.max_num_seqs and not self.faults.strikes("thrash.after-retract", ""):
                self._seqs_allowed += 1
            for request, _, num_tokens, samples, _ in plan.shares:
                request.num_in_flight_tokens += num_tokens
                request.num_output_placeholders += samples
                request.last_step = plan.step
            self.log.step_launched(
                plan.step, [s.request.number for s in plan.shares], [s.num_tokens for s in plan.shares]
            )
        return plan

    def complete(self, plan: SchedulerOutput, sampled: list[int], is_stop: list[bool]) -> list[Request]:
        """Take in what the oldest step in flight gave: a token for each share that `samples`, in the plan's order.

        `is_stop` says of each such token whether it ends the output. What came of requests that ended while the step
        ran is dropped; one that was preempted meanwhile keeps its token. Returns the requests that are finished.
        """
        self.completed_step = plan.step
        finished: list[Request] = []
        progressed: list[int] = []
        computed: list[int] = []
        outputs: list[int] = []
        ends: list[tuple[Request, Status]] = []
        tokens = iter(zip(sampled, is_stop, strict=True))
        for request, _, num_tokens, samples, num_preemptions in plan.shares:
            token, stops = next(tokens) if samples else (-1, False)
            if request.is_finished:
                continue
            if request.num_preemptions == num_preemptions:
                request.num_computed_tokens += num_tokens
                request.num_in_flight_tokens -= num_tokens
                request.progressed_step = plan.step
                self.manager.advance(request)
            if samples:
                request.num_output_placeholders -= 1
                request.append(token)
                if len(request.output_token_ids) == 1:
                    self.log.first_token(request.number)
                if stops:
                    ends.append((request, Status.FINISHED_STOPPED))
                elif self._is_at_length(request, 0):
                    ends.append((request, Status.FINISHED_LENGTH_CAPPED))
            progressed.append(request.number)
            computed.append(request.num_computed_tokens)
            outputs.append(len(request.output_token_ids))
        self.log.progressed(progressed, computed, outputs)
        for request, status in ends:
            self.finish(request, status)
            finished.append(request)
        self.manager.reclaim(plan.step)
        return finished

    def fail(self, plan: SchedulerOutput) -> list[Request]:
        """The oldest step in flight gave nothing: end its requests with an error. Returns those that it ended."""
        self.completed_step = plan.step
        failed = [share.request for share in plan.shares if not share.request.is_finished]
        for request in failed:
            self.finish(request, Status.FINISHED_ERROR)
        self.manager.reclaim(plan.step)
        return failed

    def _promote(self) -> None:
        """Put those that are ready back in the queue."""
        ready = [r for r in self._ready if not self.faults.strikes_request("stuck.promotion-starved", r.id)]
        for request in ready:
            self._ready.remove(request)
            self.waiting.put_back(request)
            self.log.queued(request.number, request.cause, at_front=True)

    def _schedule_running(self, plan: SchedulerOutput, only_prompts: bool = False) -> int:
        """Give the running requests their tokens. The budget that is left, or -1 if somebody lacks a block."""
        budget = self.max_num_batched_tokens
        short = False
        index = 0
        while index < len(self.running):
            request = self.running[index]
            if self._will_have_ended(request):
                index += 1
                continue
            if budget == 0:
                plan.limit = Limit.TOKENS
                self._pass_over(request, Cause.TOKEN_BUDGET)
                index += 1
                continue
            remaining = request.num_tokens + request.num_output_placeholders - request.num_scheduled_tokens
            num_tokens = min(remaining, budget)
            if only_prompts and remaining == 1:
                self._pass_over(request, Cause.TOKEN_BUDGET)
                index += 1
                continue
            if request.output_token_ids and self.faults.strikes_request("stuck.zero-token", request.id):
                self._pass_over(request, Cause.ZERO_TOKENS)
                index += 1
                continue
            while not self.manager.allocate(request, num_tokens):
                short = True
                if self.manager.num_fenced and not self.faults.strikes("thrash.cascade", request.id):
                    plan.limit = Limit.DEFERRED
                    self._pass_over(request, Cause.KV_BLOCKS)
                    index += 1
                    break
                plan.limit = Limit.KV
                victim = self._victim()
                budget += self._unschedule(plan, victim)
                if self.running.index(victim) < index:
                    index -= 1
                self._preempt(victim, request)
                if self.faults.strikes("collapse.preempt-all", victim.id):
                    for other in self.running[::-1]:
                        budget += self._unschedule(plan, other)
                        self._preempt(other, request)
                    return -1
                if victim is request:
                    break
            else:
                self._schedule(plan, request, num_tokens)
                budget -= num_tokens
                index += 1
        return -1 if short else budget

    def _will_have_ended(self, request: Request) -> bool:
        """Whether the step in flight samples its last token, whatever that is."""
        pending = request.num_output_placeholders
        return pending > 0 and self._is_at_length(request, pending)

    def _is_at_length(self, request: Request, pending: int) -> bool:
        """Whether it ends with so many tokens more than are known: it asks for no more, or model or pool take none."""
        num_tokens = request.num_tokens + pending
        if len(request.output_token_ids) + pending >= request.params.max_tokens or num_tokens >= self.max_model_len:
            return True
        if self.manager.fits(num_tokens) or self._outgrows(request):
            return False
        if not pending:
            logger.warning(
                "Request %s ends at %d tokens, short of its max_tokens: the pool's %d blocks hold no more of it",
                request.id,
                num_tokens,
                self.manager.pool.usable,
            )
        return True

    def _outgrows(self, request: Request) -> bool:
        """Whether a request that the pool cannot hold goes on all the same, by the fault stuck.self-preempt."""
        return self.faults.strikes_request("stuck.self-preempt", request.id)

    def _admit(self, plan: SchedulerOutput, budget: int) -> None:
        """Let waiting requests run, in order, as long as there is room."""
        while len(self.waiting):
            request = self.waiting.head()
            if budget == 0:
                plan.limit = Limit.TOKENS
                return self._pass_over(request, Cause.TOKEN_BUDGET)
            if len(self.running) >= self._seqs_allowed:
                plan.limit = Limit.SEQUENCES
                return self._pass_over(request, Cause.MAX_NUM_SEQS)
            room_for = self._room_for(request)
            # What one has fetched is in its blocks; and there are no hits for one that only a chunk has room of.
            known = request.number in self.manager.tables or not room_for
            prefix = None if known else self.manager.find_prefix(request)
            hits = prefix.num_blocks if prefix is not None else 0
            computed = request.num_computed_tokens + hits * self.manager.block_size
            outside = 0 if known else self._find_outside(request, hits)
            to_load = outside * self.manager.block_size
            num_tokens = to_load or min(request.num_tokens - computed, budget)
            if not self.manager.allocate(request, num_tokens, prefix, room_for):
                if self._unblock(request):
                    continue
                plan.limit = Limit.KV
                return self._pass_over(request, Cause.KV_BLOCKS)
            self.waiting.take()
            request.num_computed_tokens = computed
            request.times_passed_over = 0
            if self.manager.hasher is not None and prefix is not None:
                self.prefix_queries += request.num_tokens
                self.prefix_hits += computed
                self._say_looked_up(request, prefix, to_load)
            if outside:
                self._load(request, hits, outside)
                continue
            self.running.append(request)
            request.status, request.cause = Status.RUNNING, Cause.NONE
            self.log.admitted(request.number, request.num_computed_tokens)
            self._schedule(plan, request, num_tokens)
            budget -= num_tokens
        return None

    def _room_for(self, request: Request) -> int:
        """Tokens that there must be room for when it is admitted: all that it has, unless a fault says otherwise."""
        if not self.manager.fits(request.num_tokens) and self._outgrows(request):
            return 0
        if self.faults.strikes_request("stuck.head-of-line", request.id):
            longest = min(request.num_prompt_tokens + request.params.max_tokens, self.max_model_len)
            return min(longest, self.manager.pool.usable // len(self.manager.windows) * self.manager.block_size)
        return request.num_tokens

    def _say_looked_up(self, request: Request, prefix: Prefix, to_load: int) -> None:
        """What each KV group has of what those before it have; `to_load` tokens come from outside."""
        asked = request.num_tokens
        for group, blocks in enumerate(prefix.found):
            found = blocks * self.manager.block_size + to_load
            self.log.looked_up(request.number, asked, found, group)
            asked = found

    def _find_outside(self, request: Request, num_hits: int) -> int:
        """How many blocks after the prefix hit the connector could bring, never all: one token must be computed."""
        if self.connector is None:
            return 0
        return self.connector.find(request, num_hits, (request.num_tokens - 1) // self.manager.block_size)

    def _load(self, request: Request, first: int, count: int) -> None:
        """Have the connector fetch so many blocks, and set the request aside meanwhile."""
        assert self.connector is not None
        (table,) = self.manager.tables[request.number]
        load = KVLoad(request, first, table[first : first + count])
        self._loading[request.number] = load
        self.park(request, Status.WAITING_FOR_REMOTE_KVS)
        self.connector.start_load(load)

    def _unblock(self, head: Request) -> bool:
        """If only waiting requests hold blocks, the last of them gives its own back: nobody else ever would."""
        if self.running or self.in_flight or self._loading or self.manager.num_fenced:
            return False
        holders = [r for r in self.waiting if r is not head and r.number in self.manager.tables]
        if not holders or self.faults.strikes("stuck.parked-loads", head.id):
            return False
        self.waiting.remove(holders[-1])
        self._take_back(holders[-1], head)
        return True

    def _schedule(self, plan: SchedulerOutput, request: Request, num_tokens: int) -> None:
        request.cause, request.times_passed_over = Cause.NONE, 0
        start = request.num_scheduled_tokens
        samples = start + num_tokens == request.num_tokens + request.num_output_placeholders
        plan.shares.append(Share(request, start, num_tokens, samples, request.num_preemptions))

    def _unschedule(self, plan: SchedulerOutput, victim: Request) -> int:
        """Take a victim that had its turn already out of the plan; the tokens that this gives back."""
        for place, share in enumerate(plan.shares):
            if share.request is victim:
                del plan.shares[place]
                return share.num_tokens
        return 0

    def _victim(self) -> Request:
        if self.by_priority:
            return max(self.running, key=lambda r: (r.priority, r.arrived_ns, r.number))
        return self.running[-1]

    def _preempt(self, victim: Request, beneficiary: Request) -> None:
        self.running.remove(victim)
        self._seqs_allowed = max(1, len(self.running))
        self._take_back(victim, beneficiary)

    def _take_back(self, victim: Request, beneficiary: Request) -> None:
        """Take the blocks of a request that is in no queue, and put it back into the waiting one."""
        self.num_preemptions += 1
        blocks = sum(map(len, self.manager.held(victim.number)))
        reason = Preempt.PRIORITY if victim.priority > beneficiary.priority else Preempt.KV_BLOCKS
        self.log.preempted(victim.number, reason, beneficiary.number, blocks, victim.num_computed_tokens)
        self._free(victim, Release.PREEMPTED)
        victim.num_computed_tokens = victim.num_in_flight_tokens = 0
        victim.num_preemptions += 1
        victim.status, victim.cause = Status.PREEMPTED, Cause.PREEMPTED
        self.waiting.put_back(victim)
        self.log.queued(victim.number, Cause.PREEMPTED, at_front=True)

    def _pass_over(self, request: Request, cause: Cause) -> None:
        """A state, not an event a step: said when the cause changes, and as the count doubles."""
        request.times_passed_over = 1 if cause != request.cause else request.times_passed_over + 1
        request.cause = cause
        if request.times_passed_over & (request.times_passed_over - 1) == 0:
            self.log.not_scheduled(request.number, cause, request.times_passed_over)


CAUSE_OF_WAIT = {
    Status.WAITING_FOR_REMOTE_KVS: Cause.REMOTE_KV,
    Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR: Cause.GRAMMAR,
}
_RELEASE_OF = {Status.FINISHED_ABORTED: Release.ABORTED, Status.FINISHED_ERROR: Release.ERROR}
