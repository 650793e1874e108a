"""Fold the engine's audits: compare its own tables with the state, and repair the state after a loss.

The engine reads out its own tables in slices between steps (AUDIT_BEGIN … AUDIT_END). While the state is complete each
difference is reported once, and the state follows the engine, which goes on by its own tables: blocks that left a table
without a free are `dropped` references, an unfinished request that the engine no longer has is in none of its queues,
and all else is an anomaly. While the state is damaged by lost events, the tables are adopted without a comparison until
one cycle is complete.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from ..contract.kinds import CAUSE_OF, Cause, Kind, Status
from ..contract.wire import PINS
from .engine_state import EngineState
from .holders import (
    add_owner,
    drop_from_tables,
    end_if_over,
    forget_stale,
    give_up_holders,
    leave_orphans,
    lose_entry,
)
from .records import UNKNOWN_POSITION, AnomalyKind, AuditCycle, RequestState

UNKNOWN_HASH: Final = 1
"""Stands for a hash that is known to exist but whose value was lost with the events that reported it."""


def fold_audit(
    state: EngineState,
    kind: int,
    group: int,
    number: int,
    args: list[int],
    ids: list[int],
    texts: Mapping[int, str],
) -> None:
    """Fold one of the AUDIT kinds into the state."""
    if kind == Kind.AUDIT_BEGIN:
        # Requests that only the front end knows are not in the scheduler's tables yet.
        known = {n for n, record in state.requests.items() if record.status != Status.RECEIVED}
        state.audit_cycle = AuditCycle(state.now_ns, known)
    elif state.audit_cycle is None:
        return  # the state joined in the middle of a cycle; the next one is complete
    elif kind == Kind.AUDIT_BLOCKS:
        _compare_blocks(state, args[0], ids)
    elif kind == Kind.AUDIT_REQUEST:
        _audit_request(state, state.audit_cycle, group, number, args, ids, texts)
    else:
        cycle, state.audit_cycle = state.audit_cycle, None
        _end_audit(state, cycle, *args[1:5])


def _compare_blocks(state: EngineState, first: int, packed: list[int]) -> None:
    """Compare a slice of the block table. Where it differs the state follows, since it decides the engine's fate."""
    if first >= 0 and packed == _expected(state, first, len(packed)):
        return
    for block, value in enumerate(packed, first):
        if not 0 <= block < state.total:
            state.anomaly(AnomalyKind.OUT_OF_RANGE, block, -1, f"the pool has {state.total}")
            return
        theirs, in_queue, hashed = value >> 2, bool(value & 2), bool(value & 1)
        ours, refs = state.refs[block], max(theirs, 0)
        if refs != ours or hashed != bool(state.hashes[block]):
            detail = f"the engine has reference count {theirs}, {'a' if hashed else 'no'} hash; by the events {ours}"
            state.anomaly(AnomalyKind.AUDITED_BLOCK, block, state.owner[block], detail)
            _adopt_block(state, block, refs, hashed)
        if theirs >= 0 and (theirs == 0) == in_queue:
            state.told.pop(block, None)
        elif state.told.get(block) != value:
            state.told[block] = value
            detail = f"reference count {theirs} and {'in' if in_queue else 'not in'} the free queue"
            state.anomaly(AnomalyKind.AUDITED_FREE_QUEUE, block, state.owner[block], detail)


def _expected(state: EngineState, first: int, count: int) -> list[int]:
    """Pack a slice of the state's blocks as the engine packs its own."""
    refs, hashes = state.refs[first : first + count], state.hashes[first : first + count]
    if not (any(refs) or any(hashes)):
        return [2] * len(refs)  # as most of a large pool, which takes a tenth of the time
    return [(ours << 2 or 2) + (value != 0) for ours, value in zip(refs, hashes, strict=True)]


def _adopt_block(state: EngineState, block: int, refs: int, hashed: bool) -> None:
    state.residency_samples = None  # the reader must count the pool again
    state.places.pool = state.position
    was_used, was_cached = state.refs[block] > 0, bool(state.hashes[block]) and state.refs[block] <= 0
    state.refs[block] = refs
    if hashed != bool(state.hashes[block]):
        state.hashes[block] = UNKNOWN_HASH if hashed else 0
    state.used += (refs > 0) - was_used
    state.cached_idle += (hashed and refs <= 0) - was_cached
    if refs > state.known_references(block):
        state.orphans.add(block)
    elif not state.damaged:  # else the owners, too, are still to be adopted
        leave_orphans(state, block)
        give_up_holders(state, block)


def _audit_request(
    state: EngineState,
    cycle: AuditCycle,
    group: int,
    number: int,
    args: list[int],
    ids: list[int],
    texts: Mapping[int, str],
) -> None:
    detached = args[6]
    if not detached:
        if group:
            cycle.others.setdefault(number, []).extend(ids)
            return
        ids = ids + cycle.others.pop(number, [])
        cycle.unseen.discard(number)
        cycle.seen += 1
    record = state.requests.get(number)
    is_same = record is not None and record.blocks == ids and not state.stale
    if is_same and not (state.damaged or detached):
        return
    if ids and not 0 <= min(ids) <= max(ids) < state.total:
        state.anomaly(AnomalyKind.OUT_OF_RANGE, max(ids), number, f"the pool has {state.total}")
    elif state.damaged:
        _adopt_request(state, number, args, ids, texts)
    elif not detached:
        if record is None:
            state.anomaly(AnomalyKind.NOT_IN_LEDGER, -1, number, texts.get(number, ""))
            record = _adopt_status(state, number, args, texts)
        _compare_table(state, record, ids, cycle.began_ns)


