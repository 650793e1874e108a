"""EngineState as bytes, for keyframes, and back."""

from __future__ import annotations

from array import array
from itertools import chain
from typing import Final, Literal

import msgspec

from ..base import limits
from ..contract.wire import NO_REQUEST, PINS, NotAFrame
from .engine_state import EngineState
from .records import (
    Deferral,
    DroppedTable,
    EngineStack,
    Heartbeat,
    RequestState,
    StepInFlight,
    StreamPositions,
    TierState,
    Totals,
)


class _StateDump(msgspec.Struct, array_like=True):
    """An EngineState as a keyframe carries it. Part of the wire contract: fields are only appended."""

    description: str
    total: int
    reserved: int
    block_size: int
    now_ns: int
    started_ns: int
    stopped_ns: int
    last_step: int
    refs: memoryview
    owner: memoryview
    hashes: memoryview
    since: memoryview
    more: dict[int, list[int]]
    detached: dict[int, list[int]]
    deferrals: list[Deferral]
    requests: list[RequestState]
    totals: Totals
    in_flight: list[StepInFlight]
    heartbeat: Heartbeat | None
    memory: list[int]
    tiers: dict[int, TierState]
    damaged: bool
    audit_cycles: int
    audited_ns: int
    orphans: list[int]
    early: dict[int, int] = {}
    launched_ns: int = 0
    prompt_blocks_cached: int = 0
    places: StreamPositions = msgspec.field(default_factory=StreamPositions)
    mode: int = 0
    mode_since_ns: int = 0
    stack: EngineStack | None = None
    pinned: dict[int, int] = {}
    dropped: dict[int, DroppedTable] = {}
    stale: dict[int, list[int]] = {}
    told: dict[int, int] = {}


_COPIED: Final = tuple(
    name
    for name in _StateDump.__struct_fields__
    if name not in ("refs", "owner", "hashes", "since", "deferrals", "requests", "in_flight", "orphans")
)
"""Fields that a dump has as the state has them."""
PACKED_AT_ONCE: Final = 1 << 14
"""Values packed at once: the engine's thread never waits for longer than these take."""

_STATE_ENCODER = msgspec.msgpack.Encoder()
_STATE_DECODER = msgspec.msgpack.Decoder(_StateDump)


def dump_state(state: EngineState) -> memoryview:
    """Pack the state, to be loaded by `load_state`."""
    dump = _StateDump(
        **{name: getattr(state, name) for name in _COPIED},
        refs=_packed("i", state.refs),
        owner=_packed("i", state.owner),
        hashes=_packed("q", state.hashes),
        since=_packed("q", state.since),
        deferrals=list(state.deferrals.values()),
        requests=list(state.requests.values()),
        in_flight=list(state.in_flight.values()),
        orphans=sorted(state.orphans),
    )
    return memoryview(_STATE_ENCODER.encode(dump))


def _packed(typecode: str, values: list[int]) -> memoryview:
    packed = array(typecode)
    for first in range(0, len(values), PACKED_AT_ONCE):
        packed.extend(array(typecode, values[first : first + PACKED_AT_ONCE]))  # twice as fast as from the list
    return memoryview(packed).cast("B")


def _unpacked(typecode: Literal["i", "q"], packed: memoryview, total: int) -> list[int]:
    if len(packed) != array(typecode).itemsize * total:
        raise NotAFrame(f"a keyframe of {total} blocks with a column of {len(packed)} bytes")
    return packed.cast(typecode).tolist()


def _check_ranges(dump: _StateDump) -> None:
    """Raise NotAFrame unless pool, blocks, times and names are in their ranges, which nothing downstream checks."""
    size = dump.block_size
    if (
        not 0 <= dump.reserved <= dump.total <= limits.POOL_BLOCKS
        or not bool(dump.total) <= size <= limits.BLOCK_TOKENS
    ):
        raise NotAFrame(f"a keyframe of {dump.total:,} blocks of {size:,} tokens, {dump.reserved:,} of them reserved")
    if (requests := len(dump.requests) + len(dump.deferrals)) > limits.ENGINE_LEDGER_REQUESTS:
        raise NotAFrame(
            f"a keyframe of {requests:,} requests, and a ledger has {limits.ENGINE_LEDGER_REQUESTS:,} at most"
        )
    named = {*dump.more, *dump.detached, *dump.orphans, *dump.early, *dump.pinned, *dump.stale}.union(
        *(record.blocks for record in dump.requests),
        *(deferral.blocks for deferral in dump.deferrals),
        *(dropped.blocks for dropped in dump.dropped.values()),
    )
    if named and not 0 <= min(named) <= max(named) < dump.total:
        raise NotAFrame(f"a keyframe of {dump.total} blocks that names block {max(named)}")
    names = [dump.mode, *(deferral.holder for deferral in dump.deferrals)]
    names += [name for record in dump.requests for name in (record.status, record.cause, record.stalled_cause)]
    if not 0 <= min(names) <= max(names) < limits.STATE_NAMES:
        raise NotAFrame(f"a keyframe with a status, cause, holder or mode of {max(names, key=abs)}")
    times = [dump.now_ns, dump.started_ns, dump.stopped_ns, dump.launched_ns, dump.audited_ns, dump.mode_since_ns]
    times += [*dump.pinned.values(), *(deferral.since_ns for deferral in dump.deferrals)]
    times += [at_ns for record in dump.requests for at_ns in (record.since_ns, record.arrived_ns, record.finished_ns)]
    if not -limits.TIME_NS <= min(times) <= max(times) <= limits.TIME_NS:
        raise NotAFrame(f"a keyframe with a time of {max(times, key=abs)} ns")


def _check_owners(owner: list[int], dump: _StateDump) -> None:
    """Raise NotAFrame unless owners are numbers of requests, and former owners those or pins."""
    if min(owner, default=NO_REQUEST) < NO_REQUEST or min(chain(*dump.more.values()), default=0) < 0:
        raise NotAFrame("a keyframe with an owner that is not a request")
    numbers = chain(
        *dump.detached.values(),
        (record.number for record in dump.requests),
        (deferral.request for deferral in dump.deferrals),
    )
    if min(numbers, default=0) < PINS:
        raise NotAFrame("a keyframe with a former owner that is not a request")


def load_state(packed: memoryview) -> EngineState:
    """Load a state that `dump_state` packed. Raises NotAFrame for anything else."""
    try:
        dump = _STATE_DECODER.decode(packed)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotAFrame(f"a keyframe whose state cannot be read: {error}") from error
    _check_ranges(dump)
    state = EngineState()
    for name in _COPIED:
        setattr(state, name, getattr(dump, name))
    state.set_columns(
        refs=_unpacked("i", dump.refs, dump.total),
        owner=_unpacked("i", dump.owner, dump.total),
        hashes=_unpacked("q", dump.hashes, dump.total),
        since=_unpacked("q", dump.since, dump.total),
        born=[0] * dump.total,
    )
    _check_owners(state.owner, dump)
    state.deferrals = {deferral.request: deferral for deferral in dump.deferrals}
    state.requests = {record.number: record for record in dump.requests}
    state.in_flight = {step.step: step for step in dump.in_flight}
    state.orphans = set(dump.orphans)
    state.lost_ns = dump.now_ns if dump.damaged else 0
    state.computed_ns = dump.launched_ns  # as far as a keyframe shows
    state.rebuild_fences()
    state.recount()
    return state
