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

    of_request: bool
    args: tuple[str, ...]
    ids: str
    meaning: str


def _fields(meaning: str, args: str = "", ids: str = "", of_request: bool = False) -> Fields:
    return Fields(of_request, tuple(args.split()), ids, meaning)


SCHEMA: Final[dict[Kind, Fields]] = {
    Kind.STARTED: _fields(
        "a new epoch of the engine begins. The text -1 is its description as JSON",
        args="at_ns total_blocks reserved_blocks block_size",
    ),
    Kind.STEP_LAUNCHED: _fields(
        "a step was launched: the tokens that each request computes in it", args="at_ns step tokens*", ids="requests"
    ),
    Kind.STEP_COMPLETED: _fields(
        "the step is done: the limit on its size, and the pool's counts after it",
        args="at_ns step duration_ns limit free cached_idle used",
    ),
    Kind.HEARTBEAT: _fields(
        "the drain thread is alive. It reports the engine's state from outside (step_in_flight -1: none)",
        args=(
            "at_ns last_sequence last_step step_in_flight in_flight_since_ns running waiting front_end_in_flight"
            " connector_polls scheduler_passes"
        ),
    ),
    Kind.STOPPED: _fields("the engine shuts down normally", args="at_ns"),
    Kind.CLOCK: _fields("the time of the events that follow", args="at_ns"),
    Kind.ENGINE_MODE: _fields("the operator paused the engine, put it to sleep, or resumed it", args="at_ns mode"),
    Kind.STACK: _fields(
        "the engine's thread has stood in this step (-1: between steps) since then: the text -3 is its stack, a"
        " frame a line, innermost first",
        args="at_ns step since_ns layer",
    ),
    Kind.ALLOCATED: _fields(
        "free blocks were allocated to the request, reference count 1, and lost these hashes",
        args="evicted_hashes*",
        ids="blocks",
        of_request=True,
    ),
    Kind.REUSED: _fields("a prefix hit: one more reference to each block", ids="blocks", of_request=True),
    Kind.CACHED: _fields(
        "full blocks entered the prefix cache under these keyed hashes", args="hashes*", ids="blocks", of_request=True
    ),
    Kind.EVICTED: _fields("cached blocks lost their hash", args="cause", ids="blocks"),
    Kind.DETACHED: _fields("no longer in the request's block table, not yet free", ids="blocks", of_request=True),
    Kind.RELEASED: _fields(
        "the request released its reference to each block", args="reason", ids="blocks", of_request=True
    ),
    Kind.FREE_DEFERRED: _fields(
        "these blocks stay allocated after the request's end: the holder, and the fence or lease that ends it (0:"
        " none, a lease of -1: unknown)",
        args="holder fence lease_deadline_ns",
        ids="blocks",
        of_request=True,
    ),
    Kind.RECLAIMED: _fields("the reference to each detached block was released", args="reason", ids="blocks"),
    Kind.PINNED: _fields(
        "one more reference to each block, held by a component that is not a request, such as a connector", ids="blocks"
    ),
    Kind.UNPINNED: _fields("one such reference to each block was released", ids="blocks"),
    Kind.LOOKED_UP: _fields(
        "a prefix cache lookup: tokens looked up and tokens found. Each KV group looks up what the previous one found",
        args="tokens hit_tokens",
        of_request=True,
    ),
    Kind.RECEIVED: _fields(
        "received by the front end. The text under its number is the request's id",
        args="at_ns prompt_tokens",
        of_request=True,
    ),
    Kind.ARRIVED: _fields(
        "received by the scheduler. The text under its number is the request's id",
        args="at_ns prompt_tokens max_tokens priority blocks_to_admit blocks_to_finish",
        of_request=True,
    ),
    Kind.QUEUED: _fields("added to the waiting queue", args="cause at_front", of_request=True),
    Kind.ALLOCATION_FAILED: _fields(
        "an allocation failed and changed nothing. Sent when the numbers change", args="needed free", of_request=True
    ),
    Kind.NOT_SCHEDULED: _fields(
        "a state: passed over for this cause this many times. Sent when the cause changes and when the number doubles",
        args="cause times",
        of_request=True,
    ),
    Kind.ADMITTED: _fields(
        "admitted to run, with tokens that it does not need to compute", args="num_computed_tokens", of_request=True
    ),
    Kind.FIRST_TOKEN: _fields("the first output token was sampled", of_request=True),
    Kind.PROGRESSED: _fields(
        "after a step: computed tokens of each, then output tokens of each",
        args="num_computed_tokens_then_output_tokens*",
        ids="requests",
    ),
    Kind.PREEMPTED: _fields(
        "lost its blocks to another request (for_request -1: to no particular one)",
        args="reason for_request blocks tokens_lost",
        of_request=True,
    ),
    Kind.WAITING_ON: _fields(
        "waits for something outside the scheduler: one of the WAITING_FOR statuses", args="status", of_request=True
    ),
    Kind.READY: _fields("the wait of WAITING_ON is over", of_request=True),
    Kind.REMOTE_LOAD: _fields("a fetch of remote KV ended", args="outcome tokens", of_request=True),
    Kind.COMPLETION_DELIVERED: _fields(
        "the connector reported that it is done with the request's blocks. Older engines omit at_ns",
        args="at_ns",
        of_request=True,
    ),
    Kind.STALLED: _fields(
        "the engine's own watchdog: no progress since that step", args="at_ns status since_step cause", of_request=True
    ),
    Kind.FINISHED: _fields("reached a terminal status", args="status", of_request=True),
    Kind.CLIENT_GONE: _fields("the client closed the connection", args="at_ns", of_request=True),
    Kind.TRACED: _fields(
        "the client's trace, from the W3C traceparent of the request: 64 bits each, as signed numbers",
        args="trace_id_high trace_id_low parent_span_id flags",
        of_request=True,
    ),
    Kind.NOT_QUEUED: _fields(
        "unfinished and in no queue of the engine: the scheduler never reaches it", args="at_ns status", of_request=True
    ),
    Kind.TIER: _fields(
        "an outer tier stored, pinned, unpinned or evicted these keys. used and capacity are in blocks",
        args="op tier used capacity hashes*",
    ),
    Kind.MEMORY: _fields(
        "the memory breakdown in bytes (-1: unknown)",
        args=(
            "device_total device_free used_here used_by_others weights activations_peak graphs_estimated"
            " graphs_actual non_torch kv_pool allocator_reserved allocator_allocated fit_requested use_all"
        ),
    ),
    Kind.AUDIT_BEGIN: _fields("the engine starts to report its own tables, in slices between steps", args="cycle"),
    Kind.AUDIT_BLOCKS: _fields(
        "consecutive blocks as the pool has them",
        args="first_block",
        ids="reference counts × 4, + 2 if in the free queue, + 1 if hashed",
    ),
    Kind.AUDIT_REQUEST: _fields(
        "a request's blocks in the engine's tables (holder 0: not deferred, detached 1: no longer in its table)."
        " The first KV group comes last",
        args="status num_computed_tokens output_tokens holder fence lease_deadline_ns detached",
        ids="blocks",
        of_request=True,
    ),
    Kind.AUDIT_END: _fields(
        "the audit is complete: the engine's counters", args="cycle free cached_idle used requests"
    ),
    Kind.OBSERVED: _fields("added by a source: the time, while no event arrives", args="wall_ns"),
    Kind.LOST: _fields(
        "added by a source: batches that cannot be recovered", args="first_sequence last_sequence stage"
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
