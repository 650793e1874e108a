"""The conservation law: total = free + cached-idle + running + waiting + finished + reserved + UNACCOUNTED.

Each block counts once. One with several owners counts under the liveliest: running, else waiting, else finished. A
finished owner holds a block only by a deferral that was announced. A block in use without a legitimate owner is
UNACCOUNTED. References beyond the legitimate ones are `unexplained_references`, on whichever block they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from ..contract.kinds import FIRST_FINISHED, Kind, Status
from ..contract.wire import Batch
from .engine_state import EngineState
from .pool_account import PoolPart, block_parts, share_of_pool

RUNNING_STATUS = int(Status.RUNNING)
_STEP_KINDS = frozenset(
    int(kind) for kind in (Kind.CLOCK, Kind.PROGRESSED, Kind.STEP_LAUNCHED, Kind.STEP_COMPLETED, Kind.HEARTBEAT)
)
_MOST_EXAMINED_BYTES = 10 * 20
"""Of a batch's events. A larger one has others than these as a rule."""
_UNACCOUNTED, _FINISHED, _WAITING, _RUNNING = range(4)


class Balance(msgspec.Struct, frozen=True):
    """The pool at one moment, in blocks. `free` does not include `cached_idle` here."""

    total: int
    free: int
    cached_idle: int
    running: int
    waiting: int
    finished: int
    reserved: int
    unaccounted: int
    unexplained_references: int

    @property
    def usable(self) -> int:
        """Blocks that requests can have."""
        return self.total - self.reserved

    @property
    def used(self) -> int:
        """Blocks in use, whoever holds them."""
        return self.usable - self.free - self.cached_idle

    @property
    def usage(self) -> float | None:
        """Blocks in use as a share of the usable ones, None for a pool without any."""
        return self.share(self.used)

    def share(self, blocks: int) -> float | None:
        """Return blocks as a share of the usable ones, None for a pool without any."""
        return share_of_pool(blocks, self.usable)

    @property
    def difference(self) -> int:
        """The sum of the parts minus the total: 0 as long as every block counts exactly once."""
        parts = self.free + self.cached_idle + self.running + self.waiting + self.finished
        return parts + self.reserved + self.unaccounted - self.total

    @property
    def holds(self) -> bool:
        """Whether the parts add up to the total."""
        return self.difference == 0


def keeps_balance(state: EngineState, batch: Batch) -> bool:
    """Whether folding the batch leaves the balance of `state` as it is: few events, none of them about a block or the
    place of a request.
    """
    if len(batch.runs) > _MOST_EXAMINED_BYTES or state.pending_drops:
        return False
    return _STEP_KINDS.issuperset(batch.runs.cast("i").tolist()[::5])


def balance_of(state: EngineState, unexplained: Mapping[int, int] | None = None) -> Balance:
    """Return the balance of `state`. O(requests + shared blocks + blocks of requests that do not run), and O(blocks)
    where events were lost.

    unexplained: its unexplained references, where they are known.
    """
    references = sum((state.unexplained_references() if unexplained is None else unexplained).values())
    if state.damaged:
        return _balance_by_block(state, references)
    counts = [0, 0, 0, 0]
    rank_of: dict[int, int] = {}
    looked_at = set(state.detached)  # shared blocks of which not all owners run, or may not
    for record in state.requests.values():
        status = record.status
        if status == RUNNING_STATUS:
            rank_of[record.number] = _RUNNING
            counts[_RUNNING] += len(record.blocks)
        elif record.blocks:
            looked_at.update(record.blocks)
            if status >= FIRST_FINISHED:
                deferral = state.deferrals.get(record.number)
                deferred = len(deferral.blocks.intersection(record.blocks)) if deferral else 0
                counts[_FINISHED] += deferred
                counts[_UNACCOUNTED] += len(record.blocks) - deferred
            else:
                rank_of[record.number] = _WAITING
                counts[_WAITING] += len(record.blocks)
    for block, former in state.detached.items():
        for number in former:
            counts[_FINISHED if state.is_deferred(number, block) else _UNACCOUNTED] += 1
    # Every holder has counted its shared blocks; the liveliest keeps the count. A prefix may have thousands of owners.
    more = state.more
    counts[_RUNNING] -= sum(map(len, more.values()))
    shared = more.keys() & looked_at
    counts[_RUNNING] += sum(len(more[block]) for block in shared)
    for block in shared | (state.detached.keys() & looked_at):
        owners = state.owners(block)
        ranks = [*filter(None, map(rank_of.get, owners))]
        ended = [number for number in owners if number not in rank_of] if len(ranks) < len(owners) else []
        ended += state.detached.get(block, ())
        ranks += [_FINISHED if state.is_deferred(number, block) else _UNACCOUNTED for number in ended]
        for rank in set(ranks):
            counts[rank] -= ranks.count(rank)
        counts[max(ranks)] += 1
    counts[_UNACCOUNTED] += sum(
        state.refs[block] > 0 and state.owner[block] < 0 and block not in state.detached for block in state.orphans
    )
    return Balance(
        total=state.total,
        free=state.free - state.cached_idle,
        cached_idle=state.cached_idle,
        running=counts[_RUNNING],
        waiting=counts[_WAITING],
        finished=counts[_FINISHED],
        reserved=state.reserved,
        unaccounted=counts[_UNACCOUNTED],
        unexplained_references=references,
    )


def _balance_by_block(state: EngineState, references: int) -> Balance:
    parts = Counter(block_parts(state))
    return Balance(
        total=state.total,
        free=parts[PoolPart.FREE],
        cached_idle=parts[PoolPart.CACHED_IDLE],
        running=parts[PoolPart.RUNNING],
        waiting=parts[PoolPart.WAITING],
        finished=parts[PoolPart.FINISHED],
        reserved=parts[PoolPart.RESERVED],
        unaccounted=parts[PoolPart.UNACCOUNTED],
        unexplained_references=references,
    )
