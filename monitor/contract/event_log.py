"""The log into which an engine writes its events, in its own thread, at the place where each thing happens.

An event is appended to flat lists: a run of five numbers, its args, its ids. This module neither packs nor sends
anything: `flush` hands the lists over and starts new ones. The drain thread (publisher.py) does the rest.

`EventLog` is the real one, `SilentLog` the one of an engine whose stream is off.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from .kinds import Cause, EngineMode, Holder, Kind, Layer, Limit, Load, Preempt, Release, Status, Tier, TierOp
from .trace_context import TraceContext
from .wire import NO_REQUEST, STACK_TEXT


class Clock(Protocol):
    """The source of time: the module `time` is one, a lab's virtual clock another."""

    def monotonic_ns(self) -> int:
        """Nanoseconds that never go back."""
        ...

    def time_ns(self) -> int:
        """Nanoseconds since 1970."""
        ...


EngineHash: TypeAlias = int | bytes
"""The hash of a prefix: keyed, or the bytes from which `EventLog.keyed` makes it before packing."""


class Flushed(NamedTuple):
    """The events between two flushes, still as lists."""

    first_step: int
    last_step: int
    wall_ns: int
    mono_ns: int
    counts: tuple[int, int, int, int]
    dropped_batches: int
    dropped_events: int
    texts: dict[int, str]
    runs: list[int]
    args: list[Any]
    ids: list[int]


