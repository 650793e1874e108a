"""What the scheduler's parts share: its rules, the plan of a step, the waiting queue, and parked requests."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvscope.monitor.contract.event_log import EventLog
from kvscope.monitor.contract.kinds import Cause, Limit, Release, Status

from ..blocks.kv_cache_manager import KVCacheManager
from ..faults import Faults
from ..requests.request import Request


@dataclass(frozen=True)
class SchedulingRules:
    """How a scheduler behaves where engines differ. The defaults are those of kvscope's own engine.

    settles_when_planned: blocks enter the prefix cache in the pass that plans their tokens, several blocks of one
    prefix are kept, and windows free the blocks behind them in the request's next pass. Otherwise all of that happens
    once the tokens are computed, with one block a prefix. fences_frees: blocks freed while a step in flight may write
    them become free when it is complete. vLLM does so only with a consuming connector. damps_readmission: after a
    preemption no more requests may run than are left, and one more with each step. awaits_dropped_steps: a preempted
    request is admitted only when the steps in flight that it was part of are over, and those behind it may go first.
    queues_at_front: a preempted request goes to the front, whenever it came.
    """

    settles_when_planned: bool = False
    fences_frees: bool = True
    damps_readmission: bool = True
    awaits_dropped_steps: bool = False
    queues_at_front: bool = False


OWN_RULES: Final = SchedulingRules()
VLLM_RULES: Final = SchedulingRules(
    settles_when_planned=True,
    fences_frees=False,
    damps_readmission=False,
    awaits_dropped_steps=True,
    queues_at_front=True,
)
"""The rules of vLLM 0.32 without a connector, checked step by step in tests/probes/test_vllm_differential.py."""


class Share(NamedTuple):
    """A request's part of a step: `num_tokens` tokens from `start` on. `samples` if its next token comes of it."""

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

    def add(self, request: Request, num_tokens: int) -> None:
        """Compute `num_tokens` more of a request in this step."""
        request.cause, request.times_passed_over = Cause.NONE, 0
        start = request.num_scheduled_tokens
        samples = start + num_tokens == request.num_tokens + request.num_output_placeholders
        self.shares.append(Share(request, start, num_tokens, samples, request.num_preemptions))

    def drop(self, victim: Request) -> int:
        """Take a preempted request out of the plan and return the tokens that this frees of the budget."""
        for place, share in enumerate(self.shares):
            if share.request is victim:
                del self.shares[place]
                return share.num_tokens
        return 0


class FCFSQueue:
    """First come, first served."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def put(self, request: Request) -> None:
        """Put a request at the back."""
        self._requests.append(request)

    def put_back(self, request: Request) -> None:
        """Put a request before those that arrived after it."""
        place = next((i for i, other in enumerate(self._requests) if other.number > request.number), len(self))
        self._requests.insert(place, request)

    def put_front(self, request: Request) -> None:
        """Put a request at the front."""
        self._requests.appendleft(request)

    def head(self) -> Request:
        """Return the request that has waited longest."""
        return self._requests[0]

    def take(self) -> Request:
        """Remove and return the head."""
        return self._requests.popleft()

    def remove(self, request: Request) -> None:
        """Remove a request that is in the queue."""
        self._requests.remove(request)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)


class PriorityQueue:
    """The lowest priority value first, and among equals the one that arrived first."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Request]] = []

    def put(self, request: Request) -> None:
        """Put a request at the place that its priority gives it."""
        heapq.heappush(self._heap, (request.priority, request.arrived_ns, request.number, request))

    put_back = put_front = put

    def head(self) -> Request:
        """Return the most urgent request."""
        return self._heap[0][-1]

    def take(self) -> Request:
        """Remove and return the head."""
        return heapq.heappop(self._heap)[-1]

    def remove(self, request: Request) -> None:
        """Remove a request that is in the queue."""
        self._heap = [entry for entry in self._heap if entry[-1] is not request]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (entry[-1] for entry in sorted(self._heap, key=lambda entry: entry[:3]))


WaitingQueue = FCFSQueue | PriorityQueue
"""Requests that wait to run. `put_back` and `put_front` are for those that were taken before: preempted, or parked."""
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
