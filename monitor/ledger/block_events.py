"""Fold the events of blocks: allocated, cached, reused, released, and the rarer ones.

Each handler takes the state, the KV group, the request's number, the blocks (known to be in the pool), the event's
arguments and the residency samples. ALLOCATED, CACHED and RELEASED are the hot path: a busy engine emits 100,000
blocks of them a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from ..contract.kinds import Holder, Kind, Release
from ..contract.wire import PINS
from .engine_state import EngineState
from .holders import (
    add_owner,
    drop_later,
    drop_reference,
    end_if_over,
    forget_dropped,
    forget_stale,
    keep_holder,
    leave_orphans,
    lose_reference,
    owner_names,
    remove_owner,
    request_record,
)
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
    if number < 0:
        _tell_no_request(state, blocks, number)
        return
    refs, owner, hashes, since, born = state.columns
    now, count = state.now_ns, len(blocks)
    taken, evicted = count, 0
    if state.damaged:
        _free_lost_releases(state, blocks)
    if state.stale:
        _tell_stale(state, blocks, number)
    for block in blocks:
        if refs[block]:
            taken -= 1
            _allocate_held(state, block, number)
            continue
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
    if number < 0:
        _release_for_nobody(state, blocks, number, args[0])
        return
    refs, owner, hashes, since, born = state.columns
    now = state.now_ns
    freed = kept = entries = 0
    for block in blocks:
        if refs[block] != 1 or owner[block] != number:
            entries += _release_shared(state, block, number)
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
    drop_later(state, number, blocks, freed + entries)


def _fold_reused(
    state: EngineState, _group: int, number: int, blocks: list[int], _args: list[int], samples: ResidencySamples
) -> None:
    if number < 0:
        _tell_no_request(state, blocks, number)
        return
    refs, hashes, now = state.refs, state.hashes, state.now_ns
    used = hit = 0
    for block in blocks:
        if refs[block]:
            refs[block] += 1
            add_owner(state, block, number)
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
    entries = 0
    for block in blocks:
        if number >= 0 and remove_owner(state, block, number):
            entries += 1
            keep_holder(state, state.detached.setdefault(block, []), block, number)
        elif not forget_stale(state, block, number):
            detail = f"owned by {owner_names(state, block)}"
            state.anomaly(AnomalyKind.DETACHED_FROM_ANOTHER, block, number, detail)
    if number not in state.requests:
        state.undefer(number, blocks)
    drop_later(state, number, blocks, entries)


def _fold_free_deferred(
    state: EngineState, _group: int, number: int, blocks: list[int], args: list[int], _samples: ResidencySamples
) -> None:
    # A finished request whose blocks were all detached just now is among the ended ones.
    known = (state.requests.get(number), *reversed(state.news.ended))
    name = next((record.id for record in known if record is not None and record.number == number), f"#{number}")
    table = set(known[0].blocks) if known[0] is not None else ()
    held = [block for block in blocks if block in table or number in state.detached.get(block, ())]
    if state.damaged:
        held = blocks  # how it came to hold them may be lost
    for block in sorted({*blocks}.difference(held)):
        if number not in state.stale.get(block, ()):  # else it was reported when another freed it
            detail = f"owned by {owner_names(state, block)}"
            state.anomaly(AnomalyKind.DEFERRED_BY_ANOTHER, block, number, detail)
    if held:
        state.defer(number, name, args[0], args[1], args[2], held)


def _fold_reclaimed(
    state: EngineState, _group: int, number: int, blocks: list[int], args: list[int], _samples: ResidencySamples
) -> None:
    for block in blocks:
        former = state.detached.get(block, [])
        released = next((holder for holder in former if holder != PINS), PINS)  # a pin ends with its own event
        if released == PINS:
            detail = f"owned by {owner_names(state, block)}"
            state.anomaly(AnomalyKind.NEVER_DETACHED, block, number, detail)
            continue
        former.remove(released)
        _end_deferral(state, released, block)
        if not former:
            del state.detached[block]
        drop_reference(state, block)
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
        keep_holder(state, state.detached.setdefault(block, []), block, PINS)
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
            detail = f"owned by {owner_names(state, block)}"
            state.anomaly(AnomalyKind.NEVER_PINNED, block, -1, detail)
            continue
        holders.remove(PINS)
        if PINS not in holders:
            state.undefer(PINS, [block])
            _note_pin(state, block)
        if not holders:
            del state.detached[block]
        drop_reference(state, block)


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

# ---------------------------------------------------------------- events that contradict the state


def _tell_no_request(state: EngineState, blocks: Iterable[int], number: int) -> None:
    """Report blocks given to a request that the event does not name. Who has them, the next audit shows."""
    for block in blocks:
        state.anomaly(AnomalyKind.NO_REQUEST, block, number, "")


def _allocate_held(state: EngineState, block: int, number: int) -> None:
    """Fold the allocation of a held block: the block gains an owner."""
    state.anomaly(AnomalyKind.ALLOCATED_WHILE_HELD, block, number, f"held by {owner_names(state, block)}")
    state.refs[block] += 1
    add_owner(state, block, number)


def _tell_stale(state: EngineState, blocks: list[int], number: int) -> None:
    """Report blocks that are handed out while the table of a request from which another freed them names them."""
    for block in sorted(state.stale.keys() & blocks):
        named = [one for one in state.stale.pop(block) if state.is_alive(one)]
        if named:
            state.stale[block] = named
            holders = owner_names(state, block, named)
            state.anomaly(AnomalyKind.ALLOCATED_WHILE_HELD, block, number, f"held by {holders}")


def _release_shared(state: EngineState, block: int, number: int) -> bool:
    """Drop one of several references, or one that the request does not have. Returns whether it had it in its table."""
    if number >= 0 and remove_owner(state, block, number):
        drop_reference(state, block)
        return True
    if _is_freed_late(state, block, number):
        drop_reference(state, block)
    elif forget_stale(state, block, number):  # reported when another freed it
        lose_reference(state, block)
    elif not state.refs[block]:
        state.anomaly(AnomalyKind.RELEASED_WHILE_FREE, block, number, "no reference was left")
    else:
        detail = f"owned by {owner_names(state, block)}"
        state.anomaly(AnomalyKind.RELEASED_BY_ANOTHER, block, number, detail)
        lose_reference(state, block)
    return False


def _release_for_nobody(state: EngineState, blocks: list[int], number: int, reason: int) -> None:
    """Fold a release for which the engine names no request."""
    for block in blocks:
        _release_shared(state, block, number)
    state.totals.released[reason] = state.totals.released.get(reason, 0) + len(blocks)


def _is_freed_late(state: EngineState, block: int, number: int) -> bool:
    """Whether the request's table lost the block without a free, which comes now."""
    dropped = state.dropped.get(number)
    if dropped is None or block not in dropped.blocks or state.refs[block] <= state.known_references(block):
        return False
    forget_dropped(state, number, block)
    return True


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
        leave_orphans(state, block)
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
