"""The holders of a block: references, owners and the tables that name it, also where the engine breaks its own rules.

After every event, while no event was lost:

    A block's owners are the requests whose tables name it, once for each entry.
    It has at least as many references as owners and former owners. Those in `orphans` may have more.

An engine may free a block that another request holds. The block is free then, and the request is no owner any more:
`stale` remembers that the engine's table still names it. It may also drop a table without a free: an audit shows that,
and `dropped` remembers which request had the blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..base import limits
from ..contract.kinds import FIRST_FINISHED
from ..contract.wire import PINS
from .engine_state import EngineState
from .records import AnomalyKind, DroppedTable, RequestState

NAMED_OWNERS: Final = 8
"""Owners of a block that an anomaly names."""


def request_record(state: EngineState, number: int) -> RequestState:
    """Return the request's record. One that never arrived is an anomaly and is named after its number."""
    record = state.requests.get(number)
    if record is None:
        record = state.requests[number] = RequestState(number, f"#{number}", since_ns=state.now_ns)
        record.blocks, record.waited_ns = [], {}
        state.anomaly(AnomalyKind.NEVER_ARRIVED, -1, number, "")
    return record


def end_if_over(state: EngineState, record: RequestState) -> None:
    """Forget a finished request that holds no block any more."""
    if record.status >= FIRST_FINISHED and not record.blocks and state.requests.pop(record.number, None) is not None:
        state.news.ended.append(record)


def owner_names(state: EngineState, block: int, numbers: Sequence[int] | None = None) -> str:
    """Join the ids of these requests, or of the block's owners, for an anomaly's detail: the first NAMED_OWNERS, or
    "no request".
    """
    if numbers is None:
        numbers = state.owners(block)
    shown = numbers[:NAMED_OWNERS]
    names = [state.requests[n].id if n in state.requests else f"#{n}" for n in shown]
    others = len(numbers) - len(shown)
    return ", ".join([*names, f"{others:,} more"] if others else names) or "no request"


# ---------------------------------------------------------------- one holder more or less


def add_owner(state: EngineState, block: int, number: int) -> None:
    """Add an owner to a block. Its reference and the entry in the request's table are the caller's."""
    if state.owner[block] < 0:
        state.owner[block] = number
    elif not keep_holder(state, state.more.setdefault(block, []), block, number):
        drop_later(state, number, [block], 1)


def keep_holder(state: EngineState, holders: list[int], block: int, number: int) -> bool:
    """Add a holder of a block, unless it has as many as are kept, since each release searches them. Returns whether it
    was added.
    """
    if len(holders) < limits.BLOCK_HOLDERS:
        holders.append(number)
        return True
    state.anomaly(AnomalyKind.TOO_MANY_HOLDERS, block, number, f"{limits.BLOCK_HOLDERS:,} are kept by number")
    state.orphans.add(block)
    return False


def remove_owner(state: EngineState, block: int, number: int) -> bool:
    """Remove an owner of a block, once, and return whether it was one."""
    others = state.more.get(block)
    if state.owner[block] == number:
        state.owner[block] = others.pop(0) if others else -1
    else:
        try:
            (others or []).remove(number)
        except ValueError:
            return False
    if others is not None and not others:
        del state.more[block]
    return True


def drop_reference(state: EngineState, block: int) -> None:
    """Drop a reference, if there is one. With the last one the block becomes free or cached-idle."""
    if not state.refs[block]:
        return
    state.refs[block] -= 1
    if state.refs[block]:
        return
    if block in state.orphans:
        leave_orphans(state, block)
    state.used -= 1
    samples = state.samples
    samples.used_since.append(state.since[block])
    state.since[block] = state.now_ns
    if state.hashes[block]:
        state.cached_idle += 1
        samples.kept.append(1)
        samples.kept_ns.append(state.now_ns)
    else:
        samples.born.append(state.born[block])
        samples.died_ns.append(state.now_ns)


def lose_reference(state: EngineState, block: int) -> None:
    """Drop a reference that none of the block's known holders gave back."""
    drop_reference(state, block)
    give_up_holders(state, block)


