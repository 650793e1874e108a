"""The records of an engine's state: requests, deferrals, steps, tiers, totals.

Times end in _ns and are monotonic. 0 means "not yet". Names that end in _at are the stream position of the event that
reported the value (EngineState.position), below 0 if unknown.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Final, NamedTuple

import msgspec

from ..contract.kinds import FIRST_FINISHED, Cause, Status
from ..contract.trace_context import TraceContext

UNKNOWN_POSITION: Final = -1
"""The position of an event that was not received, or whose batch has no number."""
UNKNOWN_TOKENS: Final = -1


class RequestState(msgspec.Struct, array_like=True):
    """One request: its status, cause and time of the last change, what it holds and what it has cost."""

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
    """When the engine's own watchdog last reported no progress, or 0 if never, or if the request has progressed
    since.
    """
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
    """The most blocks it held when it released some."""
    blocks: list[int] = []
    waited_ns: dict[int, int] = {}
    fetching_ns: int = 0
    """When the current fetch of its KV began, whether or not it has ended, or 0 if there is none."""
    fetch_ended_ns: int = 0
    """When the connector reported the end of this fetch, until the engine processes it, and 0 otherwise."""
    ready_ns: int = 0
    """When the awaited result arrived, until the scheduler inspects the request again, and 0 otherwise."""
    self_preemptions: int = 0
    """Consecutive preemptions for a block of its own, alone in the pool, without an output token in between."""
    self_preempted_ns: int = 0
    """When the first of these happened."""
    self_preempted_outputs: int = -1
    """Output tokens at that time."""
    admitted_outputs: int = 0
    """Output tokens when it was last admitted."""
    cached_blocks: int = 0
    """Its blocks that entered the prefix cache since then and before its first token."""
    cached_until_then: int = 0
    """Blocks of all requests that had done so when it was looked up: see EngineState.prompt_blocks_cached."""
    ended_blocks: int = 0
    """Blocks it held when it finished."""
    trace: TraceContext | None = None
    """The caller's trace context, if the request carried one."""
    arrived_at: int = UNKNOWN_POSITION
    """The position of its arrival, or of its reception before that."""
    since_at: int = UNKNOWN_POSITION
    refused_at: int = UNKNOWN_POSITION
    """The position of its last failed allocation."""
    passed_over_at: int = UNKNOWN_POSITION
    preempted_at: int = UNKNOWN_POSITION
    fetching_at: int = UNKNOWN_POSITION
    fetch_ended_at: int = UNKNOWN_POSITION
    ready_at: int = UNKNOWN_POSITION
    stalled_at: int = UNKNOWN_POSITION
    not_queued_ns: int = 0
    """When the engine was last seen to have it in none of its queues, or 0 if never, or if it has moved since."""
    not_queued_at: int = UNKNOWN_POSITION
    admitted_tokens: int = UNKNOWN_TOKENS
    """Tokens whose KV the prefix cache or a fetch had supplied when it was last admitted."""
    reused_blocks: int = 0
    """Blocks that the prefix cache has supplied, in all groups."""
    looked_up_at: int = UNKNOWN_POSITION
    admitted_step: int = 0
    """Steps of the epoch that had completed when it was first admitted."""
    ended_step: int = 0
    """Steps of the epoch that had completed when it finished."""
    cached_by_group: dict[int, int] = {}
    """Of KV groups after the first: as `cached_blocks`."""
    reached_tokens: int = 0
    """The furthest that it was computed, while it runs and computes a part of that again, and 0 otherwise."""
    reached_ns: int = 0
    """When it had come so far."""
    reached_at: int = UNKNOWN_POSITION
    """The position of the event that showed it sent back."""

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
    """When the step it is fenced behind completed, or 0 before, and if there is none."""
    since_at: int = UNKNOWN_POSITION
    changed_at: int = UNKNOWN_POSITION
    """The position where blocks were last added to it or freed from it."""
    fence_passed_at: int = UNKNOWN_POSITION


class DroppedTable(msgspec.Struct, array_like=True):
    """Blocks that the engine's table of a request no longer names although no free of them was reported, and that have
    a reference still.
    """

    request: int
    id: str
    since_ns: int
    """When the audit that first showed one of them began."""
    since_at: int
    blocks: set[int]


