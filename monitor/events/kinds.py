"""The vocabulary of the contract: every kind of event, its fields, and the names behind its numbers.

Names are vLLM's where it has one. Numbers are for ever: a release may add, never change or reuse one. Times in events
are nanoseconds of the engine's monotonic clock. A batch's header ties them to the wall clock.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple


class Kind(IntEnum):
    """What happened. The hundreds give the family, and `SCHEMA` gives the fields."""

    STARTED = 1
    STEP_LAUNCHED = 2
    STEP_COMPLETED = 3
    HEARTBEAT = 4
    STOPPED = 5
    CLOCK = 6
    ENGINE_MODE = 7
    STACK = 8

    ALLOCATED = 16
    REUSED = 17
    CACHED = 18
    EVICTED = 19
    DETACHED = 20
    RELEASED = 21
    FREE_DEFERRED = 22
    RECLAIMED = 23
    PINNED = 24
    UNPINNED = 25

    LOOKED_UP = 32

    RECEIVED = 48
    ARRIVED = 49
    QUEUED = 50
    ALLOCATION_FAILED = 51
    NOT_SCHEDULED = 52
    ADMITTED = 53
    FIRST_TOKEN = 54
    PROGRESSED = 55
    PREEMPTED = 56
    WAITING_ON = 57
    READY = 58
    REMOTE_LOAD = 59
    COMPLETION_DELIVERED = 60
    STALLED = 61
    FINISHED = 62
    CLIENT_GONE = 63
    TRACED = 64
    NOT_QUEUED = 65

    TIER = 80

    MEMORY = 96

    AUDIT_BEGIN = 112
    AUDIT_BLOCKS = 113
    AUDIT_REQUEST = 114
    AUDIT_END = 115
    OBSERVED = 116
    LOST = 117


class Status(IntEnum):
    """A request's state, by vLLM's names (RequestStatus), and one before it: known to the front end only."""

    RECEIVED = 0
    WAITING = 1
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = 2
    WAITING_FOR_REMOTE_KVS = 3
    WAITING_FOR_STREAMING_REQ = 4
    RUNNING = 5
    PREEMPTED = 6
    FINISHED_STOPPED = 7
    FINISHED_LENGTH_CAPPED = 8
    FINISHED_ABORTED = 9
    FINISHED_IGNORED = 10
    FINISHED_ERROR = 11
    FINISHED_REPETITION = 12


FIRST_FINISHED: Final = Status.FINISHED_STOPPED
"""Statuses from here on are terminal."""


class Cause(IntEnum):
    """Why a request is where it is: the one named reason that goes with its status."""

    NONE = 0
    NEW = 1
    KV_BLOCKS = 2
    MAX_NUM_SEQS = 3
    TOKEN_BUDGET = 4
    BEHIND_HEAD = 5
    PREEMPTED = 6
    ENCODER = 7
    REMOTE_KV = 8
    GRAMMAR = 9
    STREAMING_INPUT = 10
    PAUSED = 11
    ZERO_TOKENS = 12
    PREEMPTION_IN_STEP = 13
    STEP_IN_FLIGHT = 14
    UNKNOWN = 15
    LORA = 16
    CONNECTOR = 17


CAUSE_OF: Final = {
    int(Status.WAITING): Cause.NEW,
    int(Status.PREEMPTED): Cause.PREEMPTED,
    int(Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR): Cause.GRAMMAR,
    int(Status.WAITING_FOR_REMOTE_KVS): Cause.REMOTE_KV,
    int(Status.WAITING_FOR_STREAMING_REQ): Cause.STREAMING_INPUT,
}
"""Why a request waits, as far as its state alone shows."""


class Release(IntEnum):
    """Why a reference to a block was released."""

    FINISHED = 1
    ABORTED = 2
    PREEMPTED = 3
    OUT_OF_WINDOW = 4
    ROLLED_BACK = 5
    RESET = 6
    TRANSFER_DONE = 7
    LEASE_EXPIRED = 8
    ERROR = 9


class Evict(IntEnum):
    """Why a cached block lost its content without being handed to a request in the same event."""

    RESET = 1
    INVALIDATED = 2


class Preempt(IntEnum):
    """Why a running request lost its blocks."""

    KV_BLOCKS = 1
    PRIORITY = 2
    RESET = 3


class Holder(IntEnum):
    """The party that asked to keep blocks after their request's end."""

    CONNECTOR = 1
    FENCE = 2
    SESSION = 3
    PIN = 4


class Limit(IntEnum):
    """The bound on the size of a step."""

    NONE = 0
    KV = 1
    TOKENS = 2
    SEQUENCES = 3
    ENCODER = 4
    DEFERRED = 5
    UNKNOWN = 6
    PAUSED = 7


class EngineMode(IntEnum):
    """Whether the engine's operator lets it work."""

    UNPAUSED = 0
    PAUSED_NEW = 1
    PAUSED_ALL = 2
    ASLEEP = 3


