"""Fold the events of blocks: allocated, cached, reused, released, and the rarer ones.

Each handler takes the state, the KV group, the request's number, the blocks (known to be in the pool), the event's
arguments and the residency samples. ALLOCATED, CACHED and RELEASED are the hot path: a busy engine emits 100,000
blocks of them a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ..base import limits
from ..contract.kinds import FIRST_FINISHED, Holder, Kind, Release
from ..contract.wire import PINS
from .engine_state import EngineState
from .records import AnomalyKind, RequestState, ResidencySamples

CONNECTOR_ENDS: Final = frozenset((int(Release.TRANSFER_DONE), int(Release.LEASE_EXPIRED)))
"""Reasons after which a connector keeps none of the request's blocks: the engine leaves what this release leaves."""

BlockHandler = Callable[[EngineState, int, int, list[int], list[int], ResidencySamples], None]

# ---------------------------------------------------------------- the hot path


def _fold_allocated(
    state: EngineState,
    _group: int,
    number: int,
    blocks: list[int],
    evicted_hashes: list[int],
    samples: ResidencySamples,
) -> None:
    refs, owner, hashes, since, born = state.columns
    now, count = state.now_ns, len(blocks)
    taken, evicted = count, 0
    if state.damaged:
        _free_lost_releases(state, blocks)
    for block in blocks:
        if refs[block] > 0:  # one free too many leaves a count below 0, which an audit adopts: no request holds it
            taken -= 1
            _allocate_held(state, block, number)
            continue
        if owner[block] >= 0:  # another freed it, and its owner's table still names it
            state.anomaly(AnomalyKind.ALLOCATED_WHILE_HELD, block, number, f"held by {state.owner_names(block)}")
        if hashes[block]:
            hashes[block] = 0
            evicted += 1
            samples.evicted_since.append(since[block])
            samples.evicted_ns.append(now)
            samples.born.append(born[block])
            samples.died_ns.append(now)
        refs[block] = 1
        owner[block] = number
        since[block] = born[block] = now
    samples.taken.append(taken)
    samples.taken_ns.append(now)
    state.totals.allocated += count
    if evicted:
        state.cached_idle -= evicted
        state.totals.evicted += evicted
    if state.early:
        _check_fences(state, blocks, number)
    state.used += taken
    record = state.requests.get(number) or request_record(state, number)
    record.blocks += blocks
    if evicted_hashes and state.evictions and record.first_token_ns:
        state.evictions.made += len(evicted_hashes)
    elif evicted_hashes and state.evictions:
        unused = state.free - state.cached_idle  # for a prompt, already counted
        before = state.cached_idle + len(evicted_hashes)
        state.evictions.pool = state.total
        state.evictions.evict(record, now, evicted_hashes, before, unused, state.position)


def _fold_cached(
    state: EngineState, group: int, number: int, blocks: list[int], new_hashes: list[int], samples: ResidencySamples
) -> None:
    if len(new_hashes) != len(blocks):
        raise ValueError(f"{len(blocks)} blocks cached under {len(new_hashes)} hashes")
    if 0 in new_hashes:
        raise ValueError("a block cached under hash 0, which stands for none")
    refs, _, hashes, _, _ = state.columns
    for block, value in zip(blocks, new_hashes, strict=False):
        if not refs[block] and not hashes[block]:  # an unused block gained content
            state.cached_idle += 1
            samples.kept.append(1)
            samples.kept_ns.append(state.since[block])
        hashes[block] = value
    state.totals.cached += len(blocks)
    evictions, record = state.evictions, state.requests.get(number)
    if evictions and evictions.gone and not evictions.gone.keys().isdisjoint(new_hashes):
        missed = record is not None and not record.first_token_ns and not record.preemptions
        prompt_blocks = _prompt_blocks(state, record) if record is not None and missed else 0
        evictions.store(new_hashes, state.position, number, prompt_blocks)
    if record is None or (record.first_token_ns and not record.preemptions):
        return
    if group:
        record.cached_by_group[group] = record.cached_by_group.get(group, 0) + len(blocks)
    else:  # the first group counts each token once
        record.cached_blocks += len(blocks)
        state.prompt_blocks_cached += len(blocks)


