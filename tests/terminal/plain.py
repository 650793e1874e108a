"""An engine by its events and nothing else: the plainest fold there is, to hold what the monitor tells against it.

It knows what six incidents need: one KV group, nothing lost, no audits, no fences. Names and times are the events'.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from kvscope.monitor.contract.kinds import Cause, Kind, Limit, Release, Status
from kvscope.monitor.contract.wire import Batch, Run
from kvscope.monitor.sources.recording import Recording

TELLS_THE_TIME: Final = frozenset(
    (Kind.CLOCK, Kind.STARTED, Kind.STEP_LAUNCHED, Kind.STEP_COMPLETED, Kind.ARRIVED, Kind.STOPPED)
)
ELSEWHERE: Final = frozenset((Kind.HEARTBEAT, Kind.RECEIVED, Kind.CLIENT_GONE, Kind.STALLED))
"""Said by other threads, which have the time for themselves."""
WAITING: Final = frozenset(range(Status.WAITING, Status.FINISHED_STOPPED)) - {Status.RUNNING}
LOOK_NS: Final = 100_000_000


class ReceivedRecords(NamedTuple):
    """An event, its position, the wall time that it was said at and that its batch was packed at, and the names told
    with it; `closes` its batch or not.
    """

    position: str
    at_ns: int
    packed_ns: int
    event: Run
    texts: dict[int, str]
    closes: bool


def received(directory: Path) -> Iterator[ReceivedRecords]:
    """All of a recording, in order."""
    mono = 0
    for frame in Recording(directory):
        if isinstance(frame, Batch):
            events = list(frame.events())
            for index, event in enumerate(events):
                if event.kind in TELLS_THE_TIME:
                    mono = event.args[0]
                at_ns = (event.args[0] if event.kind in ELSEWHERE else mono) + frame.wall_ns - frame.mono_ns
                position = f"{frame.epoch}/{frame.sequence}/{index}"
                yield ReceivedRecords(position, at_ns, frame.wall_ns, event, frame.texts, index == len(events) - 1)


class Look(NamedTuple):
    """Who held the pool at a moment, and how many tokens there were until then."""

    at_ns: int
    held: dict[str, int]
    output_tokens: int


class Asked:
    """One request."""

    def __init__(self, number: int, name: str) -> None:
        self.number, self.name = number, name
        self.status, self.cause, self.since = int(Status.RECEIVED), int(Cause.NONE), 0
        self.arrived = self.first_token = self.progressed = self.finished = 0
        self.prompt = self.most = self.to_finish = self.computed = self.outputs = self.hit = 0
        self.blocks: list[int] = []
        self.blocks_at_end = self.preemptions = self.lost = self.passed_over = 0
        self.needed = self.free_then = 0
        self.outputs_when_let_in = self.lost_last = 0
        self.without_output: list[int] = []
        """What each preemption before any output since it was let in has cost, in tokens."""
        self.waited: Counter[int] = Counter()

    @property
    def is_waiting(self) -> bool:
        return self.status in WAITING


class Plain:
    """What the events folded so far come to."""

    def __init__(self) -> None:
        self.total = self.reserved = self.block_size = self.now = 0
        self.holders: dict[int, list[int]] = {}
        self.cached: set[int] = set()
        self.kept: dict[int, set[int]] = {}
        self.requests: dict[int, Asked] = {}
        self.counts: Counter[str] = Counter()
        self.freed: Counter[str] = Counter()
        self.limits: Counter[str] = Counter()
        self.released_free: list[list[int]] = []
        """By event, the blocks that it released without being held by its request."""
        self.born: dict[int, int] = {}
        self.lifetimes: list[int] = []
        self.last_step, self.step_ns = -1, 0
        self.heartbeat: list[int] = []
        self.ends: list[tuple[int, int]] = []
        """When requests came to their end, and which."""
        self.looks: list[Look] = []
        """Every tenth of a second."""
        self.stalled: dict[int, list[int]] = {}
        self.front_end: set[int] = set()

    # ---------------------------------------------------------------- what is asked

    @property
    def usable(self) -> int:
        return self.total - self.reserved

    @property
    def used(self) -> int:
        return sum(bool(owners) for owners in self.holders.values())

    @property
    def free(self) -> int:
        return self.usable - self.used

    @property
    def idle(self) -> int:
        """Blocks with contents that nobody uses."""
        return sum(not self.holders.get(block) for block in self.cached)

    def running(self) -> list[Asked]:
        return [each for each in self.requests.values() if each.status == Status.RUNNING]

    def waiting(self) -> list[Asked]:
        return [each for each in self.requests.values() if each.is_waiting]

    def head(self) -> Asked | None:
        return max((each for each in self.waiting() if each.passed_over), key=lambda each: each.since, default=None)

    def cause(self, asked: Asked) -> Cause:
        """Why it is where it is: who has no reason of its own stands behind the head."""
        if asked.is_waiting and asked.cause in (Cause.NEW, Cause.PREEMPTED) and self.head() not in (None, asked):
            return Cause.BEHIND_HEAD
        return Cause(asked.cause)

    def waited_s(self, asked: Asked) -> dict[str, float]:
        waited = Counter(asked.waited)
        if asked.is_waiting:
            waited[self.cause(asked)] += self.now - asked.since
        return {Cause(cause).name: ns / 1e9 for cause, ns in waited.items()}

    def held_by(self) -> dict[str, int]:
        """Blocks by the liveliest that holds each."""
        held = Counter(running=0, waiting=0, finished=0, unaccounted=0)
        for block, owners in self.holders.items():
            statuses = [self.requests[owner].status for owner in owners]
            if Status.RUNNING in statuses:
                held["running"] += 1
            elif WAITING.intersection(statuses):
                held["waiting"] += 1
            elif owners:
                kept = any(block in self.kept.get(owner, ()) for owner in owners)
                held["finished" if kept else "unaccounted"] += 1
        return dict(held)

    def named(self, name: str) -> Asked:
        return next(each for each in self.requests.values() if each.name == name)

    # ---------------------------------------------------------------- the fold

    def fold(self, one: ReceivedRecords) -> None:
        event, a, number = one.event, one.event.args, one.event.request
        self.now = one.at_ns
        asked = self.requests.get(number)
        if asked is None and number >= 0:
            asked = self.requests[number] = Asked(number, one.texts.get(number, f"#{number}"))
        match event.kind:
            case Kind.STARTED:
                _, self.total, self.reserved, self.block_size = a
            case Kind.STEP_COMPLETED:
                self.last_step = a[1]
                self.step_ns += a[2]
                self.counts["steps"] += 1
                self.limits[Limit(a[3]).name] += 1
            case Kind.STEP_LAUNCHED:
                self.counts["launched_tokens"] += sum(a[2:])
            case Kind.HEARTBEAT:
                self.heartbeat = a
            case Kind.EVICTED:
                for block in event.ids:
                    self._lose(block)
            case Kind.PROGRESSED:
                half = len(event.ids)
                for each, computed, outputs in zip(event.ids, a[:half], a[half:], strict=True):
                    self._progressed(self.requests[each], computed, outputs)
            case Kind.RECLAIMED | Kind.DETACHED:
                raise AssertionError("this fold knows nothing of detached blocks")
        if asked is not None:
            self._about(asked, event)
        if one.closes and (not self.looks or one.packed_ns - self.looks[-1].at_ns >= LOOK_NS):
            self.looks.append(Look(one.packed_ns, self.held_by(), self.counts["output_tokens"]))

    def _about(self, asked: Asked, event: Run) -> None:
        a = event.args
        match event.kind:
            case Kind.RECEIVED:
                asked.since, asked.prompt = self.now, a[1]
                self.front_end.add(asked.number)
            case Kind.ARRIVED:
                asked.arrived, asked.prompt, asked.most, asked.to_finish = self.now, a[1], a[2], a[5]
                asked.status, asked.cause, asked.since = Status.WAITING, Cause.NEW, self.now
            case Kind.QUEUED:
                self._move(asked, Status.PREEMPTED if asked.status == Status.PREEMPTED else Status.WAITING, a[0])
            case Kind.ALLOCATION_FAILED:
                self.counts["allocations failed"] += 1
                asked.needed, asked.free_then = a
            case Kind.NOT_SCHEDULED:
                self._move(asked, asked.status, a[0])
                asked.passed_over = a[1]
            case Kind.LOOKED_UP:
                asked.hit = a[1]
                self.counts["looked_up_tokens"] += a[0]
                self.counts["hit_tokens"] += a[1]
            case Kind.ADMITTED:
                self._move(asked, Status.RUNNING, Cause.NONE)
                self.counts["admitted"] += 1
                self.counts["recomputed_tokens"] += max(asked.lost_last - a[0], 0)
                asked.lost_last = 0
                asked.computed, asked.outputs_when_let_in, asked.passed_over = a[0], asked.outputs, 0
            case Kind.FIRST_TOKEN:
                asked.first_token = self.now
            case Kind.PREEMPTED:
                self._move(asked, Status.PREEMPTED, Cause.PREEMPTED)
                self.counts["preemptions"] += 1
                self.counts["tokens_lost"] += a[3]
                asked.preemptions += 1
                asked.lost += a[3]
                asked.lost_last = a[3]
                asked.computed = 0
                if asked.outputs == asked.outputs_when_let_in:
                    asked.without_output.append(a[3])
            case Kind.FINISHED:
                self._move(asked, a[0], Cause.NONE)
                asked.finished, asked.blocks_at_end = self.now, len(asked.blocks)
                self.ends.append((self.now, asked.number))
                served = a[0] in (Status.FINISHED_STOPPED, Status.FINISHED_LENGTH_CAPPED)
                self.counts["served" if served else "not_served"] += 1
            case Kind.STALLED:
                self.stalled[asked.number] = a
            case Kind.ALLOCATED | Kind.REUSED:
                for block in event.ids:
                    self.counts["taken"] += not self.holders.get(block)
                    if event.kind == Kind.ALLOCATED and not self.holders.get(block):
                        self._lose(block)
                        self.born[block] = self.now
                    self.holders.setdefault(block, []).append(asked.number)
                    asked.blocks.append(block)
            case Kind.CACHED:
                self.cached.update(event.ids)
            case Kind.RELEASED:
                self.released_free.append([])
                for block in event.ids:
                    self._release(asked, block, Release(a[0]).name)
            case Kind.FREE_DEFERRED:
                self.kept.setdefault(asked.number, set()).update(event.ids)

    def _move(self, asked: Asked, status: int, cause: int) -> None:
        if (asked.status, asked.cause) != (status, cause):
            if asked.is_waiting:
                asked.waited[asked.cause] += self.now - asked.since
            asked.status, asked.cause, asked.since = status, cause, self.now

    def _progressed(self, asked: Asked, computed: int, outputs: int) -> None:
        self.counts["computed_tokens"] += max(computed - asked.computed, 0)
        self.counts["output_tokens"] += max(outputs - asked.outputs, 0)
        asked.computed, asked.outputs, asked.progressed = computed, outputs, self.now
        if asked.cause and asked.status == Status.RUNNING:
            self._move(asked, asked.status, Cause.NONE)

    def _release(self, asked: Asked, block: int, reason: str) -> None:
        owners = self.holders.get(block, [])
        if asked.number not in owners:
            self.released_free[-1].append(block)
            return
        owners.remove(asked.number)
        asked.blocks.remove(block)
        self.kept.get(asked.number, set()).discard(block)
        self.freed[reason] += not owners
        if not owners and block not in self.cached:
            self._die(block)

    def _lose(self, block: int) -> None:
        """Its contents go."""
        if block in self.cached:
            self.cached.discard(block)
            if not self.holders.get(block):
                self._die(block)

    def _die(self, block: int) -> None:
        self.lifetimes.append(self.now - self.born.pop(block))
