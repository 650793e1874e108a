"""Encode and decode batches and keyframes. docs/contract.md has the same, byte by byte, with an example.

A frame is five bytes, `K V major minor type`, and then one msgpack array. Within a major version fields are only ever
added at the end of the array and kinds only ever added, so a reader takes any minor version. A newer major version is
refused.

    ContractError        what reached us is not, or not only, the contract
    ├─ NotAFrame         the bytes are not a frame, or are damaged
    └─ NewerVersion      a frame of a major version from after this reader's time
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator
from typing import Final, TypeAlias

import msgspec

from ..base import limits
from ..base.errors import ContractError as ContractError
from .kinds import Kind

MAJOR: Final = 1
MINOR: Final = 0
MAGIC: Final = b"KV"
PREFIX: Final = 5
NO_REQUEST: Final = -1
PINS: Final = -2
"""Stands for whatever holds blocks and is not a request, where an audit names holders by number."""
STACK_TEXT: Final = -3
"""The key of a stack among the texts of a batch."""
ADDED_BY_SOURCE: Final = -1
"""The sequence of a batch that a source added (observed, lost): it has no place in the engine's own count."""

if sys.byteorder != "little":  # columns are sent as they lie in memory
    raise ImportError("kvscope's event contract is little-endian, and so must be the machine")


class NotAFrame(ContractError):
    """The bytes are not a frame, or are damaged."""


class NewerVersion(ContractError):
    """The frame is of a newer major version than this reader knows."""


class Run(msgspec.Struct, frozen=True):
    """One event: `kind`, KV `group`, `request` number (-1: none), and its `args` and `ids` as SCHEMA lays them out."""

    kind: int
    group: int
    request: int
    args: list[int]
    ids: list[int]


class Batch(msgspec.Struct, array_like=True, frozen=True):
    """The events of one engine in one or a few steps.

    `runs` is int32, five to an event (kind, group, request, number of args, number of ids). `args` is int64 and `ids`
    int32, each event's following the last's. `texts` maps a request's number to its id where first named, and -1 to the
    engine's description as JSON. The counts are the pool's own at the end of the batch (-1: not reported). `free`
    includes cached_idle, and `total` includes reserved blocks.
    """

    engine: str
    epoch: int
    sequence: int
    first_step: int
    last_step: int
    wall_ns: int
    mono_ns: int
    free: int
    cached_idle: int
    used: int
    total: int
    dropped_batches: int
    dropped_events: int
    texts: dict[int, str]
    runs: memoryview
    args: memoryview
    ids: memoryview

    def columns(self) -> tuple[list[int], list[int], list[int]]:
        """Return `runs`, `args` and `ids` as lists of numbers."""
        return self.runs.cast("i").tolist(), self.args.cast("q").tolist(), self.ids.cast("i").tolist()

    def events(self) -> Iterator[Run]:
        """Each event in order, of kinds unknown to this version too. Convenient, not fast: `apply_events` is."""
        runs, args, ids = self.columns()
        a = i = 0
        for kind, group, request, n_args, n_ids in fives(runs):
            yield Run(kind, group, request, args[a : a + n_args], ids[i : i + n_ids])
            a += n_args
            i += n_ids


class Keyframe(msgspec.Struct, array_like=True, frozen=True):
    """The whole state after batch `sequence`. A reader that has it needs nothing from before.

    `state` is what `dump_state` packs. `damaged` means that the engine lost events before this and has not yet audited
    everything since, so that some numbers may be wrong.
    """

    engine: str
    epoch: int
    sequence: int
    last_step: int
    wall_ns: int
    mono_ns: int
    damaged: bool
    state: memoryview


Frame: TypeAlias = Batch | Keyframe

_TYPES: Final[dict[int, type[Batch] | type[Keyframe]]] = {ord("B"): Batch, ord("K"): Keyframe}
_LETTERS: Final = {cls: bytes([letter]) for letter, cls in _TYPES.items()}
_WIRE_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODERS: Final = {letter: msgspec.msgpack.Decoder(cls) for letter, cls in _TYPES.items()}


def encode(frame: Frame) -> bytes:
    """Return the frame as bytes."""
    return MAGIC + bytes((MAJOR, MINOR)) + _LETTERS[type(frame)] + _WIRE_ENCODER.encode(frame)


