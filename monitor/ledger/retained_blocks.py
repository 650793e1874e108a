"""The blocks that are held, by request and reason, and what became of those that were allocated in a window of time.

What is held is a state: it does not depend on the window. The window is replayed from its batches, over the reference
counts before it. Those come from the counts at its end, with all events since undone. A residency begins when a free
block gets an owner, and ends when the last owner frees it. Each residency that begins in the window is over by its end,
or its block is among those that are held.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import msgspec

from ..base.text import timestamp
from ..contract.kinds import Status, name_of
from .engine_ledger import EngineLedger
from .event_history import request_names, scan_events
from .pool_account import PoolPart, block_parts, holders
from .pool_forecast import IdleFloors
from .tally import RESIDENCY_BOUNDS_S, Histogram
from .usage_drop import USAGE_CHANGES, references_before

MAX_RETAINED_IDS: Final = 1_000


class RetainedGroup(msgspec.Struct, frozen=True):
    """Blocks that count under one owner in one state for one reason. `since`: when the first of them came into use.
    `ids` has the first of them. `owner` is empty where no owner is known.
    """

    owner: str
    state: str
    reason: str
    since: str | None
    for_s: float
    blocks: int
    ids: list[int]


class LifetimeBucket(msgspec.Struct, frozen=True):
    """How many blocks were in use for at most this long, and for longer than the bucket before. None: any longer."""

    at_most_s: float | None
    blocks: int


class IdleFloorView(msgspec.Struct, frozen=True):
    """Blocks that stayed in use when the engine had drained to idle."""

    at: str | None
    blocks: int


class RetainedBlocksView(msgspec.Struct, frozen=True):
    """The blocks that are held at the end of a window, whenever they were allocated, and the fate of the blocks that
    were allocated in it.

    held           by owner, the oldest first: every block in use once, `held_blocks` in all
    allocated      times that a block was handed out, or taken over from the prefix cache without an owner
    freed          of these, given back within the window; `lifetimes` says after how long
    unfreed        of these, not given back by its end: they are among those that are held
    still_cached   of the blocks given back, kept for their prefix alone at the end: a cache, not a leak
    is_complete    whether all events of the window are still kept, and none was lost
    """

    engine: str
    since: str | None
    until: str | None
    is_complete: bool
    allocated: int
    freed: int
    unfreed: int
    still_cached: int
    held_blocks: int
    held: list[RetainedGroup]
    lifetimes: list[LifetimeBucket]
    floors: list[IdleFloorView]


def retained_blocks(ledger: EngineLedger, since_ns: int) -> RetainedBlocksView:
    """Return the blocks that are held, and the fate of those allocated since `since_ns` (wall), by the batches and
    points that the ledger has.
    """
    window = [batch for batch in ledger.recent if batch.wall_ns >= since_ns and batch.epoch == ledger.epoch]
    refs = references_before(ledger, window)
    born: dict[int, int] = {}
    given_back: set[int] = set()
    lifetimes: list[int] = []
    taken = 0
    for _, at_ns, event in scan_events(window, None, USAGE_CHANGES):
        change = USAGE_CHANGES[event.kind]
        for block in event.ids:
            if not 0 <= block < len(refs):
                continue
            if change > 0 and refs[block] <= 0:
                born[block] = at_ns or since_ns
                taken += 1
            refs[block] += change
            if refs[block] == 0 and block in born:
                lifetimes.append(max(0, at_ns - born.pop(block)))
                given_back.add(block)
    state = ledger.state
    lifetimes_histogram = Histogram(RESIDENCY_BOUNDS_S)
    lifetimes_histogram.observe(lifetimes)
    return RetainedBlocksView(
        engine=ledger.engine,
        since=timestamp(since_ns),
        until=timestamp(ledger.now_ns),
        is_complete=_is_whole(ledger, since_ns),
        allocated=taken,
        freed=len(lifetimes),
        unfreed=len(born),
        still_cached=sum(state.refs[block] <= 0 and bool(state.hashes[block]) for block in given_back),
        held_blocks=ledger.balance().used,
        held=_by_owner(ledger),
        lifetimes=_buckets(lifetimes_histogram),
        floors=_floor_views(ledger, since_ns),
    )


def _is_whole(ledger: EngineLedger, since_ns: int) -> bool:
    """Whether the ledger has each batch of the window, and knows what was before the first."""
    batches = [batch for batch in ledger.recent if batch.epoch == ledger.epoch]
    if not batches or (batches[0].sequence and batches[0].wall_ns >= since_ns):
        return False
    window = [batch.sequence for batch in batches if batch.wall_ns >= since_ns]
    lost = any(loss.at_ns >= since_ns for loss in ledger.losses)
    return not lost and all(after - before == 1 for before, after in pairwise(window))


def _by_owner(ledger: EngineLedger) -> list[RetainedGroup]:
    state = ledger.state
    groups: dict[tuple[int, str], list[int]] = {}
    for block, (number, part) in enumerate(zip(holders(state), block_parts(state), strict=True)):
        if part not in (PoolPart.FREE, PoolPart.CACHED_IDLE, PoolPart.RESERVED):
            groups.setdefault((number, _reason(ledger, number, block)), []).append(block)
    names = request_names(ledger) | {number: deferral.id for number, deferral in state.deferrals.items()}
    held = []
    for (number, reason), blocks in groups.items():
        record = state.requests.get(number)
        since_ns = min(filter(None, (state.since[block] for block in blocks)), default=0)
        held.append(
            RetainedGroup(
                owner=names.get(number, f"#{number}") if number >= 0 else "",
                state=name_of(Status, record.status) if record is not None else "DETACHED" if number >= 0 else "",
                reason=reason,
                since=timestamp(ledger.wall(since_ns)),
                for_s=round(ledger.age_s(since_ns), 3) if since_ns else 0.0,
                blocks=len(blocks),
                ids=blocks[:MAX_RETAINED_IDS],
            )
        )
    return sorted(held, key=lambda view: (-view.for_s, -view.blocks))


def _reason(ledger: EngineLedger, number: int, block: int) -> str:
    """Return why the request with that number holds a block, empty for one that runs."""
    record = ledger.state.requests.get(number)
    if record is None or record.is_finished:
        return "FREE_DEFERRED" if ledger.state.is_deferred(number, block) else "UNACCOUNTED"
    cause = ledger.cause_of_wait(record)
    return cause.name if cause else ""


def _buckets(lifetimes_histogram: Histogram) -> list[LifetimeBucket]:
    """Return the histogram with a count for each bucket, instead of cumulative counts."""
    counts = [0, *(count for _, count in lifetimes_histogram.buckets)]
    bounds = [None if bound == float("inf") else bound for bound, _ in lifetimes_histogram.buckets]
    return [
        LifetimeBucket(bound, after - before) for bound, (before, after) in zip(bounds, pairwise(counts), strict=True)
    ]


def _floor_views(ledger: EngineLedger, since_ns: int) -> list[IdleFloorView]:
    """Return the blocks that stayed in use at each drain, as far as the points of the window show."""
    floors, before = IdleFloors(), None
    for point in ledger.points:
        if point.at_ns < since_ns:
            continue
        floors.look_at(point, before)
        before = point
    return [IdleFloorView(timestamp(floor.at), round(floor.in_use)) for floor in floors.seen]