class Layer(IntEnum):
    """The part of the engine in which its thread stands while a step is late."""

    UNKNOWN = 0
    SCHEDULER = 1
    EXECUTOR = 2
    MODEL = 3
    CONNECTOR = 4
    GRAMMAR = 5
    SAMPLER = 6


class Load(IntEnum):
    """How a fetch of remote KV ended."""

    DELIVERED = 1
    FAILED = 2


class TierOp(IntEnum):
    """The operation on keys of an outer tier."""

    STORED = 1
    PINNED = 2
    UNPINNED = 3
    EVICTED = 4


class Tier(IntEnum):
    """An outer tier of KV storage."""

    HOST = 1
    DISK = 2
    PEER = 3


class Fields(NamedTuple):
    """The layout of one kind: what its request number, args and ids mean, in order.

    `args` names the leading arguments. A last name ending in `*` takes all that remain. `ids` names the meaning of the
    ids ("" for none). Events about a request carry its number. Others carry -1.
    """

    request_event_text: bool
    args: tuple[str, ...]
    ids: str
    meaning: str


SCHEMA: Final[dict[Kind, Fields]] = {
    Kind.STARTED: Fields(
        False,
        ("at_ns", "total_blocks", "reserved_blocks", "block_size"),
        "",
        "a new epoch of the engine begins. The text -1 is its description as JSON",
    ),
    Kind.STEP_LAUNCHED: Fields(
        False,
        ("at_ns", "step", "tokens*"),
        "requests",
        "a step was launched: the tokens that each request computes in it",
    ),
    Kind.STEP_COMPLETED: Fields(
        False,
        ("at_ns", "step", "duration_ns", "limit", "free", "cached_idle", "used"),
        "",
        "the step is done: the limit on its size, and the pool's counts after it",
    ),
    Kind.HEARTBEAT: Fields(
        False,
        (
            "at_ns",
            "last_sequence",
            "last_step",
            "step_in_flight",
            "in_flight_since_ns",
            "running",
            "waiting",
            "front_end_in_flight",
            "connector_polls",
            "scheduler_passes",
        ),
        "",
        "the drain thread is alive. It reports the engine's state from outside (step_in_flight -1: none)",
    ),
    Kind.STOPPED: Fields(False, ("at_ns",), "", "the engine shuts down normally"),
    Kind.CLOCK: Fields(False, ("at_ns",), "", "the time of the events that follow"),
    Kind.ENGINE_MODE: Fields(
        False, ("at_ns", "mode"), "", "the operator paused the engine, put it to sleep, or resumed it"
    ),
    Kind.STACK: Fields(
        False,
        ("at_ns", "step", "since_ns", "layer"),
        "",
        "the engine's thread has stood in this step (-1: between steps) since then: the text -3 is its stack, a"
        " frame a line, innermost first",
    ),
    Kind.ALLOCATED: Fields(
        True,
        ("evicted_hashes*",),
        "blocks",
        "free blocks were allocated to the request, reference count 1, and lost these hashes",
    ),
    Kind.REUSED: Fields(True, (), "blocks", "a prefix hit: one more reference to each block"),
    Kind.CACHED: Fields(True, ("hashes*",), "blocks", "full blocks entered the prefix cache under these keyed hashes"),
    Kind.EVICTED: Fields(False, ("cause",), "blocks", "cached blocks lost their hash"),
    Kind.DETACHED: Fields(True, (), "blocks", "no longer in the request's block table, not yet free"),
    Kind.RELEASED: Fields(True, ("reason",), "blocks", "the request released its reference to each block"),
    Kind.FREE_DEFERRED: Fields(
        True,
        ("holder", "fence", "lease_deadline_ns"),
        "blocks",
        "these blocks stay allocated after the request's end: the holder, and the fence or lease that ends it (0: none,"
        " a lease of -1: unknown)",
    ),
    Kind.RECLAIMED: Fields(False, ("reason",), "blocks", "the reference to each detached block was released"),
    Kind.PINNED: Fields(
        False,
        (),
        "blocks",
        "one more reference to each block, held by a component that is not a request, such as a connector",
    ),
    Kind.UNPINNED: Fields(False, (), "blocks", "one such reference to each block was released"),
    Kind.LOOKED_UP: Fields(
        True,
        ("tokens", "hit_tokens"),
        "",
        "a prefix cache lookup: tokens looked up and tokens found. Each KV group looks up what the previous one found",
    ),
    Kind.RECEIVED: Fields(
        True,
        ("at_ns", "prompt_tokens"),
        "",
        "received by the front end. The text under its number is the request's id",
    ),
    Kind.ARRIVED: Fields(
        True,
        ("at_ns", "prompt_tokens", "max_tokens", "priority", "blocks_to_admit", "blocks_to_finish"),
        "",
        "received by the scheduler. The text under its number is the request's id",
    ),
    Kind.QUEUED: Fields(True, ("cause", "at_front"), "", "added to the waiting queue"),
    Kind.ALLOCATION_FAILED: Fields(
        True,
        ("needed", "free"),
        "",
        "an allocation failed and changed nothing. Sent when the numbers change",
    ),
    Kind.NOT_SCHEDULED: Fields(
        True,
        ("cause", "times"),
        "",
        "a state: passed over for this cause this many times. Sent when the cause changes and when the number doubles",
    ),
    Kind.ADMITTED: Fields(
        True, ("num_computed_tokens",), "", "admitted to run, with tokens that it does not need to compute"
    ),
    Kind.FIRST_TOKEN: Fields(True, (), "", "the first output token was sampled"),
    Kind.PROGRESSED: Fields(
        False,
        ("num_computed_tokens_then_output_tokens*",),
        "requests",
        "after a step: computed tokens of each, then output tokens of each",
    ),
    Kind.PREEMPTED: Fields(
        True,
        ("reason", "for_request", "blocks", "tokens_lost"),
        "",
        "lost its blocks to another request (for_request -1: to no particular one)",
    ),
    Kind.WAITING_ON: Fields(
        True, ("status",), "", "waits for something outside the scheduler: one of the WAITING_FOR statuses"
    ),
    Kind.READY: Fields(True, (), "", "the wait of WAITING_ON is over"),
    Kind.REMOTE_LOAD: Fields(True, ("outcome", "tokens"), "", "a fetch of remote KV ended"),
    Kind.COMPLETION_DELIVERED: Fields(
        True,
        ("at_ns",),
        "",
        "the connector reported that it is done with the request's blocks. Older engines omit at_ns",
    ),
    Kind.STALLED: Fields(
        True,
        ("at_ns", "status", "since_step", "cause"),
        "",
        "the engine's own watchdog: no progress since that step",
    ),
    Kind.FINISHED: Fields(True, ("status",), "", "reached a terminal status"),
    Kind.CLIENT_GONE: Fields(True, ("at_ns",), "", "the client closed the connection"),
    Kind.TRACED: Fields(
        True,
        ("trace_id_high", "trace_id_low", "parent_span_id", "flags"),
        "",
        "the client's trace, from the W3C traceparent of the request: 64 bits each, as signed numbers",
    ),
    Kind.NOT_QUEUED: Fields(
        True,
        ("at_ns", "status"),
        "",
        "unfinished and in no queue of the engine: the scheduler never reaches it",
    ),
    Kind.TIER: Fields(
        False,
        ("op", "tier", "used", "capacity", "hashes*"),
        "",
        "an outer tier stored, pinned, unpinned or evicted these keys. used and capacity are in blocks",
    ),
    Kind.MEMORY: Fields(
        False,
        (
            "device_total",
            "device_free",
            "used_here",
            "used_by_others",
            "weights",
            "activations_peak",
            "graphs_estimated",
            "graphs_actual",
            "non_torch",
            "kv_pool",
            "allocator_reserved",
            "allocator_allocated",
            "fit_requested",
            "use_all",
        ),
        "",
        "the memory breakdown in bytes (-1: unknown)",
    ),
    Kind.AUDIT_BEGIN: Fields(
        False, ("cycle",), "", "the engine starts to report its own tables, in slices between steps"
    ),
    Kind.AUDIT_BLOCKS: Fields(
        False,
        ("first_block",),
        "reference counts × 4, + 2 if in the free queue, + 1 if hashed",
        "consecutive blocks as the pool has them",
    ),
    Kind.AUDIT_REQUEST: Fields(
        True,
        (
            "status",
            "num_computed_tokens",
            "output_tokens",
            "holder",
            "fence",
            "lease_deadline_ns",
            "detached",
        ),
        "blocks",
        "a request's blocks in the engine's tables (holder 0: not deferred, detached 1: no longer in its table). The"
        " first KV group comes last",
    ),
    Kind.AUDIT_END: Fields(
        False,
        ("cycle", "free", "cached_idle", "used", "requests"),
        "",
        "the audit is complete: the engine's counters",
    ),
    Kind.OBSERVED: Fields(False, ("wall_ns",), "", "added by a source: the time, while no event arrives"),
    Kind.LOST: Fields(
        False,
        ("first_sequence", "last_sequence", "stage"),
        "",
        "added by a source: batches that cannot be recovered",
    ),
}


class Stage(IntEnum):
    """Where batches were lost."""

    ENGINE_BUFFER = 1
    TRANSPORT = 2
    JOURNAL = 3


def name_of(enum: type[IntEnum], value: int) -> str:
    """Return the name of `value` in `enum`. A value from a newer engine keeps its number, as `UNKNOWN(17)`."""
    try:
        return enum(value).name
    except ValueError:
        return f"UNKNOWN({value})"
