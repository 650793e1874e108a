"""The event history of a block or a request, lists of events, and the life of a request as phases: filtered scans of
batches, their text, and a fold from one state and reason to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

import msgspec

from ..base.text import counted
from ..contract.kinds import (
    FIRST_FINISHED,
    SCHEMA,
    Cause,
    Evict,
    Holder,
    Kind,
    Limit,
    Load,
    Preempt,
    Release,
    Stage,
    Status,
    Tier,
    TierOp,
    name_of,
)
from ..contract.trace_context import TraceContext
from ..contract.wire import Batch, Run, fives
from .engine_ledger import EngineLedger, Position
from .records import RequestState


class HistoryLine(NamedTuple):
    """A line of a history: where in the stream, when (wall ns, 0: unknown), and what happened."""

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
    """Name the KV group of an event, unless it is group 0, the only one of most models."""
    return f" (KV group {event.group})" if event.group else ""


def request_names(ledger: EngineLedger) -> dict[int, str]:
    """Request ids by number, of all that the ledger still knows."""
    names = {record.number: record.id for record in ledger.ended}
    names.update((record.number, record.id) for record in ledger.state.requests.values())
    return names


CARRIES_TIME = frozenset(
    int(kind)
    for kind in (Kind.CLOCK, Kind.STARTED, Kind.STEP_LAUNCHED, Kind.STEP_COMPLETED, Kind.ARRIVED, Kind.STOPPED)
)
"""Kinds that carry their own time, which also applies to the events after them."""
LEAST_ARGS: dict[int, int] = {
    int(kind): sum(not name.endswith("*") for name in fields.args) for kind, fields in SCHEMA.items()
}
"""By kind, how many arguments the contract requires."""
OWN_TIME = frozenset(int(kind) for kind in (Kind.RECEIVED, Kind.CLIENT_GONE, Kind.STALLED))
"""Kinds that carry their own time, which applies to no other event."""


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
            if n_args >= LEAST_ARGS.get(kind, 0):  # else not laid out as in the contract: the ledger has reported it
                if kind in CARRIES_TIME:
                    mono = args[a]
                wanted = kinds is None or kind in kinds
                if wanted and number is not None:
                    wanted = number in ids[i:i_end] if kind == Kind.PROGRESSED else request == number
                if wanted:
                    at = args[a] if kind in OWN_TIME else mono
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


_BLOCK_TEXTS: Final[dict[int, Callable[[list[int], str], str]]] = {
    Kind.ALLOCATED: lambda _, who: f"allocated to {who}",
    Kind.REUSED: lambda _, who: f"prefix hit: {who} took a reference",
    Kind.CACHED: lambda _, who: f"full, and entered in the prefix cache by {who}",
    Kind.EVICTED: lambda a, _: f"lost its place in the prefix cache ({name_of(Evict, a[0])})",
    Kind.DETACHED: lambda _, who: f"left the table of {who}, not free yet",
    Kind.RELEASED: lambda a, who: f"released by {who} ({name_of(Release, a[0])})",
    Kind.FREE_DEFERRED: lambda a, who: f"{who} is over, but the free is deferred ({name_of(Holder, a[0])})",
    Kind.RECLAIMED: lambda a, _: f"reclaimed ({name_of(Release, a[0])})",
}
"""By kind, what an event means for each of its blocks, from its arguments and its request."""
BLOCK_KINDS: Final = frozenset(_BLOCK_TEXTS)


def block_event_text(event: Run, names: Mapping[int, str]) -> str:
    """Describe what an event of BLOCK_KINDS means for each of its blocks."""
    return _BLOCK_TEXTS[event.kind](event.args, f"request {names.get(event.request, f'#{event.request}')}")


OMITTED: Final = frozenset(
    (
        Kind.CLOCK,
        Kind.HEARTBEAT,
        Kind.PROGRESSED,
        Kind.AUDIT_BEGIN,
        Kind.AUDIT_BLOCKS,
        Kind.AUDIT_REQUEST,
        Kind.AUDIT_END,
    )
)
"""Left out unless they are asked for: they change neither a block nor a request's state."""