class LapsedLease(NamedTuple):
    """Blocks of a finished request that were freed only because their lease expired."""

    id: str
    since_ns: int
    at_ns: int
    blocks: tuple[int, ...]
    at: int = UNKNOWN_POSITION
    """The position where they were freed."""
    named: bool = False
    """Whether the engine itself says that the lease expired."""
    unseen_ns: int = 0
    """How long before that the engine last launched a step: an idle one may not look."""

    @property
    def chance(self) -> float:
        """Return how likely a transfer that ends at any time ends in the look that finds the lease over."""
        return 0.0 if self.named else min(1.0, self.unseen_ns / max(self.at_ns - self.since_ns, 1))


class Preemption(NamedTuple):
    """A preemption: the request that lost its blocks, and what they had gained it."""

    id: str
    at_ns: int
    reason: int
    blocks: int
    tokens_lost: int
    outputs: int
    """Output tokens since it was last admitted."""
    running: int
    """Requests running before the first preemption of that pass. Preemptions of one pass share one time."""
    free: int
    """Blocks free just before."""
    released: int
    """Block references released until then in this epoch."""
    at: int = UNKNOWN_POSITION
    computed: int = 0
    """The part of `tokens_lost` computed since it was last admitted, without tokens that the prefix cache or a fetch
    supplied. 0 if that is unknown.
    """
    running_blocks: int = 0
    """Blocks in the tables of those that ran before the first preemption of that pass, in all KV groups."""
    running_tokens: int = 0
    """Their tokens, those of their prompts that are still to be computed among them."""
    wanted: int = 0
    """Blocks that the request which they are for lacks for all of its tokens, 0 if it is not known."""


class ComputedPrompt(NamedTuple):
    """A prompt computed in one go, without a preemption: its full blocks, and how many the prefix cache supplied.

    Blocks that were fetched count as computed if the engine reported its lookup before the fetch.
    """

    id: str
    at_ns: int
    blocks: int
    hit: int
    again: int
    """A lower bound of blocks computed or fetched although the cache had their content at the lookup."""
    at: int = UNKNOWN_POSITION
    """The position of its first token."""
    kept: int = 0
    """Blocks computed although other blocks, cached before it was admitted, have their content still."""
    ends_full: bool = False
    """Whether its last full block ends the prompt, so that it is computed in any case."""
    could_hit: int = 0
    """The part of `again` right behind the blocks hit, if the prompt's blocks are of one KV group. Behind a block that
    the cache lacked, a lookup finds nothing.
    """
    lacked: int = 0
    """Blocks that are not in `again`, because another KV group lacked their content: a hit needs all groups."""

    @property
    def missed(self) -> int:
        """A lower bound of the blocks that the cache could have supplied."""
        return max(self.again - self.ends_full, 0)


class AnomalyKind(Enum):
    """The rule that an impossible transition breaks. The value is the phrase that a finding prints."""

    ALLOCATED_WHILE_HELD = "allocated while held"
    BROKEN_FENCE = "handed out before its fence"
    RELEASED_WHILE_FREE = "released while free"
    RELEASED_BY_ANOTHER = "released by another than its owner"
    DETACHED_FROM_ANOTHER = "detached from another than its owner"
    DEFERRED_BY_ANOTHER = "deferred by another than its owner"
    NEVER_DETACHED = "reclaimed though never detached"
    NEVER_PINNED = "unpinned though never pinned"
    HIT_WITHOUT_HASH = "prefix hit on a block with no hash"
    OUT_OF_RANGE = "block out of range"
    TOO_MANY_HOLDERS = "more holders than are kept"
    NO_REQUEST = "an event of a request that names none"
    NEVER_ARRIVED = "a request that never arrived"
    COUNTS = "counts"
    FEWER_FREE = "counts with fewer free blocks"
    """The engine has fewer blocks to hand out than its events leave free, so none is handed out too early."""
    AUDITED_BLOCK = "audit: block"
    AUDITED_FREE_QUEUE = "audit: free queue"
    AUDITED_TABLE = "audit: block table"
    AUDITED_COUNT = "audit: requests"
    NOT_IN_LEDGER = "audit: a request that is not in the ledger"
    UNREADABLE = "what the engine sent cannot be read"
    """A frame violates the contract's layout: kvscope lost its events. The engine's own memory is unaffected."""


