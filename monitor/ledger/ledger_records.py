"""The small records that a ledger keeps: positions, losses, anomalies, reported events, points of the recent past.

A request's last block is filled as it goes on, and until then the rest of it is reserved and unused. Points count that
room (`unused_tokens`). Where KV groups differ in what they keep of a request, its tokens do not show how full its
blocks are, and the room is unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from ..contract.description import EngineDescription
from ..contract.kinds import FIRST_FINISHED, Stage, Status
from ..contract.samples import ReportedEvent
from ..contract.wire import Batch
from .balance import Balance
from .engine_state import EngineState
from .records import Anomaly, RequestState


class Position(NamedTuple):
    """A position in an engine's stream: the `event`-th of batch `sequence` of an epoch."""

    epoch: int
    sequence: int
    event: int = 0

    def __str__(self) -> str:
        return f"{self.epoch}/{self.sequence}/{self.event}"


class FoundAnomaly(NamedTuple):
    """An impossible transition, where and when it was found."""

    position: Position
    at_ns: int
    anomaly: Anomaly
    group: int = 0
    """The KV group of the event that showed it."""


class Loss(msgspec.Struct, frozen=True):
    """Batches that no source could supply: how many, at which stage, noticed when, and the last one before them."""

    batches: int
    stage: Stage
    at_ns: int
    position: str

    @property
    def after(self) -> int:
        """Return the sequence of the last batch before them."""
        return int(self.position.split("/")[1])


class Point(NamedTuple):
    """The pool and the queues at one moment of the recent past, and the totals until then."""

    at_ns: int
    balance: Balance
    running: int
    waiting: int
    finished_requests: int
    preemptions: int
    computed_tokens: int
    output_tokens: int
    allocation_failures: int
    steps: int
    waiting_by: tuple[tuple[int, int], ...] = ()
    """By cause, how many wait for it."""
    limits: tuple[tuple[int, int], ...] = ()
    """Steps by what kept each from being larger."""
    unused_tokens: int = -1
    """Free room in the blocks of live requests, in tokens, or -1 where that is unknown."""
    position: Position | None = None
    """The last event until then."""


LEAST_BATCH_NS: Final = 1_000
"""The least time between two batches: packing one takes an engine tens of microseconds."""
CLOCK_SLACK_NS: Final = 1_000_000_000


def most_missing(batch: Batch, received: Sequence[Batch]) -> int:
    """Return how many batches can be missing before one, by the engine's monotonic clock since the last `received`."""
    if not received or received[-1].epoch != batch.epoch:
        return batch.sequence
    return max(batch.mono_ns - received[-1].mono_ns + CLOCK_SLACK_NS, 0) // LEAST_BATCH_NS


def unused_tokens(state: EngineState, description: EngineDescription, record: RequestState) -> int | None:
    """Return how many more tokens its blocks have room for, or None where that is unknown."""
    if not _by_tokens(state, description):
        return None
    return max(0, len(record.blocks) * state.block_size - record.computed_tokens) if record.blocks else 0


def unused_by_all(state: EngineState, description: EngineDescription) -> int | None:
    """Return the same over all live requests. A block that several share is full, and adds to none of them."""
    if not _by_tokens(state, description):
        return None
    size, living = state.block_size, [r for r in state.requests.values() if r.status < FIRST_FINISHED and r.blocks]
    rooms = [len(record.blocks) * size - record.computed_tokens for record in living]
    return sum([room for room in rooms if room > 0])


def tokens_in(state: EngineState, description: EngineDescription, block: int) -> int | None:
    """Return how many computed tokens a block holds: all that fit, if it is cached, or None where that is unknown."""
    if not _by_tokens(state, description):
        return None
    if state.hashes[block]:
        return state.block_size
    owners = (record for number in state.owners(block) if (record := state.requests.get(number)) is not None)
    held = (r.computed_tokens - r.blocks.index(block) * state.block_size for r in owners if block in r.blocks)
    return max((min(max(tokens, 0), state.block_size) for tokens in held), default=0)


def _by_tokens(state: EngineState, description: EngineDescription) -> bool:
    return len(description.groups) <= 1 and state.block_size > 0


def point_now(
    state: EngineState,
    description: EngineDescription,
    at_ns: int,
    position: Position,
    waiting_by: Mapping[int, int],
    balance: Balance,
) -> Point:
    """Return the point at wall time `at_ns`. waiting_by: waiting requests by the cause of their wait."""
    totals = state.totals
    statuses = Counter([record.status for record in state.requests.values()])
    running = statuses[Status.RUNNING]
    waiting = sum(count for status, count in statuses.items() if Status.RECEIVED < status < FIRST_FINISHED)
    return Point(
        at_ns=at_ns,
        balance=balance,
        running=running,
        waiting=waiting - running,
        finished_requests=sum(totals.finished.values()),
        preemptions=sum(totals.preemptions.values()),
        computed_tokens=totals.computed_tokens,
        output_tokens=totals.output_tokens,
        allocation_failures=totals.allocation_failures,
        steps=totals.steps,
        waiting_by=tuple(waiting_by.items()),
        limits=tuple(totals.limits.items()),
        unused_tokens=-1 if (unused := unused_by_all(state, description)) is None else unused,
        position=position,
    )


def thinned_points(points: Iterable[Point], every_ns: int) -> list[Point]:
    """Return the points that are at least `every_ns` after the one returned before."""
    kept: list[Point] = []
    for point in points:
        if not kept or point.at_ns - kept[-1].at_ns >= every_ns:
            kept.append(point)
    return kept


BATCH_OVERHEAD: Final = 1_500
"""Bytes of a batch's own objects: the struct, its numbers and names, and three views of the frame."""


def batch_bytes(batch: Batch) -> int:
    """Return about how many bytes a batch takes in memory."""
    return BATCH_OVERHEAD + len(batch.runs) + len(batch.args) + len(batch.ids)


def span_ns(batches: Sequence[Batch]) -> int:
    """Return the time from the first batch to the last. Clocks that were set back make it shorter."""
    return batches[-1].wall_ns - batches[0].wall_ns


KEPT_FIRST: Final = 64
KEPT_LAST: Final = 64


class ReportedEvents:
    """Events that the lines of a log or the phrases of a report name. All are counted, the first and last are kept."""

    def __init__(self) -> None:
        self._first: dict[str, list[ReportedEvent]] = {}
        self._last: dict[str, list[ReportedEvent]] = {}
        self._counts: Counter[str] = Counter()

    def add(self, event: ReportedEvent) -> None:
        """Count and keep an event."""
        self._counts[event.name] += 1
        first = self._first.setdefault(event.name, [])
        if len(first) < KEPT_FIRST:
            first.append(event)
            return
        last = self._last.setdefault(event.name, [])
        last.append(event)
        if len(last) > KEPT_LAST:
            del last[0]

    def __contains__(self, name: str) -> bool:
        return name in self._counts

    def __bool__(self) -> bool:
        return bool(self._counts)

    def count(self, *names: str) -> int:
        """Return how many events had one of these names."""
        return sum(self._counts[name] for name in names)

    def of(self, *names: str) -> list[ReportedEvent]:
        """Return the kept events of these names, by name and in their order."""
        return [event for name in names for event in (*self._first.get(name, ()), *self._last.get(name, ()))]

    def names(self) -> list[str]:
        """Return all names that occurred."""
        return list(self._counts)