class EventLog:
    """A log that keeps its events until a flush, and then at most `capacity` flushes.

    When the drain thread is that far behind, a flush is dropped whole and counted in `dropped_batches` and
    `dropped_events`: the engine does not wait.
    """

    on = True

    def __init__(self, clock: Clock = time, capacity: int = 4096) -> None:
        self.clock = clock
        self.capacity = capacity
        self.flushed: deque[tuple[Any, ...]] = deque()
        """The fields of a Flushed each: the consumer makes the named tuple."""
        self.keyed: Callable[[bytes], int] | None = None
        """Makes hashes that may leave the process of those that may not: in the drain thread, as it takes longer."""
        self.side: deque[tuple[tuple[int, int, int, int, int], tuple[int, ...], dict[int, str]]] = deque()
        self.flushes = 0
        """Flushes that had something to hand over."""
        self.dropped_batches = 0
        self.dropped_events = 0
        self._dropping = threading.Lock()
        self._texts: dict[int, str] = {}
        self._runs: list[int] = []
        self._args: list[Any] = []
        self._ids: list[int] = []

    def _event(
        self, kind: Kind, request: int, args: Sequence[Any] = (), ids: Sequence[int] = (), group: int = 0
    ) -> None:
        """Append an event. The frequent ones are appended where they are logged, which saves the call."""
        self._runs += (kind, group, request, len(args), len(ids))
        self._args += args
        self._ids += ids

    def started(self, total: int, reserved: int, block_size: int, description: str) -> None:
        """Log the start of an engine's epoch. `description` is JSON (kvscope.monitor.contract.description)."""
        self._texts[NO_REQUEST] = description
        self._event(Kind.STARTED, NO_REQUEST, (self.clock.monotonic_ns(), total, reserved, block_size))

    def stopped(self) -> None:
        """Log the engine's orderly end."""
        self._event(Kind.STOPPED, NO_REQUEST, (self.clock.monotonic_ns(),))

    def tick(self, at_ns: int | None = None) -> None:
        """Set the time of the events that follow, now by default. Steps carry their own time."""
        self._runs += (_CLOCK, 0, NO_REQUEST, 1, 0)
        self._args.append(self.clock.monotonic_ns() if at_ns is None else at_ns)

    def engine_mode(self, mode: EngineMode) -> None:
        """Log that the engine was paused, put to sleep, or serves again."""
        self._event(Kind.ENGINE_MODE, NO_REQUEST, (self.clock.monotonic_ns(), mode))

    def step_launched(
        self, step: int, requests: Sequence[int], tokens: Collection[int], at_ns: int | None = None
    ) -> None:
        """Log that the model got the step with these tokens for each request, now by default."""
        self._runs += (_STEP_LAUNCHED, 0, NO_REQUEST, 2 + len(tokens), len(requests))
        self._args += (self.clock.monotonic_ns() if at_ns is None else at_ns, step)
        self._args += tokens
        self._ids += requests

    def step_completed(
        self,
        step: int,
        duration_ns: int,
        limit: Limit,
        free: int,
        cached_idle: int,
        used: int,
        at_ns: int | None = None,
    ) -> None:
        """Log the end of a step, now by default. The counts are the pool's own."""
        self._runs += (_STEP_COMPLETED, 0, NO_REQUEST, 7, 0)
        at_ns = self.clock.monotonic_ns() if at_ns is None else at_ns
        self._args += (at_ns, step, duration_ns, limit, free, cached_idle, used)

    def step(
        self,
        step: int,
        requests: Sequence[int],
        tokens: Collection[int],
        limit: Limit,
        free: int,
        cached_idle: int,
        used: int,
        launched_ns: int,
        completed_ns: int,
    ) -> None:
        """Log launch and end of a step during which nothing else happened."""
        self._runs += (_STEP_LAUNCHED, 0, NO_REQUEST, 2 + len(tokens), len(requests))
        self._runs += (_STEP_COMPLETED, 0, NO_REQUEST, 7, 0)
        self._ids += requests
        args = self._args
        args += (launched_ns, step)
        args += tokens
        args += (completed_ns, step, completed_ns - launched_ns, limit, free, cached_idle, used)

    def allocated(self, request: int, ids: Sequence[int], evicted: Sequence[EngineHash] = (), group: int = 0) -> None:
        """Log that free blocks became the request's. `evicted` are the hashes they lost."""
        self._runs += (_ALLOCATED, group, request, len(evicted), len(ids))
        self._ids += ids
        if evicted:
            self._args += evicted

    def reused(self, request: int, ids: Sequence[int], group: int = 0) -> None:
        """Log a prefix hit on these blocks."""
        self._runs += (_REUSED, group, request, 0, len(ids))
        self._ids += ids

    def cached(self, request: int, ids: Sequence[int], hashes: Sequence[EngineHash], group: int = 0) -> None:
        """Log that full blocks entered the prefix cache under these hashes."""
        self._runs += (_CACHED, group, request, len(hashes), len(ids))
        self._ids += ids
        self._args += hashes

    def evicted(self, ids: Sequence[int], cause: int, group: int = 0) -> None:
        """Log that cached blocks lost their hash."""
        self._event(Kind.EVICTED, NO_REQUEST, (cause,), ids, group)

    def detached(self, request: int, ids: Sequence[int], group: int = 0) -> None:
        """Log that these left the request's table and are not yet free."""
        self._event(Kind.DETACHED, request, (), ids, group)

    def released(self, request: int, ids: Sequence[int], reason: Release, group: int = 0) -> None:
        """Log that the request released its reference to each of these."""
        self._runs += (_RELEASED, group, request, 1, len(ids))
        self._args.append(reason)
        self._ids += ids

    def free_deferred(
        self,
        request: int,
        ids: Sequence[int],
        holder: Holder,
        fence: int = 0,
        lease_deadline_ns: int = 0,
        group: int = 0,
    ) -> None:
        """Log that these stay allocated after the request's end."""
        self._event(Kind.FREE_DEFERRED, request, (holder, fence, lease_deadline_ns), ids, group)

    def reclaimed(self, ids: Sequence[int], reason: Release, group: int = 0) -> None:
        """Log that the reference to each of these detached blocks was released."""
        self._event(Kind.RECLAIMED, NO_REQUEST, (reason,), ids, group)

    def pinned(self, ids: Sequence[int]) -> None:
        """Log one more reference to each of these, by something other than a request."""
        self._event(Kind.PINNED, NO_REQUEST, (), ids)

    def unpinned(self, ids: Sequence[int]) -> None:
        """Log that one such reference to each of these was released."""
        self._event(Kind.UNPINNED, NO_REQUEST, (), ids)

    def looked_up(self, request: int, tokens: int, hit_tokens: int, group: int = 0) -> None:
        """Log a look-up in the prefix cache."""
        self._event(Kind.LOOKED_UP, request, (tokens, hit_tokens), group=group)

    def arrived(
        self,
        request: int,
        text: str,
        prompt_tokens: int,
        max_tokens: int,
        priority: int,
        blocks_to_admit: int,
        blocks_to_finish: int,
    ) -> None:
        """Log that a request reached the scheduler. `text` is the id that its client and the log know."""
        self._texts[request] = text
        now_ns = self.clock.monotonic_ns()
        args = (now_ns, prompt_tokens, max_tokens, priority, blocks_to_admit, blocks_to_finish)
        self._event(Kind.ARRIVED, request, args)

    def traced(self, request: int, trace: TraceContext) -> None:
        """Log that it arrived as part of its caller's trace."""
        self._event(Kind.TRACED, request, trace)

    def queued(self, request: int, cause: Cause, at_front: bool = False) -> None:
        """Log that it was put in the waiting queue."""
        self._event(Kind.QUEUED, request, (cause, at_front))

    def allocation_failed(self, request: int, needed: int, free: int) -> None:
        """Log that an allocation failed."""
        self._event(Kind.ALLOCATION_FAILED, request, (needed, free))

    def not_scheduled(self, request: int, cause: Cause, times: int) -> None:
        """Log that the scheduler skipped it for this cause, with the count so far."""
        self._event(Kind.NOT_SCHEDULED, request, (cause, times))

    def admitted(self, request: int, num_computed_tokens: int) -> None:
        """Log that it runs from here on."""
        self._event(Kind.ADMITTED, request, (num_computed_tokens,))

    def first_token(self, request: int) -> None:
        """Log its first output token."""
        self._event(Kind.FIRST_TOKEN, request)

    def progressed(self, requests: Sequence[int], computed: Sequence[int], outputs: Sequence[int]) -> None:
        """Log how far each of these requests is after a step."""
        self._runs += (_PROGRESSED, 0, NO_REQUEST, 2 * len(requests), len(requests))
        self._args += computed
        self._args += outputs
        self._ids += requests

    def preempted(self, request: int, reason: Preempt, for_request: int, blocks: int, tokens_lost: int) -> None:
        """Log that it lost its blocks."""
        self._event(Kind.PREEMPTED, request, (reason, for_request, blocks, tokens_lost))

    def waiting_on(self, request: int, status: Status) -> None:
        """Log that it waits for something outside the scheduler."""
        self._event(Kind.WAITING_ON, request, (status,))

    def ready(self, request: int) -> None:
        """Log that the wait of `waiting_on` is over."""
        self._event(Kind.READY, request)

    def remote_load(self, request: int, outcome: Load, tokens: int) -> None:
        """Log the end of a fetch of remote KV."""
        self._event(Kind.REMOTE_LOAD, request, (outcome, tokens))

    def completion_delivered(self, request: int) -> None:
        """Log that the connector is done with the request's blocks."""
        self._event(Kind.COMPLETION_DELIVERED, request, (self.clock.monotonic_ns(),))

    def finished(self, request: int, status: Status) -> None:
        """Log that it reached a terminal status."""
        self._event(Kind.FINISHED, request, (status,))

    def tier(self, op: TierOp, tier: Tier, used: int, capacity: int, hashes: Sequence[int]) -> None:
        """Log a change of an outer tier."""
        self._event(Kind.TIER, NO_REQUEST, (op, tier, used, capacity, *hashes))

    def memory(self, breakdown: Sequence[int]) -> None:
        """Log the memory breakdown, in the order of SCHEMA[Kind.MEMORY]."""
        self._event(Kind.MEMORY, NO_REQUEST, breakdown)

    def audit_begin(self, cycle: int) -> None:
        """Log the begin of an audit, which reads out the engine's own tables."""
        self._event(Kind.AUDIT_BEGIN, NO_REQUEST, (cycle,))

    def audit_blocks(self, first_block: int, packed: Sequence[int]) -> None:
        """Log consecutive blocks: reference count × 4, + 2 if in the free queue, + 1 if hashed."""
        self._event(Kind.AUDIT_BLOCKS, NO_REQUEST, (first_block,), packed)

    def audit_request(
        self,
        request: int,
        text: str,
        status: Status,
        computed: int,
        outputs: int,
        ids: Sequence[int],
        holder: int = 0,
        fence: int = 0,
        lease_deadline_ns: int = 0,
        detached: bool = False,
        group: int = 0,
    ) -> None:
        """Log a request's block table, and its holder after its end (`holder` 0: none)."""
        self._texts[request] = text
        args = (status, computed, outputs, holder, fence, lease_deadline_ns, detached)
        self._event(Kind.AUDIT_REQUEST, request, args, ids, group)

    def audit_end(self, cycle: int, free: int, cached_idle: int, used: int, requests: int) -> None:
        """Log the end of the audit."""
        self._event(Kind.AUDIT_END, NO_REQUEST, (cycle, free, cached_idle, used, requests))

    def received(
        self, request: int, text: str, prompt_tokens: int, trace: TraceContext | None = None, at_ns: int = 0
    ) -> None:
        """Log that the front end received it at `at_ns` (0: now), in its caller's `trace` if any. From any thread."""
        self._aside(Kind.RECEIVED, request, (at_ns or self.clock.monotonic_ns(), prompt_tokens), text)
        if trace is not None:
            self._aside(Kind.TRACED, request, trace)

    def fetch_ended(self, request: int) -> None:
        """Log that the connector has fetched the request's KV, before the engine polls it. From any thread."""
        self._aside(Kind.COMPLETION_DELIVERED, request, (self.clock.monotonic_ns(),))

    def client_gone(self, request: int) -> None:
        """Log that the client closed the connection. From any thread."""
        self._aside(Kind.CLIENT_GONE, request, (self.clock.monotonic_ns(),))

    def ended_before_arrival(self, request: int, status: Status) -> None:
        """Log that it ended after reception without reaching the scheduler. From any thread."""
        self._aside(Kind.FINISHED, request, (status,))

    def stalled(self, request: int, status: Status, since_step: int, cause: Cause) -> None:
        """Log that the engine's watchdog saw no progress. From any thread."""
        self._aside(Kind.STALLED, request, (self.clock.monotonic_ns(), status, since_step, cause))

    def not_queued(self, request: int, status: Status) -> None:
        """Log that it is unfinished and in none of the engine's queues. From any thread."""
        self._aside(Kind.NOT_QUEUED, request, (self.clock.monotonic_ns(), status))

    def stack(self, step: int, since_ns: int, layer: Layer, frames: str) -> None:
        """Log that the engine's thread has stood in this step since then. `frames` has a line each. From any thread."""
        self._aside(Kind.STACK, NO_REQUEST, (self.clock.monotonic_ns(), step, since_ns, layer), frames, STACK_TEXT)

    def _aside(
        self, kind: Kind, request: int, args: tuple[int, ...], text: str | None = None, text_of: int | None = None
    ) -> None:
        """Log from another thread than the engine's: one atomic append, apart from the engine's own lists."""
        if len(self.side) >= self.capacity:
            self._drop(1)
            return
        texts = {} if text is None else {request if text_of is None else text_of: text}
        self.side.append(((kind, 0, request, len(args), 0), args, texts))

    def _drop(self, events: int) -> None:
        with self._dropping:  # taken on loss only
            self.dropped_batches += 1
            self.dropped_events += events

    def flush(self, first_step: int, last_step: int, counts: tuple[int, int, int, int]) -> None:
        """Hand over the events since the last flush. `counts` are free, cached-idle, used, total. Never waits."""
        if not self._runs:
            return
        self.flushes += 1
        if len(self.flushed) >= self.capacity:
            self._drop(count_events(self._runs))
        else:
            self.flushed.append(
                (
                    first_step,
                    last_step,
                    self.clock.time_ns(),
                    self.clock.monotonic_ns(),
                    counts,
                    self.dropped_batches,
                    self.dropped_events,
                    self._texts,
                    self._runs,
                    self._args,
                    self._ids,
                )
            )
        self._texts, self._runs, self._args, self._ids = {}, [], [], []


class SilentLog(EventLog):
    """The log of an engine whose stream is off: it takes every event and keeps none."""

    on = False


def _ignore_call(*_args: object, **_kwargs: object) -> None:
    pass


for _name in [name for name in vars(EventLog) if not name.startswith("_") and callable(getattr(EventLog, name))]:
    setattr(SilentLog, _name, _ignore_call)


def count_events(runs: Iterable[int]) -> int:
    """Return how many events a flat list of runs holds, each block of an event counting as one: the unit of loss."""
    values = list(runs)
    return sum(max(1, ids) for ids in values[4::5])


# Members of an IntEnum are looked up through the class; what is written every step is kept as plain numbers.
_CLOCK = int(Kind.CLOCK)
_STEP_LAUNCHED = int(Kind.STEP_LAUNCHED)
_STEP_COMPLETED = int(Kind.STEP_COMPLETED)
_ALLOCATED = int(Kind.ALLOCATED)
_REUSED = int(Kind.REUSED)
_CACHED = int(Kind.CACHED)
_RELEASED = int(Kind.RELEASED)
_PROGRESSED = int(Kind.PROGRESSED)
