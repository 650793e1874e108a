"""What the books hold of each thing: requests, deferrals, steps, totals.

Times, which end in _ns, are monotonic, 0 standing for "not yet". What ends in _at is the place in the stream of the
event that said it (Books.here), below 0 where that is not known.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from kvscope.monitor.events.kinds import FIRST_FINISHED, Cause, Status
from kvscope.monitor.events.trace_context import TraceContext

UNKNOWN: Final = -1
"""The place of an event that was not heard, or not numbered."""


class RequestState(msgspec.Struct, array_like=True):
    """One request: its state, why, since when, what it has and what it has cost."""

    number: int
    id: str
    status: int = Status.WAITING
    cause: int = Cause.NEW
    since_ns: int = 0
    received_ns: int = 0
    arrived_ns: int = 0
    admitted_ns: int = 0
    first_token_ns: int = 0
    progressed_ns: int = 0
    finished_ns: int = 0
    client_gone_ns: int = 0
    stalled_ns: int = 0
    """When the engine's own watchdog last said that it does not move; 0 if it never did, or it has moved since."""
    stalled_since_step: int = -1
    stalled_cause: int = Cause.NONE
    prompt_tokens: int = 0
    max_tokens: int = 0
    priority: int = 0
    blocks_to_admit: int = 0
    blocks_to_finish: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    looked_up_tokens: int = 0
    hit_tokens: int = 0
    preemptions: int = 0
    tokens_lost: int = 0
    blocks_needed: int = 0
    blocks_free_then: int = 0
    times_passed_over: int = 0
    peak_blocks: int = 0
    """The most it had when it gave some back."""
    blocks: list[int] = []
    waited_ns: dict[int, int] = {}
    fetching_ns: int = 0
    """Since when KV is fetched for it, be it that it has ended meanwhile; 0 if none is."""
    fetch_ended_ns: int = 0
    """When the connector said that this fetch has ended, until the engine has taken that in; 0 otherwise."""
    ready_ns: int = 0
    """When what it waited for had come, until the scheduler has looked at it again; 0 otherwise."""
    self_preemptions: int = 0
    """In a row: for a block of its own, with nobody else in the pool, and without a token of output in between."""
    self_preempted_ns: int = 0
    """When the first of these was."""
    self_preempted_outputs: int = -1
    """How many tokens of output it had then."""
    admitted_outputs: int = 0
    """How many tokens of output it had when it was last let in."""
    cached_blocks: int = 0
    """How many of its blocks entered the prefix cache since then, and before its first token."""
    cached_until_then: int = 0
    """How many blocks of anybody's had done so when it was let in: see Books.prompt_blocks_cached."""
    ended_blocks: int = 0
    """How many blocks it had when it ended."""
    trace: TraceContext | None = None
    """Its caller's, if it has come with one."""
    arrived_at: int = UNKNOWN
    """Where it arrived; until then, where it was received."""
    since_at: int = UNKNOWN
    refused_at: int = UNKNOWN
    """Where blocks were last asked for and not got."""
    passed_over_at: int = UNKNOWN
    preempted_at: int = UNKNOWN
    fetching_at: int = UNKNOWN
    fetch_ended_at: int = UNKNOWN
    ready_at: int = UNKNOWN
    stalled_at: int = UNKNOWN
    not_queued_ns: int = 0
    """When the engine was last seen to have it in none of its queues; 0 if it never was, or has moved since."""
    not_queued_at: int = UNKNOWN

    @property
    def is_finished(self) -> bool:
        """Whether its status is terminal."""
        return self.status >= FIRST_FINISHED

    @property
    def is_running(self) -> bool:
        """Whether the scheduler has it running."""
        return self.status == Status.RUNNING

    @property
    def is_waiting(self) -> bool:
        """Whether the scheduler has it, not running and not finished."""
        return Status.RECEIVED < self.status < FIRST_FINISHED and self.status != Status.RUNNING


class Deferral(msgspec.Struct, array_like=True):
    """An announcement that blocks outlive their request: who holds them, since when, until which fence or lease."""

    request: int
    id: str
    holder: int
    since_ns: int
    fence: int
    lease_deadline_ns: int
    blocks: set[int]
    fence_passed_ns: int = 0
    """When the step that it is fenced behind was complete; 0 before, and if there is none."""
    since_at: int = UNKNOWN
    changed_at: int = UNKNOWN
    """Where some of its blocks were announced, or given back, last."""
    fence_passed_at: int = UNKNOWN