def _compare_table(state: EngineState, record: RequestState, ids: list[int], began_ns: int) -> None:
    """Compare the engine's table of a request with the state's, which follows it."""
    number, ours, theirs = record.number, Counter(record.blocks), Counter(ids)
    record.peak_blocks = max(record.peak_blocks, len(record.blocks))
    record.blocks = [*((ours & theirs).elements())]
    stale = {block for block, named in state.stale.items() if number in named}
    for block in stale:
        forget_stale(state, block, number)
    for block in (ours - theirs).elements():
        lose_entry(state, record, block, began_ns)
        _restore_stale(state, block)
    detail = f"{len(ids)} blocks in the engine's table, {sum(ours.values())} by the events"
    for block in (theirs - Counter(record.blocks)).elements():
        if block not in stale:  # else it was reported when another freed it
            state.anomaly(AnomalyKind.AUDITED_TABLE, block, number, detail)
        add_owner(state, block, number)
        record.blocks.append(block)
        give_up_holders(state, block)
    place = {block: index for index, block in enumerate(ids)}
    record.blocks.sort(key=lambda block: place.get(block, len(ids)))
    end_if_over(state, record)


def _restore_stale(state: EngineState, block: int) -> None:
    """Take it back that another freed the block from these requests, as far as its references are without an owner."""
    while state.refs[block] > state.known_references(block) and block in state.stale:
        number = state.stale[block][0]
        forget_stale(state, block, number)
        if (record := state.requests.get(number)) is not None:
            add_owner(state, block, number)
            record.blocks.append(block)
    if state.refs[block] <= state.known_references(block):
        leave_orphans(state, block)


def _adopt_request(state: EngineState, number: int, args: list[int], ids: list[int], texts: Mapping[int, str]) -> None:
    holder, fence, lease_deadline_ns, detached = args[3:7]
    known = state.requests.get(number)
    name = texts.get(number, known.id if known is not None else f"#{number}")
    if holder:
        state.defer(number, name, holder, fence, lease_deadline_ns, ids)
        state.deferrals[number].id = name
    if detached:
        for block in ids:
            if number not in state.detached.setdefault(block, []):
                state.detached[block].append(number)
            if number == PINS:
                state.pinned.setdefault(block, state.now_ns)  # its own time was lost
        return
    _adopt_status(state, number, args, texts).blocks = ids


def _adopt_status(state: EngineState, number: int, args: list[int], texts: Mapping[int, str]) -> RequestState:
    """Return the request's record, with status and progress as the engine has them."""
    status, computed, outputs = args[:3]
    record = state.requests.get(number)
    if record is None:
        record = RequestState(number, f"#{number}", since_ns=state.now_ns, blocks=[], waited_ns={})
        state.requests[number] = record
    record.id = texts.get(number, record.id)  # its arrival may have been lost
    if record.status != status:  # the event with the time and the cause was lost
        record.cause, record.since_ns, record.stalled_ns = CAUSE_OF.get(status, Cause.NONE), state.now_ns, 0
        record.since_at = state.position
    record.status, record.computed_tokens, record.output_tokens = status, computed, outputs
    return record


def _end_audit(state: EngineState, cycle: AuditCycle, free: int, cached_idle: int, used: int, requests: int) -> None:
    state.audit_cycles += 1
    state.audited_ns, state.places.audited = cycle.began_ns, state.position
    if state.damaged:
        _repair(state, cycle)
        state.damaged = False
        state.lost_ns, state.lost_at = 0, UNKNOWN_POSITION
        state.places.moved = state.places.pool = state.position
        state.check(free, cached_idle, used)
        return
    if cycle.seen != requests:
        state.anomaly(AnomalyKind.AUDITED_COUNT, -1, -1, f"{requests} announced, {cycle.seen} read out")
    for number in cycle.unseen:
        record = state.requests.get(number)
        if record is None or record.is_finished or record.not_queued_ns:
            continue
        if record.progressed_ns < cycle.began_ns:  # else it is still in a queue
            record.not_queued_ns, record.not_queued_at = state.now_ns, state.position
    named = {number for number in state.requests if number not in cycle.unseen}
    state.stale = {block: kept for block, old in state.stale.items() if (kept := [n for n in old if n in named])}


def _repair(state: EngineState, cycle: AuditCycle) -> None:
    """Adopt a complete cycle read since the loss: forget what it did not name, and derive owners from the tables."""
    for number in cycle.unseen:
        state.requests.pop(number, None)
    for record in list(state.requests.values()):
        # The scheduler has admitted all of them since: their arrival was lost, and every event that followed.
        if record.status == Status.RECEIVED and record.received_ns < cycle.began_ns:
            del state.requests[record.number]
    state.owner[:] = [-1] * state.total
    state.more.clear()
    for record in state.requests.values():
        for block in record.blocks:
            if state.owner[block] < 0:
                state.owner[block] = record.number
            else:
                state.more.setdefault(block, []).append(record.number)
    state.detached = {b: n for b, n in state.detached.items() if state.refs[b] > len(state.owners(b))}
    for block in range(state.total):
        give_up_holders(state, block)
    drop_from_tables(state)
    for number, deferral in list(state.deferrals.items()):
        finished = state.requests.get(number)
        in_table = finished.blocks if finished is not None and finished.is_finished else []
        deferral.blocks.intersection_update(
            {*in_table, *(block for block in deferral.blocks if number in state.detached.get(block, ()))}
        )
        if not deferral.blocks:
            del state.deferrals[number]
    state.pinned = {b: since for b, since in state.pinned.items() if PINS in state.detached.get(b, ())}
    state.rebuild_fences()
    state.orphans = {b for b in range(state.total) if state.refs[b] > state.known_references(b)}
    for number, dropped in list(state.dropped.items()):
        dropped.blocks &= state.orphans
        if not dropped.blocks:
            del state.dropped[number]
    state.recount()
