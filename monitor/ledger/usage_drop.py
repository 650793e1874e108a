"""Explains a drop of usage, or of throughput, in a window of time: every block that became free, by reason.

The window is made of whole batches, since each carries the engine's own count of used blocks: what was used before,
less what became free, plus what was taken, is what was used after, or the difference is named. Reference counts before
the window come from those of now, with all that happened since undone.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final

import msgspec
from msgspec.structs import asdict

from ..base.text import timestamp
from ..contract.kinds import Kind, Limit, Preempt, Release, name_of
from ..contract.wire import Batch, Run, fives
from .engine_ledger import EngineLedger, Point
from .event_history import request_names, scan_events

MOST_PREEMPTIONS: Final = 200


class FreedBlocks(msgspec.Struct):
    """Blocks and references freed for one reason: blocks that became free by it, references that left others, by
    request.
    """

    reason: str
    blocks: int = 0
    references_released: int = 0
    requests: list[str] = []


class PreemptedRequest(msgspec.Struct, frozen=True):
    """A preemption: the request that lost this many blocks and computed tokens, the request that got them (empty: none
    in particular), and the reason.
    """

    victim: str
    beneficiary: str
    reason: str
    blocks: int
    tokens_lost: int


class WindowWork(msgspec.Struct):
    """The work done in a window of time."""

    seconds: float
    steps: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    longest_without_step_s: float = 0.0
    limits: dict[str, int] = {}
    """Steps by what kept each from being larger."""


class UsageLevel(msgspec.Struct, frozen=True):
    """Used blocks at a moment."""

    at: str | None
    used: int


class UsageFall(msgspec.Struct, kw_only=True):
    """How usage fell furthest in a window of an engine's past, and what was done meanwhile. Counts of blocks and of
    requests are None where the engine reported none.
    """

    engine: str
    since: str | None
    until: str | None
    usable: int
    used_after: int | None
    highest: UsageLevel | None
    lowest: UsageLevel | None
    """The ends of the deepest fall within the window."""
    freed_in_drop: dict[str, int]
    """Blocks that became free between these two, by reason."""
    running_after: int | None
    waiting_after: int | None
    work: WindowWork
    work_before: WindowWork
    """In as long a time just before."""


class UsageDrop(UsageFall, kw_only=True):
    """The same, with all blocks taken and freed in the window, by request."""

    is_complete: bool
    """Whether all of its batches are still kept."""
    used_before: int | None
    freed: list[FreedBlocks]
    allocated: int
    allocated_to: list[str]
    unexplained_blocks: int | None
    """Used blocks at the end beyond what was used, taken and freed explains. It is 0 unless events were lost."""
    preempted: list[PreemptedRequest]
    preemptions: int
    admitted: int
    finished: int
    allocation_failures: int
    running_before: int | None
    waiting_before: int | None


def steepest_fall(points: Sequence[Point], window_s: float) -> int:
    """Return the centre of the window (wall ns) in which usage fell furthest, or the last sample's time if it never
    did.
    """
    window_ns, best, at_ns = window_s * 1e9, 0, points[-1].at_ns if points else 0
    used = [point.balance.used for point in points]
    highest: deque[int] = deque()  # of the window's points, each higher than all that follow
    for index, point in enumerate(points):
        while highest and used[highest[-1]] <= used[index]:
            highest.pop()
        highest.append(index)
        while points[highest[0]].at_ns < point.at_ns - window_ns:
            highest.popleft()
        fall = used[highest[0]] - used[index]
        if fall > best:
            best, at_ns = fall, (points[highest[0]].at_ns + point.at_ns) // 2
    return at_ns


def usage_fall(ledger: EngineLedger, at_ns: int, window_s: float) -> UsageFall:
    """Return the fall within the `window_s` seconds around `at_ns` (wall)."""
    since_ns, until_ns = _ends(at_ns, window_s)
    batches = _of_this_epoch(ledger)
    window = [batch for batch in batches if since_ns < batch.wall_ns <= until_ns]
    earlier = [batch for batch in batches if 2 * since_ns - until_ns < batch.wall_ns <= since_ns]
    before = _last_before(batches, since_ns)
    top, bottom = _deepest([point for point in ledger.points if since_ns <= point.at_ns <= until_ns])
    freed: Counter[str] = Counter()
    if top is not None and bottom is not None and bottom.balance.used < top.balance.used:
        freed = _freed_between(ledger, batches, top.at_ns, bottom.at_ns)
    is_then = not batches or batches[-1].wall_ns <= until_ns
    last = _queues_now(ledger) if is_then else _queues(_point_at(ledger.points, until_ns))
    return UsageFall(
        engine=ledger.engine,
        since=timestamp(since_ns),
        until=timestamp(until_ns),
        usable=ledger.state.usable,
        used_after=_used_of(window[-1]) if window else _used_before(before, window),
        highest=_level(top),
        lowest=_level(bottom),
        freed_in_drop=dict(freed.most_common()),
        running_after=last[0],
        waiting_after=last[1],
        work=_work(ledger, window, since_ns, until_ns),
        work_before=_work(ledger, earlier, 2 * since_ns - until_ns, since_ns),
    )


def usage_drop(ledger: EngineLedger, at_ns: int, window_s: float) -> UsageDrop:
    """Return the drop within the `window_s` seconds around `at_ns` (wall)."""
    fell = usage_fall(ledger, at_ns, window_s)
    since_ns, until_ns = _ends(at_ns, window_s)
    batches = _of_this_epoch(ledger)
    window = [batch for batch in batches if since_ns < batch.wall_ns <= until_ns]
    before = _last_before(batches, since_ns)
    fold = _Window(ledger, references_before(ledger, [batch for batch in batches if batch.wall_ns > since_ns]))
    for batch in window:
        fold.apply(batch)
    used_before = _used_before(before, window)
    counted_up = None if used_before is None else used_before + fold.taken - sum(f.blocks for f in fold.freed.values())
    first = _queues(_point_at(ledger.points, since_ns))
    return UsageDrop(
        **asdict(fell),
        is_complete=before is not None or (bool(window) and window[0].sequence == 0),
        used_before=used_before,
        freed=sorted(fold.freed.values(), key=lambda freed: -freed.blocks),
        allocated=fold.taken,
        allocated_to=list(fold.taken_by),
        unexplained_blocks=None if counted_up is None or fell.used_after is None else fell.used_after - counted_up,
        preempted=fold.preempted[:MOST_PREEMPTIONS],
        preemptions=len(fold.preempted),
        admitted=fold.admitted,
        finished=fold.finished,
        allocation_failures=fold.allocation_failures,
        running_before=first[0],
        waiting_before=first[1],
    )


def _ends(at_ns: int, window_s: float) -> tuple[int, int]:
    half_ns = round(window_s * 1e9 / 2)
    return at_ns - half_ns, at_ns + half_ns


def _of_this_epoch(ledger: EngineLedger) -> list[Batch]:
    return [batch for batch in ledger.recent if batch.epoch == ledger.epoch]


def _last_before(batches: Sequence[Batch], at_ns: int) -> Batch | None:
    return next((batch for batch in reversed(batches) if batch.wall_ns <= at_ns), None)


def _queues(point: Point | None) -> tuple[int | None, int | None]:
    """Return the numbers of running and waiting requests."""
    return (point.running, point.waiting) if point is not None else (None, None)


def _queues_now(ledger: EngineLedger) -> tuple[int, int]:
    requests = ledger.state.requests.values()
    return sum(record.is_running for record in requests), sum(record.is_waiting for record in requests)


def _used_of(batch: Batch) -> int | None:
    return batch.used if batch.total > 0 else None


def _used_before(before: Batch | None, window: Sequence[Batch]) -> int | None:
    """Return the used blocks by the last batch before a window, or 0 where an epoch begins in it."""
    if before is not None:
        return _used_of(before)
    return 0 if window and window[0].sequence == 0 else None


def _level(point: Point | None) -> UsageLevel | None:
    return UsageLevel(timestamp(point.at_ns), point.balance.used) if point is not None else None


def _deepest(points: Sequence[Point]) -> tuple[Point | None, Point | None]:
    """Return the deepest fall: its first and its last point."""
    deepest: tuple[int, Point, Point] | None = None
    highest: Point | None = None
    for point in points:
        if highest is None or point.balance.used >= highest.balance.used:
            highest = point
        fall = highest.balance.used - point.balance.used
        if deepest is None or fall > deepest[0]:
            deepest = (fall, highest, point)
    return deepest[1:] if deepest is not None else (None, None)


def _point_at(points: Iterable[Point], at_ns: int) -> Point | None:
    found = None
    for point in points:
        if point.at_ns > at_ns:
            break
        found = point
    return found


def _freed_between(ledger: EngineLedger, batches: Sequence[Batch], from_ns: int, to_ns: int) -> Counter[str]:
    """Blocks that became free in the batches packed after `from_ns` and until `to_ns` (wall), by reason. `batches` are
    all batches until now. Their events are undone one after another.
    """
    refs, freed = list(ledger.state.refs), Counter[str]()
    for batch in reversed(batches):
        if batch.wall_ns <= from_ns:
            break
        for _, _, event in reversed(list(scan_events([batch], None, USAGE_CHANGES))):
            change, became_free = USAGE_CHANGES[event.kind], 0
            for block in event.ids:
                if 0 <= block < len(refs):
                    became_free += change < 0 and refs[block] == 0
                    refs[block] -= change
            if became_free and batch.wall_ns <= to_ns:
                freed[name_of(Release, event.args[0])] += became_free
    return freed


def references_before(ledger: EngineLedger, batches: list[Batch]) -> list[int]:
    """Return the reference count of each block before these batches, which are all there were until now."""
    refs = list(ledger.state.refs)
    for batch in batches:
        ids = batch.ids.cast("i").tolist()
        i = 0
        for kind, _, _, _, n_ids in fives(batch.runs.cast("i").tolist()):
            change = USAGE_CHANGES.get(kind, 0)
            for block in ids[i : i + n_ids] if change else ():
                if 0 <= block < len(refs):
                    refs[block] -= change
            i += n_ids
    return refs


USAGE_CHANGES: Final[dict[int, int]] = {Kind.ALLOCATED: 1, Kind.REUSED: 1, Kind.RELEASED: -1, Kind.RECLAIMED: -1}
"""The change of the reference count of each block that an event names."""
_REPORTED: Final = frozenset((*USAGE_CHANGES, Kind.PREEMPTED, Kind.ADMITTED, Kind.FINISHED, Kind.ALLOCATION_FAILED))
_STEPS: Final = frozenset((Kind.STEP_LAUNCHED, Kind.STEP_COMPLETED))


class _Window:
    """A fold of the window's events over the reference counts before it."""

    def __init__(self, ledger: EngineLedger, refs: list[int]) -> None:
        self.freed: dict[str, FreedBlocks] = {}
        self.taken = 0
        self.taken_by: dict[str, None] = {}
        """Names in order: there may be thousands."""
        self.preempted: list[PreemptedRequest] = []
        self.admitted = self.finished = self.allocation_failures = 0
        self._freed_by: set[tuple[str, str]] = set()
        self._refs = refs
        self._names = request_names(ledger)

    def apply(self, batch: Batch) -> None:
        self._names.update({number: text for number, text in batch.texts.items() if number >= 0})
        for _, _, event in scan_events([batch], None, _REPORTED):
            match event.kind:
                case Kind.ALLOCATED | Kind.REUSED:
                    self._take(event)
                case Kind.RELEASED | Kind.RECLAIMED:
                    self._give_back(event)
                case Kind.PREEMPTED:
                    self._preempt(event)
                case Kind.ADMITTED:
                    self.admitted += 1
                case Kind.FINISHED:
                    self.finished += 1
                case Kind.ALLOCATION_FAILED:
                    self.allocation_failures += 1

    def _take(self, event: Run) -> None:
        taken = 0
        for block in event.ids:
            if 0 <= block < len(self._refs):
                taken += self._refs[block] <= 0
                self._refs[block] += 1
        self.taken += taken
        if taken:
            self.taken_by[self._name(event.request)] = None

    def _give_back(self, event: Run) -> None:
        reason = name_of(Release, event.args[0])
        freed = self.freed.setdefault(reason, FreedBlocks(reason, requests=[]))
        for block in event.ids:
            if 0 <= block < len(self._refs):
                self._refs[block] -= 1
                if self._refs[block] == 0:
                    freed.blocks += 1
                else:
                    freed.references_released += 1
        name = self._name(event.request) if event.kind == Kind.RELEASED else "blocks that were detached"
        if (reason, name) not in self._freed_by:
            self._freed_by.add((reason, name))
            freed.requests.append(name)

    def _preempt(self, event: Run) -> None:
        reason, beneficiary, blocks, lost = event.args[:4]
        to = self._name(beneficiary) if beneficiary >= 0 else ""
        self.preempted.append(PreemptedRequest(self._name(event.request), to, name_of(Preempt, reason), blocks, lost))

    def _name(self, number: int) -> str:
        return self._names.get(number, f"#{number}")