class Lapse(NamedTuple):
    """Blocks of an ended request that came back because the lease on them had run out, and not before."""

    id: str
    since_ns: int
    at_ns: int
    blocks: tuple[int, ...]
    at: int = UNKNOWN
    """Where they came back."""


class Preemption(NamedTuple):
    """A request that lost its blocks to another, and what it had from them."""

    id: str
    at_ns: int
    reason: int
    blocks: int
    tokens_lost: int
    outputs: int
    """Tokens of output that it got since it was last let in."""
    running: int
    """Requests that ran before the first preemption of that pass; preemptions of one pass have one time."""
    free: int
    """Blocks that were free just before."""
    released: int
    """References to blocks that had been given back until then, over the engine's life."""
    at: int = UNKNOWN


class Prompt(NamedTuple):
    """A prompt that is computed: its full blocks, and what the prefix cache did for it."""

    id: str
    at_ns: int
    blocks: int
    hit: int
    again: int
    """Blocks, at least, that were computed though their very content was cached when the request was let in."""
    at: int = UNKNOWN
    """Where its first token came."""


class Anomaly(NamedTuple):
    """Something that cannot be, found at event `position` of a batch: `what` names the rule that it breaks."""

    what: str
    block: int
    request: int
    position: int
    detail: str


class Totals(msgspec.Struct, array_like=True):
    """Sums over the engine's life (this epoch), counted from events."""

    steps: int = 0
    step_ns: int = 0
    allocated: int = 0
    reused: int = 0
    cached: int = 0
    evicted: int = 0
    released: dict[int, int] = {}
    allocation_failures: int = 0
    preemptions: dict[int, int] = {}
    tokens_lost: int = 0
    looked_up_tokens: int = 0
    hit_tokens: int = 0
    arrived: int = 0
    finished: dict[int, int] = {}
    client_gone: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    limits: dict[int, int] = {}


class StepInFlight(msgspec.Struct, array_like=True, frozen=True):
    """A step launched and not yet completed."""

    step: int
    since_ns: int
    requests: int
    tokens: int
    at: int = UNKNOWN


class Heartbeat(msgspec.Struct, array_like=True, frozen=True):
    """What the drain thread saw of the engine from outside; see SCHEMA[Kind.HEARTBEAT]."""

    at_ns: int
    last_sequence: int
    last_step: int
    step_in_flight: int
    in_flight_since_ns: int
    running: int
    waiting: int
    front_end_in_flight: int
    connector_polls: int
    scheduler_passes: int


class EngineStack(msgspec.Struct, array_like=True, frozen=True):
    """Where the engine's thread stood while a step was late."""

    at_ns: int
    step: int
    since_ns: int
    layer: int
    frames: str
    at: int = UNKNOWN


class TierState(msgspec.Struct, array_like=True):
    """An outer tier: blocks used and held at most, and how often each operation touched a block (by TierOp)."""

    used: int = 0
    capacity: int = 0
    operations: dict[int, int] = {}
    pins: dict[int, tuple[int, ...]] = {}
    """By key, the longest pinned first: how many pins are on it, since when it has not been without one, and where."""
    unpinned_ns: int = 0
    """When something was last unpinned: the engine then takes in all fetches that have ended."""
    at: int = UNKNOWN
    """Where it was last told of."""


class Places(msgspec.Struct, array_like=True):
    """Where what is so of the whole engine was said, or became so, last."""

    started: int = UNKNOWN
    heartbeat: int = UNKNOWN
    memory: int = UNKNOWN
    launched: int = UNKNOWN
    """A step."""
    completed: int = UNKNOWN
    progressed: int = UNKNOWN
    """Tokens computed or generated."""
    moved: int = UNKNOWN
    """A request from one state, or reason, to another."""
    looked_up: int = UNKNOWN
    pool: int = UNKNOWN
    """The counts of blocks in use, or of those that are cached and idle."""
    audited: int = UNKNOWN
    """The end of an audit."""
    mode: int = UNKNOWN
    """The engine was paused, put to sleep or woken."""