class EventFilter(NamedTuple):
    """Selects events: of some kinds (all but OMITTED if none is named), about one request, about one block."""

    kinds: Collection[int] = ()
    request: int | None = None
    block: int | None = None

    def may_match(self, batch: Batch) -> bool:
        """Whether the batch may have such an event: searching its columns is faster than walking its events."""
        runs = batch.runs.cast("i").tolist()
        if self.kinds and not set(self.kinds).intersection(runs[::5]):
            return False
        if self.request is None and self.block is None:
            return True
        ids = batch.ids.cast("i").tolist()
        about = self.request is None or self.request in runs[2::5] or self.request in ids
        return about and (self.block is None or self.block in ids)

    def __call__(self, event: Run) -> bool:
        """Whether the event is selected."""
        if event.kind not in self.kinds if self.kinds else event.kind in OMITTED:
            return False
        in_step = event.kind in (Kind.PROGRESSED, Kind.STEP_LAUNCHED) and self.request in event.ids
        if self.request not in (None, event.request) and not in_step:
            return False
        return self.block is None or (event.kind in BLOCK_KINDS and self.block in event.ids)


def list_events(batches: Iterable[Batch], wanted: EventFilter) -> Iterator[list[tuple[Position, int, Run]]]:
    """Yield for each batch the selected events, each with its position and wall time (ns)."""
    for batch in batches:
        if wanted.may_match(batch):
            scanned = scan_events([batch], None, wanted.kinds or None)
            yield [(at, ns or batch.wall_ns, event) for at, ns, event in scanned if wanted(event)]


def event_text(event: Run, names: Mapping[int, str]) -> str:
    """Describe an event in a few words. Its request is named beside it."""
    a, blocks = event.args, counted(len(event.ids), "block")
    text = request_event_text(event, names)
    if text:
        return text + group_of(event)
    match event.kind:
        case Kind.STARTED:
            return f"the engine starts: {counted(a[1], 'block')} of {a[3]:,} tokens, {a[2]:,} of them reserved"
        case Kind.STOPPED:
            return "the engine shuts down cleanly"
        case Kind.STEP_LAUNCHED:
            return f"step {a[1]:,} launched: {counted(sum(a[2:]), 'token')} of {counted(len(event.ids), 'request')}"
        case Kind.STEP_COMPLETED:
            cached = f", {a[5]:,} of them cached" if len(a) > 6 and a[5] >= 0 else ""  # -1: not reported
            pool = f"; {a[4]:,} blocks free{cached}; {a[6]:,} used" if len(a) > 6 and a[4] >= 0 else ""
            bound = f", bound by {name_of(Limit, a[3])}" if a[3] else ""
            return f"step {a[1]:,} done in {a[2] / 1e6:,.1f} ms{bound}{pool}"
        case Kind.HEARTBEAT:
            polls = f", the KV connector asked {counted(a[8], 'time')}" if a[8] else ""
            return f"alive: {a[5]:,} running, {a[6]:,} waiting, {counted(a[9], 'pass', 'passes')}{polls}"
        case Kind.PROGRESSED:
            return f"{counted(len(event.ids), 'request')} progressed"
        case Kind.CACHED:
            return f"{blocks} full, and entered in the prefix cache{group_of(event)}"
        case Kind.EVICTED | Kind.RECLAIMED:
            return f"{blocks} {_LOST[event.kind]}{group_of(event)}"
        case Kind.TIER:
            what = f"{name_of(Tier, a[1])} {name_of(TierOp, a[0])}".lower()
            return f"{what} {counted(len(a) - 4, 'key')}; {a[2]:,} of {a[3]:,} blocks used"
        case Kind.MEMORY:
            return "memory breakdown of the device"
        case Kind.LOST:
            return f"{counted(a[1] - a[0] + 1, 'batch', 'batches')} lost ({name_of(Stage, a[2])})"
        case _:
            return name_of(Kind, event.kind).lower().replace("_", " ")


_LOST: Final[dict[int, str]] = {
    Kind.EVICTED: "lost their place in the prefix cache",
    Kind.RECLAIMED: "freed, detached until now",
}


_BLOCK_CHANGES: Final = {
    int(Kind.ALLOCATED): 1,
    int(Kind.REUSED): 1,
    int(Kind.RELEASED): -1,
    int(Kind.DETACHED): -1,
}
"""By kind, whether the event's blocks enter (1) or leave (-1) the request's table."""


class Phase(msgspec.Struct):
    """One state of a request for one reason. Wall times in ns. Blocks and tokens are those at its end.

    computed: tokens computed in it, of which `recomputed` had been computed before and were lost.
    """

    status: int
    cause: int
    since_ns: int
    until_ns: int = 0
    blocks: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    computed: int = 0
    recomputed: int = 0

    @property
    def seconds(self) -> float:
        """The length of the phase."""
        return (self.until_ns - self.since_ns) / 1e9


