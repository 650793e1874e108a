"""Who holds how much of the pool, for every page, command, finding and metric that states it.

A block counts once, under its most active holder: a request that runs, else one that waits, else one that has ended and
whose free is deferred, else one that has ended without that. Among equally active ones it counts under the first that
came. So the blocks that count under each request, with those under none, add up to the balance of the pool.

Where events were lost, tables, references and owners of some blocks contradict one another until an audit has put them
right. Everything is counted from `block_parts` then, one block after another, so that no two outputs disagree.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from enum import IntEnum
from operator import truth
from typing import NamedTuple

from .engine_state import EngineState
from .records import RequestState


class Activity(IntEnum):
    """What a block counts as by its holder, the least active first."""

    UNACCOUNTED = 0
    FINISHED = 1
    WAITING = 2
    RUNNING = 3


class PoolPart(IntEnum):
    """The parts of the pool. Each block is in one."""

    FREE = 0
    CACHED_IDLE = 1
    RUNNING = 2
    WAITING = 3
    FINISHED = 4
    RESERVED = 5
    UNACCOUNTED = 6


class BlockHolder(NamedTuple):
    """The request that a block counts under, by number."""

    number: int
    activity: Activity


class RequestBlocks(NamedTuple):
    """The blocks of one request. own: held by no other request. shared: held by others too. counted: that count under
    it, which are its own and those shared ones of which it is the most active holder.
    """

    own: int
    shared: int
    counted: int

    @property
    def total(self) -> int:
        """All blocks that it holds."""
        return self.own + self.shared


NO_BLOCKS = RequestBlocks(0, 0, 0)
"""Of a request that holds none."""


def share_of_pool(blocks: int, usable: int) -> float | None:
    """Return blocks as a share of those that requests can have, None for a pool without any."""
    return blocks / usable if usable > 0 else None


def block_parts(state: EngineState) -> bytearray:
    """Return the PoolPart that each block is in."""
    parts = bytearray(map(truth, state.hashes)).translate(bytes([PoolPart.FREE, PoolPart.CACHED_IDLE]).ljust(256))
    parts[: state.reserved] = bytes([PoolPart.RESERVED]) * state.reserved
    # The state has the owners by name, so the other blocks need no check.
    for block in state.unaccounted():
        parts[block] = PoolPart.UNACCOUNTED
    # Liveliest last, so that it is what a shared block shows.
    for deferral in state.deferrals.values():
        for block in deferral.blocks:
            parts[block] = PoolPart.FINISHED
    for part in (PoolPart.WAITING, PoolPart.RUNNING):
        for record in state.requests.values():
            if not record.is_finished and record.is_running == (part == PoolPart.RUNNING):
                for block in record.blocks:
                    parts[block] = part
    return parts


def holder_of(state: EngineState, block: int) -> BlockHolder | None:
    """Return the most active holder of a block, or None if no request is known to hold it."""
    return _most_active(state, block, _holders(state, block))


def without_live_holder(state: EngineState, blocks: Iterable[int]) -> list[int]:
    """Return those of these blocks that no request holds which runs or waits, lowest first."""
    return sorted(
        block for block in blocks if (holder := holder_of(state, block)) is None or holder.activity <= Activity.FINISHED
    )


def holders(state: EngineState) -> list[int]:
    """Return the number of the request that each block counts under, -1 for none."""
    numbers = [-1] * state.total if state.damaged else list(state.owner)
    for block, several in _holders_looked_at(state).items():
        holder = _most_active(state, block, several)
        numbers[block] = -1 if holder is None else holder.number
    return numbers


def blocks_of(state: EngineState, record: RequestState) -> list[int]:
    """Return the blocks that a request holds: those of its table, and those that its table left without a free. Where
    events were lost, also those of its deferral that its table lacks.
    """
    deferral = state.deferrals.get(record.number) if state.damaged else None
    deferred = deferral.blocks.difference(record.blocks) if deferral is not None else ()
    return [*record.blocks, *deferred, *(block for block, former in state.detached.items() if record.number in former)]


def request_blocks(state: EngineState) -> dict[int, RequestBlocks]:
    """Return how many blocks each request holds, by its number. O(requests + references to shared blocks)."""
    looked_at = _holders_looked_at(state)
    own: Counter[int] = Counter()
    shared: Counter[int] = Counter()
    counted: Counter[int] = Counter()
    for block, several in looked_at.items():
        (shared if len(several) > 1 else own).update(several)
        if (first := _most_active(state, block, several)) is not None:
            counted[first.number] += 1
    for number, record in () if state.damaged else state.requests.items():
        alone = len(record.blocks) - len(looked_at.keys() & record.blocks)
        own[number] += alone
        counted[number] += alone
    return {number: RequestBlocks(own[number], shared[number], counted[number]) for number in state.requests}


def _holders(state: EngineState, block: int) -> list[int]:
    return [*state.owners(block), *state.detached.get(block, ())]


def _holders_looked_at(state: EngineState) -> dict[int, list[int]]:
    """Return the holders of each block that may have several, and where events were lost of each block in use."""
    if not state.damaged:
        return {block: _holders(state, block) for block in state.more.keys() | state.detached.keys()}
    found: dict[int, list[int]] = defaultdict(list)
    for number, record in state.requests.items():
        for block in set(blocks_of(state, record)):
            found[block].append(number)
    parts = block_parts(state)
    return {
        block: several for block, several in found.items() if parts[block] not in (PoolPart.FREE, PoolPart.CACHED_IDLE)
    }


def _most_active(state: EngineState, block: int, numbers: Iterable[int]) -> BlockHolder | None:
    found = [BlockHolder(number, _activity(state, number, block)) for number in numbers]
    return max(found, key=lambda holder: (holder.activity, -holder.number), default=None)


def _activity(state: EngineState, number: int, block: int) -> Activity:
    record = state.requests.get(number)
    if record is not None and not record.is_finished:
        return Activity.RUNNING if record.is_running else Activity.WAITING
    return Activity.FINISHED if state.is_deferred(number, block) else Activity.UNACCOUNTED
