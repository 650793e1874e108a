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

from kvscope.monitor.events.kinds import (
    Cause,
    EngineMode,
    Holder,
    Kind,
    Layer,
    Limit,
    Load,
    Preempt,
    Release,
    Status,
    Tier,
    TierOp,
)
from kvscope.monitor.events.trace_context import TraceContext
from kvscope.monitor.events.wire import NO_REQUEST, STACK_TEXT


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

    def started(self, total: int, reserved: int, block_size: int, description: str) -> None:
        """Log the start of an engine's epoch. `description` is JSON (kvscope.monitor.events.description)."""
        self._texts[NO_REQUEST] = description
        self._runs += (Kind.STARTED, 0, NO_REQUEST, 4, 0)
        self._args += (self.clock.monotonic_ns(), total, reserved, block_size)

    def stopped(self) -> None:
        """Log the engine's orderly end."""
        self._runs += (Kind.STOPPED, 0, NO_REQUEST, 1, 0)
        self._args.append(self.clock.monotonic_ns())

    def tick(self, at_ns: int | None = None) -> None:
        """Set the time of the events that follow, now by default. Steps carry their own time."""
        self._runs += (_CLOCK, 0, NO_REQUEST, 1, 0)
        self._args.append(self.clock.monotonic_ns() if at_ns is None else at_ns)

    def engine_mode(self, mode: EngineMode) -> None:
        """Log that the engine was paused, put to sleep, or serves again."""
        self._runs += (Kind.ENGINE_MODE, 0, NO_REQUEST, 2, 0)
        self._args += (self.clock.monotonic_ns(), mode)

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
        """Both, of a step during which nothing else happened."""
        self._runs += (
            _STEP_LAUNCHED,
            0,
            NO_REQUEST,
            2 + len(tokens),
            len(requests),
            _STEP_COMPLETED,
            0,
            NO_REQUEST,
            7,
            0,
        )
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
        """Full blocks entered the prefix cache under these hashes."""
        self._runs += (_CACHED, group, request, len(hashes), len(ids))
        self._ids += ids
        self._args += hashes

    def evicted(self, ids: Sequence[int], cause: int, group: int = 0) -> None:
        """Log that cached blocks lost their hash."""
        self._runs += (Kind.EVICTED, group, NO_REQUEST, 1, len(ids))
        self._args.append(cause)
        self._ids += ids

    def detached(self, request: int, ids: Sequence[int], group: int = 0) -> None:
        """No longer in the request's table, not yet free."""
        self._runs += (Kind.DETACHED, group, request, 0, len(ids))
        self._ids += ids

    def released(self, request: int, ids: Sequence[int], reason: Release, group: int = 0) -> None:
        """Log that the request gave up its reference to each of these."""
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
        """Log that the request's end does not free these."""
        self._runs += (Kind.FREE_DEFERRED, group, request, 3, len(ids))
        self._args += (holder, fence, lease_deadline_ns)
        self._ids += ids

    def reclaimed(self, ids: Sequence[int], reason: Release, group: int = 0) -> None:
        """Detached blocks gave their reference back."""
        self._runs += (Kind.RECLAIMED, group, NO_REQUEST, 1, len(ids))
        self._args.append(reason)
        self._ids += ids

    def pinned(self, ids: Sequence[int]) -> None:
        """One more reference to each of these, by something other than a request."""
        self._runs += (Kind.PINNED, 0, NO_REQUEST, 0, len(ids))
        self._ids += ids

    def unpinned(self, ids: Sequence[int]) -> None:
        """One such reference to each of these is gone."""
        self._runs += (Kind.UNPINNED, 0, NO_REQUEST, 0, len(ids))
        self._ids += ids

    def looked_up(self, request: int, tokens: int, hit_tokens: int, group: int = 0) -> None:
        """Log a look-up in the prefix cache."""
        self._runs += (Kind.LOOKED_UP, group, request, 2, 0)
        self._args += (tokens, hit_tokens)

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
        """Log a request at the scheduler. `text` is the id that its client and the log know."""
        self._texts[request] = text
        self._runs += (Kind.ARRIVED, 0, request, 6, 0)
        self._args += (
            self.clock.monotonic_ns(),
            prompt_tokens,
            max_tokens,
            priority,
            blocks_to_admit,
            blocks_to_finish,
        )

    def traced(self, request: int, trace: TraceContext) -> None:
        """Log that it arrived as part of its caller's trace."""
        self._runs += (Kind.TRACED, 0, request, 4, 0)
        self._args += trace

    def queued(self, request: int, cause: Cause, at_front: bool = False) -> None:
        """Put in the waiting queue."""
        self._runs += (Kind.QUEUED, 0, request, 2, 0)
        self._args += (cause, at_front)

    def allocation_failed(self, request: int, needed: int, free: int) -> None:
        """Blocks were asked for and not got."""
        self._runs += (Kind.ALLOCATION_FAILED, 0, request, 2, 0)
        self._args += (needed, free)

    def not_scheduled(self, request: int, cause: Cause, times: int) -> None:
        """Log that the scheduler skipped it for this cause, with the count so far."""
        self._runs += (Kind.NOT_SCHEDULED, 0, request, 2, 0)
        self._args += (cause, times)

    def admitted(self, request: int, num_computed_tokens: int) -> None:
        """Log that it runs from here on."""
        self._runs += (Kind.ADMITTED, 0, request, 1, 0)
        self._args.append(num_computed_tokens)

    def first_token(self, request: int) -> None:
        """Log its first output token."""
        self._runs += (Kind.FIRST_TOKEN, 0, request, 0, 0)

    def progressed(self, requests: Sequence[int], computed: Sequence[int], outputs: Sequence[int]) -> None:
        """After a step: where each of these requests is."""
        self._runs += (_PROGRESSED, 0, NO_REQUEST, 2 * len(requests), len(requests))
        self._args += computed
        self._args += outputs
        self._ids += requests

    def preempted(self, request: int, reason: Preempt, for_request: int, blocks: int, tokens_lost: int) -> None:
        """Lost its blocks."""
        self._runs += (Kind.PREEMPTED, 0, request, 4, 0)
        self._args += (reason, for_request, blocks, tokens_lost)

    def waiting_on(self, request: int, status: Status) -> None:
        """Log that it waits for something outside the scheduler."""
        self._runs += (Kind.WAITING_ON, 0, request, 1, 0)
        self._args.append(status)

    def ready(self, request: int) -> None:
        """Log that the object of its wait has come."""
        self._runs += (Kind.READY, 0, request, 0, 0)

    def remote_load(self, request: int, outcome: Load, tokens: int) -> None:
        """Log the end of a fetch of remote KV."""
        self._runs += (Kind.REMOTE_LOAD, 0, request, 2, 0)
        self._args += (outcome, tokens)

    def completion_delivered(self, request: int) -> None:
        """Log that the connector is done with the request's blocks."""
        self._runs += (Kind.COMPLETION_DELIVERED, 0, request, 1, 0)
        self._args.append(self.clock.monotonic_ns())

    def finished(self, request: int, status: Status) -> None:
        """Reached a terminal status."""
        self._runs += (Kind.FINISHED, 0, request, 1, 0)
        self._args.append(status)

    def tier(self, op: TierOp, tier: Tier, used: int, capacity: int, hashes: Sequence[int]) -> None:
        """Log a change of an outer tier."""
        self._runs += (Kind.TIER, 0, NO_REQUEST, 4 + len(hashes), 0)
        self._args += (op, tier, used, capacity)
        self._args += hashes

    def memory(self, breakdown: Sequence[int]) -> None:
        """Log the memory breakdown, in the order of SCHEMA[Kind.MEMORY]."""
        self._runs += (Kind.MEMORY, 0, NO_REQUEST, len(breakdown), 0)
        self._args += breakdown

    def audit_begin(self, cycle: int) -> None:
        """Log the beginning of a reading of the engine's own tables."""
        self._runs += (Kind.AUDIT_BEGIN, 0, NO_REQUEST, 1, 0)
        self._args.append(cycle)

    def audit_blocks(self, first_block: int, packed: Sequence[int]) -> None:
        """Consecutive blocks: reference count × 4, + 2 if in the free queue, + 1 if hashed."""
        self._runs += (Kind.AUDIT_BLOCKS, 0, NO_REQUEST, 1, len(packed))
        self._args.append(first_block)
        self._ids += packed

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
        self._runs += (Kind.AUDIT_REQUEST, group, request, 7, len(ids))
        self._args += (status, computed, outputs, holder, fence, lease_deadline_ns, detached)
        self._ids += ids

    def audit_end(self, cycle: int, free: int, cached_idle: int, used: int, requests: int) -> None:
        """Log the end of the reading."""
        self._runs += (Kind.AUDIT_END, 0, NO_REQUEST, 5, 0)
        self._args += (cycle, free, cached_idle, used, requests)

    def received(
        self, request: int, text: str, prompt_tokens: int, trace: TraceContext | None = None, at_ns: int = 0
    ) -> None:
        """At the front end, at `at_ns` or now, as part of its caller's `trace` if it has one. From any thread."""
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
        """Unfinished, and in none of the engine's queues. From any thread."""
        self._aside(Kind.NOT_QUEUED, request, (self.clock.monotonic_ns(), status))

    def stack(self, step: int, since_ns: int, layer: Layer, frames: str) -> None:
        """Log that the engine's thread has stood in this step since then. `frames` has a line each. From any thread."""
        self._aside(Kind.STACK, NO_REQUEST, (self.clock.monotonic_ns(), step, since_ns, layer), frames, STACK_TEXT)

    def _aside(
        self, kind: Kind, request: int, args: tuple[int, ...], text: str | None = None, text_of: int | None = None
    ) -> None:
        """From threads other than the engine's: one atomic append, kept apart from the engine's own lists."""
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
    """How many events a flat list of runs holds, a block counting as one: what loss is measured in."""
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