def give_up_holders(state: EngineState, block: int) -> None:
    """Leave a block no more holders than references. Owners that may not hold it go first, then those that the audit
    under way has not read out yet, and the last to come; after the owners former owners and pins.
    """
    surplus = state.known_references(block) - state.refs[block]
    if surplus <= 0:
        return
    unread = state.audit_cycle.unseen if state.audit_cycle is not None else ()
    owners = sorted(state.owners(block), key=lambda number: (not state.is_legitimate(number, block), number in unread))
    kept = max(len(owners) - surplus, 0)
    gone = owners[kept:]
    state.owner[block] = owners[0] if kept else -1
    state.more.pop(block, None)
    if kept > 1:
        state.more[block] = owners[1:kept]
    if gone and not state.damaged:  # else they may have freed it in the gap
        stale = state.stale.setdefault(block, [])
        stale += [number for number in dict.fromkeys(gone) if number not in stale]
    former = state.detached.get(block, [])
    ended = [former.pop() for _ in range(min(surplus - len(gone), len(former)))]
    if not former:
        state.detached.pop(block, None)
    if PINS not in former:
        state.pinned.pop(block, None)
    for number in gone:
        drop_later(state, number, [block], 1)
    for number in (*gone, *ended):
        _end_deferral_of(state, number, block)


def forget_stale(state: EngineState, block: int, number: int) -> bool:
    """Note that the request's table no longer names a block that another freed. Returns whether it did."""
    named = state.stale.get(block, [])
    if number not in named:
        return False
    named.remove(number)
    if not named:
        del state.stale[block]
    return True


def _end_deferral_of(state: EngineState, number: int, block: int) -> None:
    """Forget that a request may keep a block that it does not hold any more."""
    deferral = state.deferrals.get(number)
    if deferral is None or number in state.owners(block) or number in state.detached.get(block, ()):
        return
    deferral.blocks.discard(block)
    deferral.changed_at = state.position
    if not deferral.blocks:
        del state.deferrals[number]


# ---------------------------------------------------------------- tables


def drop_later(state: EngineState, number: int, blocks: list[int], entries: int) -> None:
    """Note blocks that have left a request's table, and how many entries of it they were."""
    pending = state.pending_drops.get(number)
    if pending is None:
        state.pending_drops[number] = (blocks, entries)
    else:
        pending[0].extend(blocks)
        state.pending_drops[number] = (pending[0], pending[1] + entries)


def drop_from_tables(state: EngineState) -> None:
    """Remove from the tables what consecutive events released or detached: one pass over each table for all of them."""
    for number, (blocks, entries) in state.pending_drops.items():
        record = state.requests.get(number)
        if record is not None:
            record.peak_blocks = max(record.peak_blocks, len(record.blocks))
            record.blocks = _table_without(state, record, blocks, entries)
            end_if_over(state, record)
    state.pending_drops.clear()


def _table_without(state: EngineState, record: RequestState, blocks: list[int], entries: int) -> list[int]:
    """Return the request's table without these blocks, where as many entries have left it."""
    if entries == len(record.blocks):
        return []
    gone = set(blocks)
    kept = [block for block in record.blocks if block not in gone]
    if len(kept) + entries == len(record.blocks):
        return kept
    # It names a block more than once, or these are not all its own. It keeps its entries as an owner, the last ones.
    left = {block: state.owners(block).count(record.number) for block in gone}
    kept = []
    for block in reversed(record.blocks):
        if left.get(block, 1) > 0:
            kept.append(block)
            if block in left:
                left[block] -= 1
    return kept[::-1]


# ---------------------------------------------------------------- references without an owner


def lose_entry(state: EngineState, record: RequestState, block: int, since_ns: int) -> None:
    """Note that the engine's table of the request lost a block without a free. Its reference may be that of a request
    from which another freed the block.
    """
    remove_owner(state, block, record.number)
    _end_deferral_of(state, record.number, block)
    if state.refs[block] > state.known_references(block):
        state.orphans.add(block)
        dropped = state.dropped.get(record.number)
        if dropped is None:
            dropped = DroppedTable(record.number, record.id, since_ns, state.position, set())
            state.dropped[record.number] = dropped
        dropped.blocks.add(block)


def leave_orphans(state: EngineState, block: int) -> None:
    """Note that a block has no references but those of its holders any more."""
    state.orphans.discard(block)
    for number in [number for number, dropped in state.dropped.items() if block in dropped.blocks]:
        forget_dropped(state, number, block)


def forget_dropped(state: EngineState, number: int, block: int) -> None:
    """Forget that the request's table lost the block."""
    dropped = state.dropped[number]
    dropped.blocks.discard(block)
    if not dropped.blocks:
        del state.dropped[number]
