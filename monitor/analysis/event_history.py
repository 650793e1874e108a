"""The event history of a block or a request: a filtered scan of the retained batches, and its text."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from kvscope.monitor.events.kinds import SCHEMA, Cause, Evict, Holder, Kind, Load, Preempt, Release, Status, name_of
from kvscope.monitor.events.trace_context import TraceContext
from kvscope.monitor.events.wire import Batch, Run, fives
from kvscope.monitor.ledger.engine_ledger import EngineLedger, Position
from kvscope.monitor.text import counted


class HistoryLine(NamedTuple):
    """One thing that happened: where in the stream, when (wall ns, 0 unknown), what."""

    position: Position
    at_ns: int
    what: str
    text: str


def request_history(
    about: Iterable[tuple[Position, int, Run]], number: int, names: Mapping[int, str]
) -> list[HistoryLine]:
    """Return the event history of request `number`, in order. Steps that only moved it forward share a line."""
    lines: list[HistoryLine] = []
    steps = _Steps()
    for position, at_ns, event in about:
        if event.kind == Kind.PROGRESSED:
            place = event.ids.index(number)
            if len(event.args) < 2 * len(event.ids):
                continue
            steps.add(position, at_ns, event.args[place], event.args[len(event.ids) + place])
            continue
        text = request_event_text(event, names)
        if text:
            lines += steps.entries()
            lines.append(HistoryLine(position, at_ns, name_of(Kind, event.kind).lower(), text + group_of(event)))
    lines += steps.entries()
    return lines


def block_history(batches: Iterable[Batch], block: int, names: Mapping[int, str]) -> list[HistoryLine]:
    """Return the event history of the block, in order."""
    lines = []
    for position, at_ns, event in scan_events(batches, None, BLOCK_KINDS):
        if block in event.ids:
            text = block_event_text(event, names) + group_of(event)
            lines.append(HistoryLine(position, at_ns, name_of(Kind, event.kind).lower(), text))
    return lines


def group_of(event: Run) -> str:
    """Most models have one KV group, 0."""
    return f" (KV group {event.group})" if event.group else ""


def request_names(ledger: EngineLedger) -> dict[int, str]:
    """Request ids by number, of all that the ledger still knows."""
    names = {record.number: record.id for record in ledger.ended}
    names.update((record.number, record.id) for record in ledger.state.requests.values())
    return names


BLOCK_KINDS = frozenset(
    (
        Kind.ALLOCATED,
        Kind.REUSED,
        Kind.CACHED,
        Kind.EVICTED,
        Kind.DETACHED,
        Kind.RELEASED,
        Kind.FREE_DEFERRED,
        Kind.RECLAIMED,
    )
)
CARRIES_TIME = frozenset(
    int(kind)
    for kind in (Kind.CLOCK, Kind.STARTED, Kind.STEP_LAUNCHED, Kind.STEP_COMPLETED, Kind.ARRIVED, Kind.STOPPED)
)
_MIN_ARGS: dict[int, int] = {
    int(kind): sum(not name.endswith("*") for name in fields.args) for kind, fields in SCHEMA.items()
}
_OWN_TIME = frozenset(int(kind) for kind in (Kind.RECEIVED, Kind.CLIENT_GONE, Kind.STALLED))


def scan_events(
    batches: Iterable[Batch], number: int | None, kinds: Container[int] | None = None
) -> Iterator[tuple[Position, int, Run]]:
    """Yield events with position and wall time: those about the request `number`, or all, of these kinds, or of all
    kinds. Time carries over.
    """
    mono = 0
    for batch in batches:
        offset = batch.wall_ns - batch.mono_ns
        args, ids = batch.args.cast("q").tolist(), batch.ids.cast("i").tolist()
        a = i = 0
        for index, (kind, group, request, n_args, n_ids) in enumerate(fives(batch.runs.cast("i").tolist())):
            a_end, i_end = a + n_args, i + n_ids
            if n_args >= _MIN_ARGS.get(kind, 0):  # else not laid out as in the contract: the ledger has reported it
                if kind in CARRIES_TIME:
                    mono = args[a]
                wanted = kinds is None or kind in kinds
                if wanted and number is not None:
                    wanted = number in ids[i:i_end] if kind == Kind.PROGRESSED else request == number
                if wanted:
                    at = args[a] if kind in _OWN_TIME else mono
                    run = Run(kind, group, request, args[a:a_end], ids[i:i_end])
                    yield Position(batch.epoch, batch.sequence, index), at + offset if at else 0, run
            a, i = a_end, i_end


class _Steps:
    """Consecutive steps of one request, as one line each for prompt and output."""

    def __init__(self) -> None:
        self._lines: list[tuple[Position, int, bool, int, int, int]] = []

    def add(self, position: Position, at_ns: int, computed: int, outputs: int) -> None:
        generating = outputs > 1
        if self._lines and self._lines[-1][2] == generating:
            first = self._lines[-1]
            self._lines[-1] = (first[0], first[1], generating, first[3] + 1, computed, outputs)
        else:
            self._lines.append((position, at_ns, generating, 1, computed, outputs))

    def entries(self) -> list[HistoryLine]:
        lines = []
        for position, at_ns, generating, steps, computed, outputs in self._lines:
            in_steps = f"in {counted(steps, 'step')}"
            text = (
                f"generated up to token {outputs:,} {in_steps}"
                if generating
                else (f"computed up to token {computed:,} {in_steps}")
            )
            lines.append(HistoryLine(position, at_ns, "progressed", text))
        self._lines.clear()
        return lines


def request_event_text(event: Run, names: Mapping[int, str]) -> str:
    """Describe what an event means for its request. The text is empty if the kind does not concern requests."""
    if event.kind == Kind.PREEMPTED:
        return _preempted_text(event, names)
    describe = _REQUEST_TEXTS.get(event.kind)
    return describe(event.args, counted(len(event.ids), "block")) if describe is not None else ""


def _preempted_text(event: Run, names: Mapping[int, str]) -> str:
    reason, beneficiary, blocks, lost = event.args[:4]
    others = beneficiary >= 0 and beneficiary != event.request
    winner = f" for {names.get(beneficiary, f'#{beneficiary}')}" if others else ""
    gives_up, loses = counted(blocks, "block"), counted(lost, "computed token")
    return f"preempted ({name_of(Preempt, reason)}){winner}: releases {gives_up}, loses {loses}"


def _arrived_text(a: list[int], _blocks: str) -> str:
    return (
        f"arrived at the scheduler: {counted(a[1], 'prompt token')}, at most {a[2]:,} to generate;"
        f" needs {counted(a[4], 'block')} to start, {a[5]:,} to finish"
    )


def _stalled_text(a: list[int], _blocks: str) -> str:
    since = f"step {a[2]}" if a[2] >= 0 else "before any step"
    return f"the engine's watchdog: no progress since {since} ({name_of(Cause, a[3])})"


def _allocated_text(a: list[int], blocks: str) -> str:
    return f"allocated {blocks}" + (f", evicting {counted(len(a), 'cached block')}" if a else "")


_REQUEST_TEXTS: Final[dict[int, Callable[[list[int], str], str]]] = {
    int(Kind.RECEIVED): lambda a, _: f"received at the front end, {counted(a[1], 'prompt token')}",
    int(Kind.ARRIVED): _arrived_text,
    int(Kind.QUEUED): lambda a, _: f"queued{' at the front' if a[1] else ''} ({name_of(Cause, a[0])})",
    int(Kind.LOOKED_UP): lambda a, _: f"prefix cache: {a[1]:,} of {counted(a[0], 'token')} found",
    int(Kind.ALLOCATION_FAILED): lambda a, _: f"allocation failed: needs {counted(a[0], 'block')}, {a[1]:,} free",
    int(Kind.NOT_SCHEDULED): lambda a, _: f"skipped ({name_of(Cause, a[0])}), {counted(a[1], 'time')} so far",
    int(Kind.ADMITTED): lambda a, _: f"admitted: RUNNING, {counted(a[0], 'token')} need not be computed",
    int(Kind.FIRST_TOKEN): lambda _, __: "first token",
    int(Kind.WAITING_ON): lambda a, _: f"waits: {name_of(Status, a[0])}",
    int(Kind.READY): lambda _, __: "what it waited for is ready",
    int(Kind.REMOTE_LOAD): lambda a, _: f"fetch of {counted(a[1], 'token')} of remote KV {name_of(Load, a[0])}",
    int(Kind.COMPLETION_DELIVERED): lambda _, __: "the connector reported that it no longer needs the blocks",
    int(Kind.STALLED): _stalled_text,
    int(Kind.FINISHED): lambda a, _: f"finished: {name_of(Status, a[0])}",
    int(Kind.TRACED): lambda a, _: f"is part of its caller's trace {TraceContext(*a[:4]).trace_id:032x}",
    int(Kind.CLIENT_GONE): lambda _, __: "the client closed the connection",
    int(Kind.ALLOCATED): _allocated_text,
    int(Kind.REUSED): lambda _, blocks: f"took over {blocks} from the prefix cache",
    int(Kind.RELEASED): lambda a, blocks: f"released {blocks} ({name_of(Release, a[0])})",
    int(Kind.FREE_DEFERRED): lambda a, blocks: f"the free of {blocks} is deferred ({name_of(Holder, a[0])})",
    int(Kind.DETACHED): lambda _, blocks: f"{blocks} left its table and are not free yet",
}
"""By kind, the description of an event about a request, from its arguments and the number of its blocks."""


def block_event_text(event: Run, names: Mapping[int, str]) -> str:
    """Describe what an event of BLOCK_KINDS means for each of its blocks."""
    who = f"request {names.get(event.request, f'#{event.request}')}"
    match event.kind:
        case Kind.ALLOCATED:
            return f"allocated to {who}"
        case Kind.REUSED:
            return f"prefix hit: {who} took a reference"
        case Kind.CACHED:
            return f"full, and entered in the prefix cache by {who}"
        case Kind.EVICTED:
            return f"lost its place in the prefix cache ({name_of(Evict, event.args[0])})"
        case Kind.DETACHED:
            return f"left the table of {who}, not free yet"
        case Kind.RELEASED:
            return f"released by {who} ({name_of(Release, event.args[0])})"
        case Kind.FREE_DEFERRED:
            return f"{who} is over, but the free is deferred ({name_of(Holder, event.args[0])})"
        case _:
            return f"reclaimed ({name_of(Release, event.args[0])})"
