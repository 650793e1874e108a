"""Who holds how much of the pool, for every page, command, finding and metric that states it.

A block counts once, under its most active holder: a request that runs, else one that waits, else one that has ended and
whose free is deferred, else one that has ended without that. Among equally active ones it counts under the first that
came. So the blocks that count under each request, with those under none, add up to the balance of the pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

from .engine_state import EngineState
from .records import RequestState


class Activity(IntEnum):
    """What a block counts as by its holder, the least active first."""

    UNACCOUNTED = 0
    FINISHED = 1
    WAITING = 2
    RUNNING = 3


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


def holder_of(state: EngineState, block: int) -> BlockHolder | None:
    """Return the most active holder of a block, or None if no request is known to hold it."""
    holders = [BlockHolder(number, _activity(state, number, block)) for number in _holders(state, block)]
    return max(holders, key=lambda holder: (holder.activity, -holder.number), default=None)


def without_live_holder(state: EngineState, blocks: Iterable[int]) -> list[int]:
    """Return those of these blocks that no request holds which runs or waits, lowest first."""
    return sorted(
        block for block in blocks if (holder := holder_of(state, block)) is None or holder.activity <= Activity.FINISHED
    )


def holders(state: EngineState) -> list[int]:
    """Return the number of the request that each block counts under, -1 for none."""
    numbers = list(state.owner)
    for block in state.more.keys() | state.detached.keys():
        holder = holder_of(state, block)
        numbers[block] = -1 if holder is None else holder.number
    return numbers


def blocks_of(state: EngineState, record: RequestState) -> list[int]:
    """Return the blocks that a request holds: those of its table, and those that its table left without a free."""
    return [*record.blocks, *(block for block, former in state.detached.items() if record.number in former)]


def request_blocks(state: EngineState) -> dict[int, RequestBlocks]:
    """Return how many blocks each request holds, by its number. O(requests + references to shared blocks)."""
    several = state.more.keys() | state.detached.keys()
    own: Counter[int] = Counter()
    shared: Counter[int] = Counter()
    counted: Counter[int] = Counter()
    for block in several:
        holders = _holders(state, block)
        (shared if len(holders) > 1 else own).update(holders)
        if (first := holder_of(state, block)) is not None:
            counted[first.number] += 1
    for number, record in state.requests.items():
        alone = len(record.blocks) - len(several.intersection(record.blocks))
        own[number] += alone
        counted[number] += alone
    return {
        number: RequestBlocks(own[number], shared[number], counted[number]) for number in own.keys() | shared.keys()
    }


def _holders(state: EngineState, block: int) -> list[int]:
    return [*state.owners(block), *state.detached.get(block, ())]


def _activity(state: EngineState, number: int, block: int) -> Activity:
    record = state.requests.get(number)
    if record is not None and not record.is_finished:
        return Activity.RUNNING if record.is_running else Activity.WAITING
    return Activity.FINISHED if state.is_deferred(number, block) else Activity.UNACCOUNTED