def _work(ledger: EngineLedger, batches: list[Batch], since_ns: int, until_ns: int) -> WindowWork:
    first, last = _point_at(ledger.points, since_ns), _point_at(ledger.points, until_ns)
    until_ns = min(until_ns, ledger.now_ns)
    generated = (last.output_tokens if last else 0) - (first.output_tokens if first else 0)
    work = WindowWork(round(max(0.0, (until_ns - since_ns) / 1e9), 3), output_tokens=max(0, generated), limits={})
    ends = [since_ns]
    for batch in batches:
        for kind, args in _usage_steps(batch):
            if kind == Kind.STEP_LAUNCHED:
                work.computed_tokens += sum(args[2:])
            elif len(args) > 3:
                work.steps += 1
                limit = name_of(Limit, args[3])
                work.limits[limit] = work.limits.get(limit, 0) + 1
                ends.append(args[0] + batch.wall_ns - batch.mono_ns)
    if until_ns > since_ns:
        gaps = [after - before for before, after in pairwise(sorted([*ends, until_ns]))]
        work.longest_without_step_s = round(max(gaps) / 1e9, 3)
    return work


def _usage_steps(batch: Batch) -> Iterator[tuple[int, list[int]]]:
    """Yield the launches and ends of steps, with their args: few among many events."""
    runs, args = batch.runs.cast("i").tolist(), batch.args.cast("q")
    for index, kind in enumerate(runs[::5]):
        if kind in _STEPS:
            first = sum(runs[3 : 5 * index : 5])
            yield kind, args[first : first + runs[5 * index + 3]].tolist()
