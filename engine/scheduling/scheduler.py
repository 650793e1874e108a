"""Decides what each step computes: continuous batching over a block pool. Imports no torch.

A step serves the running requests first, in order, then admits waiting ones, all within `max_num_batched_tokens` and
`max_num_seqs`. A prompt may be computed in chunks over several steps. When a running request cannot get a block, the
last admitted one (or, under the priority policy, the least urgent) is preempted: it loses its blocks and will be
computed again. A waiting request is admitted only when its whole prompt would fit now, and the first that does not fit
holds back those behind it. After a preemption no more may run at once than are left, and one more with each step. A
request that has come to fill the whole pool ends there, as it would at `max_model_len`: nothing could make room.

A step may be planned while the one before it runs: a request that will have sampled a token by then is given its next
one. Blocks that such a request loses in the meantime, by its end or by a preemption, become free only when the last
step that it is part of is complete: until then that step may write to them. As long as freed blocks wait for that, no
other request is preempted for a block.

A request that waits for something outside, such as its grammar or KV that a connector fetches, is parked beside the
queue and blocks no other. Once its wait is over it is ready, and stands in the queue again at its place.

Every event of a request or a queue is logged where it happens.
"""

from __future__ import annotations

import logging

from kvscope.monitor.contract.event_log import EventLog
from kvscope.monitor.contract.kinds import Cause, Limit, Release, Status

from ..blocks.kv_cache_manager import KVCacheManager
from ..connectors.base import KVConnector
from ..faults import Faults
from ..requests.request import Request
from .admission import Admission, ConnectorTransfers, PreemptionPolicy, outgrows_pool
from .scheduler_state import OWN_RULES, SchedulerOutput, SchedulerState, SchedulingRules