def _prompt_blocks(state: EngineState, record: RequestState) -> int:
    """Return the blocks that the prompt takes, in all groups if the engine reported that."""
    return max(record.blocks_to_admit, -(-record.prompt_tokens // max(state.block_size, 1)))


def _fold_released(
    state: EngineState, _group: int, number: int, blocks: list[int], args: list[int], samples: ResidencySamples
) -> None:
    refs, owner, hashes, since, born = state.columns
    now = state.now_ns
    freed = kept = 0
    for block in blocks:
        if refs[block] != 1 or owner[block] != number:
            _release_shared(state, block, number)
            continue
        refs[block] = 0
        owner[block] = -1
        freed += 1
        samples.used_since.append(since[block])
        since[block] = now
        if hashes[block]:
            kept += 1
        else:
            samples.born.append(born[block])
            samples.died_ns.append(now)
    samples.kept.append(kept)
    samples.kept_ns.append(now)
    state.used -= freed
    state.cached_idle += kept
    reason, released = args[0], state.totals.released
    released[reason] = released.get(reason, 0) + len(blocks)
    if state.deferrals:
        ended = [*blocks, *state.sending_blocks(number)] if reason in CONNECTOR_ENDS else blocks
        state.undefer(number, ended, expired=reason == Release.LEASE_EXPIRED)
    _drop_later(state, number, blocks, freed)


def _fold_reused(
    state: EngineState, _group: int, number: int, blocks: list[int], _args: list[int], samples: ResidencySamples
) -> None:
    refs, hashes, now = state.refs, state.hashes, state.now_ns
    used = hit = 0
    for block in blocks:
        if refs[block] > 0:
            _add_owner(state, block, number)
            continue
        if hashes[block]:
            hit += 1
            samples.hit_since.append(state.since[block])
            samples.hit_ns.append(now)
        else:
            state.anomaly(AnomalyKind.HIT_WITHOUT_HASH, block, number, "")
        refs[block] = 1
        state.owner[block] = number
        state.since[block] = now
        used += 1
    samples.taken.append(used)
    samples.taken_ns.append(now)
    state.used += used
    state.cached_idle -= hit
    state.totals.reused += len(blocks)
    record = state.requests.get(number) or request_record(state, number)
    record.blocks += blocks
    record.reused_blocks += len(blocks)


# ---------------------------------------------------------------- the rarer kinds


def _fold_evicted(
    state: EngineState, _group: int, _number: int, blocks: list[int], _args: list[int], samples: ResidencySamples
) -> None:
    for block in blocks:
        if not state.hashes[block]:
            continue
        state.hashes[block] = 0
        state.totals.evicted += 1
        if not state.refs[block]:
            state.cached_idle -= 1
            samples.evicted_since.append(state.since[block])
            samples.evicted_ns.append(state.now_ns)
            samples.born.append(state.born[block])
            samples.died_ns.append(state.now_ns)


def _fold_detached(
    state: EngineState, _group: int, number: int, blocks: list[int], _args: list[int], _samples: ResidencySamples
) -> None:
    for block in blocks:
        if not _remove_owner(state, block, number):
            state.anomaly(AnomalyKind.DETACHED_FROM_ANOTHER, block, number, "")
        _keep_holder(state, state.detached.setdefault(block, []), block, number)
    if number not in state.requests:
        state.undefer(number, blocks)
    _drop_later(state, number, blocks, 0)


def _fold_free_deferred(
    state: EngineState, _group: int, number: int, blocks: list[int], args: list[int], _samples: ResidencySamples
) -> None:
    # A finished request whose blocks were all detached just now is among the ended ones.
    known = (state.requests.get(number), *reversed(state.news.ended))
    name = next((record.id for record in known if record is not None and record.number == number), f"#{number}")
    state.defer(number, name, args[0], args[1], args[2], blocks)


def _fold_reclaimed(
    state: EngineState, _group: int, number: int, blocks: list[int], args: list[int], _samples: ResidencySamples
) -> None:
    for block in blocks:
        former = state.detached.get(block, [])
        released = next((holder for holder in former if holder != PINS), PINS)  # a pin ends with its own event
        if released == PINS:
            state.anomaly(AnomalyKind.NEVER_DETACHED, block, number, "")
            continue
        former.remove(released)
        _end_deferral(state, released, block)
        if not former:
            del state.detached[block]
        _drop_reference(state, block)
    state.totals.released[args[0]] = state.totals.released.get(args[0], 0) + len(blocks)


def _fold_pinned(
    state: EngineState, _group: int, _number: int, blocks: list[int], _args: list[int], _samples: ResidencySamples
) -> None:
    """Add a holder that is not a request: an owner outside all tables, announced by the event itself."""
    for block in blocks:
        state.refs[block] += 1
        if state.refs[block] == 1:
            state.used += 1
            state.cached_idle -= state.hashes[block] != 0
            state.since[block] = state.now_ns
        _keep_holder(state, state.detached.setdefault(block, []), block, PINS)
        state.pinned.setdefault(block, state.now_ns)
    if blocks:
        state.defer(PINS, "pinned", Holder.PIN, 0, -1, blocks)


def _note_pin(state: EngineState, block: int) -> None:
    """Keep how long a pin that is gone now lasted."""
    since_ns = state.pinned.pop(block, 0)
    if since_ns and state.outside_waits is not None:
        state.outside_waits.pins.note(since_ns, state.now_ns, 1)


def _fold_unpinned(
    state: EngineState, _group: int, _number: int, blocks: list[int], _args: list[int], _samples: ResidencySamples
) -> None:
    for block in blocks:
        holders = state.detached.get(block, [])
        if PINS not in holders:
            state.anomaly(AnomalyKind.NEVER_PINNED, block, -1, "")
            continue
        holders.remove(PINS)
        if PINS not in holders:
            state.undefer(PINS, [block])
            _note_pin(state, block)
        if not holders:
            del state.detached[block]
        _drop_reference(state, block)


BLOCK_HANDLERS: Final[dict[int, BlockHandler]] = {
    int(Kind.ALLOCATED): _fold_allocated,
    int(Kind.CACHED): _fold_cached,
    int(Kind.RELEASED): _fold_released,
    int(Kind.REUSED): _fold_reused,
    int(Kind.EVICTED): _fold_evicted,
    int(Kind.DETACHED): _fold_detached,
    int(Kind.FREE_DEFERRED): _fold_free_deferred,
    int(Kind.RECLAIMED): _fold_reclaimed,
    int(Kind.PINNED): _fold_pinned,
    int(Kind.UNPINNED): _fold_unpinned,
}
DROPPING_KINDS: Final = frozenset((int(Kind.RELEASED), int(Kind.DETACHED)))
"""Kinds that leave their blocks in `pending_drops`."""

# ---------------------------------------------------------------- references and tables


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


def _add_owner(state: EngineState, block: int, number: int) -> None:
    """Add a reference and an owner to a block that has references already."""
    if state.owner[block] < 0:
        state.owner[block] = number
    else:
        _keep_holder(state, state.more.setdefault(block, []), block, number)
    state.refs[block] += 1


def _keep_holder(state: EngineState, holders: list[int], block: int, number: int) -> None:
    """Add a holder of a block. The number of them is bounded, since each release searches them."""
    if len(holders) < limits.BLOCK_HOLDERS:
        holders.append(number)
    else:
        state.anomaly(AnomalyKind.TOO_MANY_HOLDERS, block, number, f"{limits.BLOCK_HOLDERS:,} are kept by number")
        state.orphans.add(block)


def _allocate_held(state: EngineState, block: int, number: int) -> None:
    """Fold the allocation of a held block: the block gains an owner."""
    state.anomaly(AnomalyKind.ALLOCATED_WHILE_HELD, block, number, f"held by {state.owner_names(block)}")
    _add_owner(state, block, number)


def _free_lost_releases(state: EngineState, blocks: list[int]) -> None:
    """Free the blocks that are allocated although the state has holders of them from before the loss: the engine
    allocates free blocks only, so the events that released them are among the lost ones.
    """
    freed = {block for block in blocks if state.refs[block] and not state.is_certain_block(block)}
    if not freed:
        return
    holders = {number for block in freed for number in (*state.owners(block), *state.detached.get(block, ()))}
    for block in freed:
        state.refs[block], state.owner[block], state.hashes[block] = 0, -1, 0
        state.more.pop(block, None)
        state.detached.pop(block, None)
        state.pinned.pop(block, None)
        state.orphans.discard(block)
    state.used -= len(freed)
    for number in holders:
        if (deferral := state.deferrals.get(number)) is not None:
            deferral.blocks -= freed
            if not deferral.blocks:
                del state.deferrals[number]
        record = state.requests.get(number)
        if record is not None:
            record.blocks = [block for block in record.blocks if block not in freed]
            end_if_over(state, record)


def _release_shared(state: EngineState, block: int, number: int) -> None:
    """Drop one of several references, or one that the state does not know."""
    if state.refs[block] > 1 and block in state.more and _remove_owner(state, block, number):
        state.refs[block] -= 1
        return
    if state.refs[block] <= 0:
        state.anomaly(AnomalyKind.RELEASED_WHILE_FREE, block, number, f"reference count {state.refs[block]}")
        _remove_owner(state, block, number)  # if another had freed it before
        return
    if not _remove_owner(state, block, number):
        owners = state.owner_names(block) or "no request"
        state.anomaly(AnomalyKind.RELEASED_BY_ANOTHER, block, number, f"owned by {owners}")
    _drop_reference(state, block)


def _remove_owner(state: EngineState, block: int, number: int) -> bool:
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


def _drop_reference(state: EngineState, block: int) -> None:
    """Drop a reference. With the last one the block becomes free or cached-idle."""
    state.refs[block] -= 1
    if state.refs[block]:
        return
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


def _end_deferral(state: EngineState, former: int, block: int) -> None:
    deferral = state.deferrals.get(former)
    if deferral is not None and deferral.holder == Holder.FENCE and deferral.fence in state.in_flight:
        state.early[block] = deferral.fence
    state.undefer(former, [block])


def _check_fences(state: EngineState, blocks: list[int], number: int) -> None:
    for block in blocks:
        fence = state.early.pop(block, -1)
        if fence in state.in_flight:
            detail = f"step {fence}, which may still write to it, is not complete"
            state.anomaly(AnomalyKind.BROKEN_FENCE, block, number, detail)


def _drop_later(state: EngineState, number: int, blocks: list[int], freed: int) -> None:
    pending = state.pending_drops.get(number)
    if pending is None:
        state.pending_drops[number] = (blocks, freed)
    else:
        pending[0].extend(blocks)
        state.pending_drops[number] = (pending[0], pending[1] + freed)


def drop_from_tables(state: EngineState) -> None:
    """Remove from the tables what consecutive events released or detached: one pass over each table for all of them."""
    for number, (blocks, freed) in state.pending_drops.items():
        _drop_from_table(state, number, blocks, freed)
    state.pending_drops.clear()


def _drop_from_table(state: EngineState, number: int, blocks: list[int], freed: int) -> None:
    """Remove blocks from a request's table. `freed`: how many different ones were in no other table.

    A request that ended or never arrived has none. If no event was lost, each block has been reported as released by
    another than its owner.
    """
    record = state.requests.get(number)
    if record is None:
        return
    record.peak_blocks = max(record.peak_blocks, len(record.blocks))
    if freed == len(record.blocks):
        record.blocks = []
    else:
        gone = set(blocks)
        kept = [block for block in record.blocks if block not in gone]
        if len(kept) + len(blocks) != len(record.blocks):
            # It names a block more than once, and keeps it as often as it is still an owner; or not all are its own.
            kept += [block for block in sorted(gone) for owner in state.owners(block) if owner == number]
        record.blocks = kept
    end_if_over(state, record)