def decode(payload: bytes | memoryview) -> Frame | None:
    """Return the frame in `payload`, its columns being views of it, or None for a type of frame from a newer minor
    version.

    Raises NewerVersion for a newer major version and NotAFrame for anything else that is not a frame.
    """
    prefix = bytes(payload[:PREFIX])
    if len(prefix) < PREFIX or prefix[:2] != MAGIC:
        raise NotAFrame(f"not a kvscope frame: it begins with {prefix!r} and should begin with {MAGIC!r}")
    if prefix[2] > MAJOR:
        raise NewerVersion(
            f"this stream speaks version {prefix[2]}.{prefix[3]} of the event contract and this reader knows"
            f" {MAJOR}.{MINOR}: upgrade kvscope here to the engine's release"
        )
    decoder = _DECODERS.get(prefix[4])
    if decoder is None:
        return None
    if len(payload) > limits.FRAME_BYTES:
        raise NotAFrame(f"a frame of {len(payload):,} bytes: {limits.FRAME_BYTES:,} are allowed")
    try:
        frame = decoder.decode(memoryview(payload)[PREFIX:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotAFrame(f"a damaged frame of {len(payload)} bytes: {error}") from error
    if isinstance(frame, Batch):
        _check_columns(frame)
    return _within_limits(frame)


def _check_columns(batch: Batch) -> None:
    """Check that the columns add up. `apply_events` relies on it."""
    if len(batch.runs) % 20 or len(batch.args) % 8 or len(batch.ids) % 4:
        raise NotAFrame(f"batch {batch.sequence}: a column is not a whole number of values long")
    runs = batch.runs.cast("i").tolist()
    n_args, n_ids = runs[3::5], runs[4::5]
    if (
        min(n_args, default=0) < 0
        or min(n_ids, default=0) < 0
        or sum(n_args) * 8 != len(batch.args)
        or sum(n_ids) * 4 != len(batch.ids)
    ):
        raise NotAFrame(f"batch {batch.sequence}: its runs name more or fewer values than it carries")


def is_alive(frame: Frame) -> bool:
    """Whether the frame shows that its engine is alive: a heartbeat, or a keyframe."""
    return isinstance(frame, Keyframe) or Kind.HEARTBEAT in frame.runs.cast("i").tolist()[::5]


def _within_limits(frame: Frame) -> Frame:
    """Return the frame, its texts cut to their limits. Raises NotAFrame if it is beyond a limit."""
    if not 0 < len(frame.engine) <= limits.ENGINE_NAME_CHARS:
        raise NotAFrame(f"an engine's name of {len(frame.engine):,} characters")
    times = (frame.epoch, frame.wall_ns, frame.mono_ns)
    if min(times) < 0 or max(times) > limits.TIME_NS:
        raise NotAFrame(f"a time of {max(times, key=abs)} ns")
    if not ADDED_BY_SOURCE <= frame.sequence <= limits.TIME_NS or abs(frame.last_step) > limits.TIME_NS:
        raise NotAFrame(f"batch {frame.sequence} of step {frame.last_step}")
    return _checked_batch(frame) if isinstance(frame, Batch) else frame


def _checked_batch(batch: Batch) -> Batch:
    # The engine's own counters may be wrong, below 0 too: that they disagree is a finding and not a damaged frame.
    counters = (batch.free, batch.cached_idle, batch.used)
    counts = (batch.total, batch.dropped_batches, batch.dropped_events, batch.first_step)
    if min(counts) < -1 or max(*counts, *counters) > limits.TIME_NS or min(counters) < -limits.TIME_NS:
        raise NotAFrame(f"batch {batch.sequence}: an impossible count among {counters + counts}")
    if batch.texts:
        batch = _cut(batch)
    runs = batch.runs.cast("i").tolist()
    if Kind.STARTED in runs[::5]:
        _check_start(batch, runs)
    return batch


def _cut(batch: Batch) -> Batch:
    allowed = {number: limits.REQUEST_ID_CHARS if number >= 0 else limits.DESCRIPTION_CHARS for number in batch.texts}
    if all(len(text) <= allowed[number] for number, text in batch.texts.items()):
        return batch
    return msgspec.structs.replace(
        batch, texts={number: text[: allowed[number]] for number, text in batch.texts.items()}
    )


def _check_start(batch: Batch, runs: list[int]) -> None:
    args = batch.args.cast("q").tolist()
    at = 0
    for kind, _, _, n_args, _ in fives(runs):
        if kind == Kind.STARTED:
            total, reserved, block_size = (*args[at : at + n_args], -1, -1, -1, -1)[1:4]
            if not 0 <= reserved <= total <= limits.POOL_BLOCKS or not 1 <= block_size <= limits.BLOCK_TOKENS:
                raise NotAFrame(f"a pool of {total:,} blocks of {block_size:,} tokens, {reserved:,} of them reserved")
            if _depth(batch.texts.get(NO_REQUEST, "")) > limits.DESCRIPTION_DEPTH:
                raise NotAFrame(f"a description nested more than {limits.DESCRIPTION_DEPTH} deep")
        at += n_args


def _depth(text: str) -> int:
    """Return how deep the objects and lists of a JSON text nest at most. Brackets in its strings count too."""
    depth = deepest = 0
    if text.count("{") + text.count("[") <= limits.DESCRIPTION_DEPTH:
        return 0
    for character in text:
        if character in "{[":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "}]":
            depth -= 1
    return deepest


def fives(runs: list[int]) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield the runs of a flat list, one (kind, group, request, number of args, number of ids) at a time."""
    values = iter(runs)
    return zip(values, values, values, values, values, strict=True)


def column(typecode: str, values: Iterable[int]) -> memoryview:
    """Whole numbers as the bytes of a column: typecode "i" for int32, "q" for int64."""
    return memoryview(array(typecode, values)).cast("B")


def batch_of(
    engine: str,
    epoch: int,
    events: Iterable[Run],
    *,
    sequence: int = ADDED_BY_SOURCE,
    wall_ns: int = 0,
    mono_ns: int = 0,
    texts: dict[int, str] | None = None,
) -> Batch:
    """Return a batch of single events, for sources that add some, and for tests. Engines use EventLog."""
    runs: list[int] = []
    args: list[int] = []
    ids: list[int] = []
    for event in events:
        runs += (event.kind, event.group, event.request, len(event.args), len(event.ids))
        args += event.args
        ids += event.ids
    packed = column("i", runs), column("q", args), column("i", ids)
    unknown = (-1, -1, -1, -1)
    return Batch(engine, epoch, sequence, -1, -1, wall_ns, mono_ns, *unknown, 0, 0, texts or {}, *packed)