logger = logging.getLogger(__name__)


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
        rules: SchedulingRules = OWN_RULES,
    ) -> None:
        self.manager = manager
        self.log = log
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.faults = faults or Faults()
        self.state = SchedulerState(
            manager, log, self.faults, max_num_seqs=max_num_seqs, by_priority=policy == "priority", rules=rules
        )
        self.requests = self.state.requests
        self.running = self.state.running
        self.waiting = self.state.waiting
        self.parked = self.state.parked
        self.transfers = ConnectorTransfers(self.state, connector, lease_s)
        self.deferred = self.transfers.deferred
        self.passes = 0
        self._preemption = PreemptionPolicy(self.state)
        self._admission = Admission(self.state, self._preemption, self.transfers, max_model_len)

    @property
    def step(self) -> int:
        """The next step to be planned."""
        return self.state.step

    @property
    def completed_step(self) -> int:
        """The last step that is complete, or -1 before any."""
        return self.state.completed_step

    @property
    def has_work(self) -> bool:
        """Whether a request is running, or waiting for its turn."""
        return bool(self.running or len(self.waiting) or self.state.unparked)

    @property
    def num_waiting(self) -> int:
        """Requests that are neither running nor finished, those included that wait for something outside."""
        return len(self.waiting) + len(self.parked) + len(self.state.unparked)

    @property
    def in_flight(self) -> bool:
        """Whether a step was planned and is not complete."""
        return self.state.in_flight

    @property
    def num_preemptions(self) -> int:
        """Preemptions since the engine started."""
        return self._preemption.count

    @property
    def prefix_queries(self) -> int:
        """Tokens that were looked up in the prefix cache since the engine started."""
        return self._admission.prefix_queries

    @property
    def prefix_hits(self) -> int:
        """Tokens of those that the pool had cached."""
        return self._admission.prefix_hits

    # ---------------------------------------------------------------- arrivals and ends

    def add(self, request: Request) -> None:
        """Queue a request. One whose output has a grammar waits for that first."""
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
            return self.state.park(request, Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)
        request.status, request.cause = Status.WAITING, Cause.NEW
        self.waiting.put(request)
        return self.log.queued(request.number, Cause.NEW)

    def ready(self, request: Request) -> None:
        """End the wait of a parked request: the next pass queues it again."""
        self.state.unpark(request)

    def finish(self, request: Request, status: Status) -> None:
        """End a request wherever it is, and free its blocks unless the connector needs them for a while."""
        self.state.remove(request)
        request.status, request.cause = status, Cause.NONE
        self.log.finished(request.number, status)
        completed_normally = status in (Status.FINISHED_STOPPED, Status.FINISHED_LENGTH_CAPPED)
        if self.transfers.defers(request, completed_normally):
            return
        del self.requests[request.number]
        self.state.free(request, Release.FINISHED if completed_normally else _RELEASE_OF[status])

    def abort(self, number: int) -> Request | None:
        """End a request whose client left. Returns the request, or None if it has ended already."""
        request = self.requests.get(number)
        if request is None or request.is_finished:
            return None
        self.finish(request, Status.FINISHED_ABORTED)
        return request

    def take_completions(self) -> None:
        """Free the blocks that the connector needs no longer, and those that it kept for longer than its lease."""
        self.transfers.take_completions(self.has_work)

    def take_loads(self) -> None:
        """Let the requests go on whose fetch has ended, with the tokens that it delivered."""
        self.transfers.take_loads()

    # ---------------------------------------------------------------- a step

    def schedule(self) -> SchedulerOutput:
        """Plan the next step. An empty plan means that nothing could be done now."""
        state = self.state
        self.passes += 1
        plan = SchedulerOutput(state.step)
        state.promote()
        prompts_first = self.faults.triggers("collapse.lockstep", "")
        budget = self._schedule_running(plan, prompts_first)
        if budget >= 0:
            self._admission.admit(plan, budget)
        elif len(self.waiting):
            state.pass_over(self.waiting.head(), Cause.PREEMPTION_IN_STEP)
        if prompts_first and not plan.shares:
            self._schedule_running(plan)
        if plan.shares:
            state.step += 1
            if state.seqs_allowed < state.max_num_seqs and not self.faults.triggers("thrash.after-retract", ""):
                state.seqs_allowed += 1
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

        `is_stop` decides for each such token whether it ends the output. Tokens of requests that ended while the step
        ran are dropped. One that was preempted meanwhile keeps its token. Returns the requests that are finished.
        """
        self.state.completed_step = plan.step
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
        """End the requests of the oldest step in flight, which gave nothing, with an error. Returns those that it
        ended.
        """
        self.state.completed_step = plan.step
        failed = [share.request for share in plan.shares if not share.request.is_finished]
        for request in failed:
            self.finish(request, Status.FINISHED_ERROR)
        self.manager.reclaim(plan.step)
        return failed

    def _schedule_running(self, plan: SchedulerOutput, only_prompts: bool = False) -> int:
        """Give the running requests their tokens. Returns the budget left, or -1 if one is short of a block."""
        budget = self.max_num_batched_tokens
        short = False
        index = 0
        while index < len(self.running):
            request = self.running[index]
            if self._will_have_ended(request):
                index += 1
                continue
            remaining = request.num_tokens + request.num_output_placeholders - request.num_scheduled_tokens
            cause = None
            if budget == 0:
                plan.limit, cause = Limit.TOKENS, Cause.TOKEN_BUDGET
            elif only_prompts and remaining == 1:
                cause = Cause.TOKEN_BUDGET
            elif request.output_token_ids and self.faults.triggers_on_request("stuck.zero-token", request.id):
                cause = Cause.ZERO_TOKENS
            if cause is not None:
                self.state.pass_over(request, cause)
                index += 1
                continue
            num_tokens = min(remaining, budget)
            while not self.manager.allocate(request, num_tokens):
                short = True
                if self.manager.num_fenced and not self.faults.triggers("thrash.cascade", request.id):
                    plan.limit = Limit.DEFERRED
                    self.state.pass_over(request, Cause.KV_BLOCKS)
                    index += 1
                    break
                plan.limit = Limit.KV
                victim = self._preemption.victim()
                index -= self.running.index(victim) < index
                budget += self._preemption.preempt(plan, victim, request)
                if self.faults.triggers("collapse.preempt-all", victim.id):
                    for other in self.running[::-1]:
                        self._preemption.preempt(plan, other, request)
                    return -1
                if victim is request:
                    break
            else:
                plan.add(request, num_tokens)
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
        if self.manager.fits(num_tokens) or outgrows_pool(self.state, request):
            return False
        if not pending:
            logger.warning(
                "Request %s ends at %d tokens, short of its max_tokens: the pool's %d blocks hold no more of it",
                request.id,
                num_tokens,
                self.manager.pool.usable,
            )
        return True


_RELEASE_OF = {Status.FINISHED_ABORTED: Release.ABORTED, Status.FINISHED_ERROR: Release.ERROR}