NO_BLOCK: Final = -1
"""The block of an anomaly that concerns none."""


class Anomaly(NamedTuple):
    """An impossible transition, found at event `position` of a batch. The request is -1 if it concerns none."""

    kind: AnomalyKind
    blocks: list[int]
    request: int
    position: int
    detail: str


class Totals(msgspec.Struct, array_like=True):
    """Sums over this epoch, counted from events."""

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
    at: int = UNKNOWN_POSITION


class Heartbeat(msgspec.Struct, array_like=True, frozen=True):
    """The engine as the drain thread saw it (see SCHEMA[Kind.HEARTBEAT])."""

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
    at: int = UNKNOWN_POSITION


class TierState(msgspec.Struct, array_like=True):
    """An offload tier: blocks used, capacity, and how often each operation (TierOp) touched a block."""

    used: int = 0
    capacity: int = 0
    operations: dict[int, int] = {}
    pins: dict[int, tuple[int, ...]] = {}
    """By key, longest pinned first: the number of pins, the time from which they count, and its stream position. That
    is the first pin's, or the last unpin's that left others.
    """
    unpinned_ns: int = 0
    """When something was last unpinned: the engine then processes all fetches that have ended."""
    at: int = UNKNOWN_POSITION
    """The position of the last event about it."""


class StreamPositions(msgspec.Struct, array_like=True):
    """The position of the last event about each thing that concerns the whole engine."""

    started: int = UNKNOWN_POSITION
    heartbeat: int = UNKNOWN_POSITION
    memory: int = UNKNOWN_POSITION
    launched: int = UNKNOWN_POSITION
    """A step was launched."""
    completed: int = UNKNOWN_POSITION
    progressed: int = UNKNOWN_POSITION
    """Tokens were computed or generated."""
    moved: int = UNKNOWN_POSITION
    """A request changed its status or cause."""
    looked_up: int = UNKNOWN_POSITION
    pool: int = UNKNOWN_POSITION
    """The number of used or cached-idle blocks changed."""
    audited: int = UNKNOWN_POSITION
    """An audit ended."""
    mode: int = UNKNOWN_POSITION
    """The engine was paused, put to sleep or woken."""


class AuditCycle:
    """An audit being read: the requests known when it began that it has not named yet."""

    def __init__(self, began_ns: int, requests: set[int]) -> None:
        self.began_ns = began_ns
        self.unseen = requests
        self.seen = 0
        self.others: dict[int, list[int]] = {}
        """By request: its blocks in the KV groups after the first. The first group's blocks come last."""

    def __deepcopy__(self, memo: dict[int, Any]) -> AuditCycle:
        """Copy the containers only: they hold plain numbers, of thousands of requests."""
        other = AuditCycle(self.began_ns, self.unseen.copy())
        other.seen, other.others = self.seen, {number: blocks.copy() for number, blocks in self.others.items()}
        return other


class ResidencySamples:
    """When blocks came into use, were reused, evicted and freed, since the reader that counts them cleared the columns.

    Columns are the cheapest form in the hot loop, and the reader counts many samples at a time.
    """

    def __init__(self) -> None:
        # Blocks came into use: their number, and when.
        self.taken: list[int] = []
        self.taken_ns: list[int] = []
        # Blocks went out of use: since when each had been in use.
        self.used_since: list[int] = []
        # Blocks of these whose content stayed cached: their number, and when.
        self.kept: list[int] = []
        self.kept_ns: list[int] = []
        # A prefix hit on a cached-idle block: idle since, until.
        self.hit_since: list[int] = []
        self.hit_ns: list[int] = []
        # The content of a cached-idle block was evicted: idle since, until.
        self.evicted_since: list[int] = []
        self.evicted_ns: list[int] = []
        # Content was lost, by eviction or with the last reference: allocated at (0: before the first event), until.
        self.born: list[int] = []
        self.died_ns: list[int] = []

    @property
    def size(self) -> int:
        """The approximate number of samples."""
        return len(self.taken) + len(self.used_since) + len(self.hit_since) + len(self.evicted_since)

    def clear(self) -> None:
        """Drop all samples."""
        for column in vars(self).values():
            column.clear()