def phases(about: Iterable[tuple[Position, int, Run]], number: int, now_ns: int) -> list[Phase]:
    """Return the phases of request `number` by the events about it. The last one is not over, or lasts until
    `now_ns`.
    """
    folded = RequestPhases(number)
    for _, at_ns, event in about:
        folded.apply(event, at_ns)
    if folded.phases:
        folded.phases[-1].until_ns = max(now_ns, folded.phases[-1].since_ns)
    return folded.phases


class RequestPhases:
    """A fold of the events of one request, into its phases so far."""

    def __init__(self, number: int) -> None:
        self.phases: list[Phase] = []
        self._number = number
        self._at_ns = 0
        self._blocks = 0
        self._blocks_before = 0
        """At the end of the moment before this one: blocks are allocated just before a request is admitted."""
        self._computed = 0
        self._most_computed = 0

    @classmethod
    def joined(cls, record: RequestState, since_ns: int) -> RequestPhases:
        """Return the phases of a request that existed before its first event: its current state since `since_ns`
        (wall).
        """
        folded = cls(record.number)
        folded._blocks = folded._blocks_before = len(record.blocks)
        folded._computed = folded._most_computed = record.computed_tokens
        folded._enter(record.status, record.cause, since_ns)
        folded.phases[-1].blocks, folded.phases[-1].output_tokens = len(record.blocks), record.output_tokens
        return folded

    def apply(self, event: Run, at_ns: int) -> None:
        """Fold in an event about it, of that wall time."""
        a, n = event.args, len(event.ids)
        if at_ns != self._at_ns:
            self._at_ns, self._blocks_before = at_ns, self._blocks
        if event.kind in _BLOCK_CHANGES:
            self._blocks = max(0, self._blocks + _BLOCK_CHANGES[event.kind] * n)
        elif event.kind == Kind.PROGRESSED:
            place = event.ids.index(self._number)
            if len(a) >= 2 * n:
                self._progressed(a[place], a[n + place], at_ns)
        else:
            self._transition(event.kind, a, at_ns)
        if self.phases:
            self.phases[-1].blocks = self._blocks

    def _transition(self, kind: int, a: list[int], at_ns: int) -> None:
        """Enter the status that an event of this kind leads to, if it leads to one."""
        match kind:
            case Kind.RECEIVED:
                self._enter(Status.RECEIVED, Cause.NONE, at_ns)
            case Kind.ARRIVED | Kind.READY:
                self._enter(Status.WAITING, Cause.NEW, at_ns)
            case Kind.QUEUED if a[0] != Cause.NEW:
                self._enter(Status.PREEMPTED if a[0] == Cause.PREEMPTED else Status.WAITING, a[0], at_ns)
            case Kind.NOT_SCHEDULED if self.phases:
                self._enter(self.phases[-1].status, a[0], at_ns)
            case Kind.ADMITTED:
                self._computed = a[0]
                if self.phases:
                    self.phases[-1].blocks = self._blocks_before
                self._enter(Status.RUNNING, Cause.NONE, at_ns)
            case Kind.PREEMPTED:
                self._computed = 0
                self._enter(Status.PREEMPTED, Cause.PREEMPTED, at_ns)
            case Kind.WAITING_ON | Kind.FINISHED:
                self._enter(a[0], Cause.NONE, at_ns)

    def _enter(self, status: int, cause: int, at_ns: int) -> None:
        last = self.phases[-1] if self.phases else None
        if last is not None:
            if (last.status, last.cause) == (status, cause) or last.status >= FIRST_FINISHED:
                return
            if last.status == status and last.since_ns == at_ns:  # the reason that it has from the start
                last.cause = cause
                return
            last.until_ns = at_ns
        self.phases.append(Phase(status, cause, at_ns, computed_tokens=self._computed))
        if last is not None:
            self.phases[-1].output_tokens = last.output_tokens

    def _progressed(self, computed: int, outputs: int, at_ns: int) -> None:
        if not self.phases:  # what was before is no longer kept
            self._computed = self._most_computed = computed
            self._enter(Status.RUNNING, Cause.NONE, at_ns)
        if self.phases[-1].status == Status.RUNNING:
            self._enter(Status.RUNNING, Cause.NONE, at_ns)
        phase = self.phases[-1]
        phase.computed += max(0, computed - self._computed)
        phase.recomputed += max(0, min(computed, self._most_computed) - self._computed)
        self._computed = phase.computed_tokens = computed
        self._most_computed = max(self._most_computed, computed)
        phase.output_tokens = outputs


def phase_names(phase: Phase) -> tuple[str, str]:
    """Return its state and its reason, by name. The reason is empty where there is none."""
    return name_of(Status, phase.status), "" if phase.cause == Cause.NONE else name_of(Cause, phase.cause)
