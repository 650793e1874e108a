"""The shared state of the scheduler's parts: the queues, parked requests, the count of steps, and freeing behind a
step.
"""

from __future__ import annotations

from kvscope.engine.blocks.kv_cache_manager import KVCacheManager
from kvscope.engine.faults import Faults
from kvscope.engine.requests.request import Request
from kvscope.engine.scheduling.scheduling_rules import SchedulingRules
from kvscope.engine.scheduling.waiting_queue import FCFSQueue, PriorityQueue, WaitingQueue
from kvscope.monitor.events.event_log import EventLog
from kvscope.monitor.events.kinds import Cause, Release, Status

CAUSE_OF_WAIT = {
    Status.WAITING_FOR_REMOTE_KVS: Cause.REMOTE_KV,
    Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR: Cause.GRAMMAR,
}


class SchedulerState:
    """The requests of a scheduler and the queue that each of them is in. One thread only."""

    def __init__(
        self,
        manager: KVCacheManager,
        log: EventLog,
        faults: Faults,
        *,
        max_num_seqs: int,
        by_priority: bool,
        rules: SchedulingRules,
    ) -> None:
        self.rules = rules
        self.manager = manager
        self.log = log
        self.faults = faults
        self.max_num_seqs = max_num_seqs
        self.by_priority = by_priority
        self.requests: dict[int, Request] = {}
        self.running: list[Request] = []
        self.waiting: WaitingQueue = PriorityQueue() if by_priority else FCFSQueue()
        self.parked: dict[int, Request] = {}
        """Requests that wait for something outside the scheduler, by number."""
        self.unparked: list[Request] = []
        """Requests whose wait is over, and that the next pass puts back in the queue."""
        self.seqs_allowed = max_num_seqs
        """How many may run at once now: fewer than max_num_seqs for a while after a preemption."""
        self.step = 0
        """The next step to be planned."""
        self.completed_step = -1

    @property
    def in_flight(self) -> bool:
        """Whether a step was planned and is not complete."""
        return self.completed_step + 1 < self.step

    def is_in_flight(self, request: Request) -> bool:
        """Whether the request is part of a step that is not complete."""
        return request.last_step > self.completed_step

    def remove(self, request: Request) -> None:
        """Take a request out of the queue that it is in."""
        if request.status == Status.RUNNING:
            self.running.remove(request)
        elif request.number in self.parked:
            del self.parked[request.number]
        elif request in self.unparked:
            self.unparked.remove(request)
        else:
            self.waiting.remove(request)

    def park(self, request: Request, status: Status) -> None:
        """Set a request aside that is in no queue, until `unpark`. `status` names the object of its wait."""
        request.status, request.cause = status, CAUSE_OF_WAIT[status]
        self.parked[request.number] = request
        self.log.waiting_on(request.number, status)

    def unpark(self, request: Request) -> None:
        """End the wait of a parked request: the next pass queues it again."""
        del self.parked[request.number]
        request.status, request.cause = Status.WAITING, Cause.NEW
        self.unparked.append(request)
        self.log.ready(request.number)

    def promote(self) -> None:
        """Put requests whose wait is over back in the queue, at their places."""
        ready = [r for r in self.unparked if not self.faults.triggers_on_request("stuck.promotion-starved", r.id)]
        for request in ready:
            self.unparked.remove(request)
            self.waiting.put_back(request)
            self.log.queued(request.number, request.cause, at_front=True)

    def free(self, request: Request, reason: Release) -> None:
        """Free a request's blocks, at once or behind the step in flight that may still write to them."""
        fence = request.last_step if self.rules.fences_frees and self.is_in_flight(request) else None
        self.manager.free(request, reason, fence)

    def pass_over(self, request: Request, cause: Cause) -> None:
        """Note why a request is not scheduled. It is reported when the cause changes and as the count doubles."""
        request.times_passed_over = 1 if cause != request.cause else request.times_passed_over + 1
        request.cause = cause
        if request.times_passed_over & (request.times_passed_over - 1) == 0:
            self.log.not_scheduled(request.number, cause, request.times_passed_over)
