"""Lists events one by one, in words: filters, time range, and a description of each."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from kvscope.monitor.analysis.event_history import BLOCK_KINDS, group_of, request_event_text, scan_events
from kvscope.monitor.events.kinds import Kind, Limit, Stage, Tier, TierOp, name_of
from kvscope.monitor.events.wire import Batch, Run
from kvscope.monitor.ledger.engine_ledger import Position
from kvscope.monitor.text import counted

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


class Wanted(NamedTuple):
    """Which events: of some kinds (all but UNSAID if there are none), about one request, about one block."""

    kinds: Collection[int] = ()
    request: int | None = None
    block: int | None = None

    def may_be_in(self, batch: Batch) -> bool:
        """Whether the batch is worth a look: its columns are searched at once, where its events are slow to walk."""
        runs = batch.runs.cast("i").tolist()
        if self.kinds and not set(self.kinds).intersection(runs[::5]):
            return False
        if self.request is None and self.block is None:
            return True
        ids = batch.ids.cast("i").tolist()
        about = self.request is None or self.request in runs[2::5] or self.request in ids
        return about and (self.block is None or self.block in ids)

    def __call__(self, event: Run) -> bool:
        """Whether this is one."""
        if event.kind not in self.kinds if self.kinds else event.kind in OMITTED:
            return False
        in_step = event.kind in (Kind.PROGRESSED, Kind.STEP_LAUNCHED) and self.request in event.ids
        if self.request not in (None, event.request) and not in_step:
            return False
        return self.block is None or (event.kind in BLOCK_KINDS and self.block in event.ids)


def list_events(batches: Iterable[Batch], wanted: Wanted) -> Iterator[list[tuple[Position, int, Run]]]:
    """For each batch the events that are wanted, each with its place and wall time (ns)."""
    for batch in batches:
        if wanted.may_be_in(batch):
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
