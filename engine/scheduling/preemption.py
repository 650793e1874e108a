"""Preemption: take the blocks of one request so that another can go on."""

from __future__ import annotations

from kvscope.engine.requests.request import Request
from kvscope.engine.scheduling.scheduler_state import SchedulerState
from kvscope.engine.scheduling.step_plan import SchedulerOutput
from kvscope.monitor.events.kinds import Cause, Preempt, Release, Status


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
