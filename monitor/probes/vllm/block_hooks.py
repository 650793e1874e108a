"""Hooks on the block pool: blocks handed out, shared, freed, and what the prefix cache holds."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from types import CodeType
from typing import Any, Final

from ...contract.kinds import Evict, Holder, Release
from ...contract.wire import NO_REQUEST
from .emitter import ALLOCATED, CACHED, Emitter
from .hooks import Hooks
from .owner import caller, gives
from .probe_state import ProbeState, flat_blocks

FREES_COPIES: Final = "_free_cow_retained_blocks"
"""The scheduler's method that frees the blocks of copies on write, at the end of a pass: after all refusals."""


class BlockHooks:
    """Reports what the pool of `state` does."""

    def __init__(self, state: ProbeState, emitter: Emitter) -> None:
        self._state = state
        self._emitter = emitter
        self._notes = emitter.notes
        self._giver: CodeType | None = None
        """The usual caller that asks the pool for blocks: a cache manager's method that has the request's id."""

    def wrap(self, hooks: Hooks) -> None:
        """Install the hooks."""
        pool, wrap = self._state.pool, hooks.wrap
        wrap(self._state.manager, "pop_blocks_for_free", after=self._popped)
        wrap(pool, "get_new_blocks", after=self._allocated)
        wrap(pool, "touch", self._touched)
        wrap(pool, "free_blocks", self._released)
        wrap(pool, "cache_full_blocks", after=self._cached_full)
        wrap(pool, "cache_partial_block", after=self._cached_partial)
        wrap(pool, "move_block_hashes", after=self._moved)
        wrap(pool, "evict_blocks", after=self._evicted)
        wrap(pool, "reset_prefix_cache", after=self._reset)
        wrap(pool, "unpin_blocks", self._unpinned)
        for manager in self._state.managers:
            wrap(manager, "_apply_cow", after=partial(self._copied, manager.kv_cache_group_id))

    def _allocated(self, blocks: Sequence[Any]) -> None:
        if not blocks:
            return
        frame = sys._getframe(2)  # beyond the wrapper
        if frame.f_code is self._giver:
            known = frame.f_locals
            request_id, group = known["request_id"], known["self"].kv_cache_group_id
        else:
            who = caller(self._state.scheduler)
            if who is None or who[0] not in self._state.numbers:
                self._pin([block.block_id for block in blocks], handed_out=True)
                return
            request_id, group, _ = who
            if gives(frame):
                self._giver = frame.f_code
        if request_id not in self._state.numbers:
            self._pin([block.block_id for block in blocks], handed_out=True)
            return
        self._state.gave_blocks.append(request_id)
        self._notes.append((ALLOCATED, request_id, blocks, group))

    def _touched(self, blocks: Iterable[Any], *_args: Any, **_kwargs: Any) -> None:
        ids = [block.block_id for block in flat_blocks(blocks) if not block.is_null]
        if not ids:
            return
        who = caller(self._state.scheduler)
        if who is None or who[0] not in self._state.numbers:
            self._pin(ids)
            return
        request_id, group, _ = who
        self._state.gave_blocks.append(request_id)
        self._emitter.stamped.reused(self._state.numbers[request_id], ids, group)

    def _pin(self, ids: list[int], *, handed_out: bool = False) -> None:
        """Something other than a request takes references: a connector, or another plugin."""
        if handed_out:
            self._emitter.write_evicted(ids, Evict.INVALIDATED)
        for block in ids:
            self._state.pins[block] = self._state.pins.get(block, 0) + 1
        self._emitter.stamped.pinned(ids)

    def _released(
        self, ordered_blocks: Iterable[Any], *rest: Any, **more: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        blocks = list(ordered_blocks)  # it may be read only once
        freed = self._state.in_pool(blocks)
        if freed:
            self._emitter.write_notes()
            who = caller(self._state.scheduler)
            if who is None or who[0] not in self._state.numbers:
                if sys._getframe(2).f_code.co_name == FREES_COPIES:  # beyond the wrapper
                    self._state.free_before_copies = self._state.free_queue.num_free_blocks
                self._released_by_others(freed, self._state.ended.get(who[0], NO_REQUEST) if who else NO_REQUEST)
            else:
                request_id, group, function = who
                by_window = Release.OUT_OF_WINDOW if function != "free" else Release.ROLLED_BACK
                reason = self._state.release_reason or by_window
                ids = [block.block_id for block in freed]
                self._emitter.stamped.released(self._state.numbers[request_id], ids, reason, group)
        return (blocks, *rest), more

    def _released_by_others(self, blocks: Sequence[Any], ended: int = NO_REQUEST) -> None:
        """No living request frees these: the scheduler behind a fence, a connector its pins, or someone by mistake.

        ended: the number of the request that a cache manager frees them for after its end.
        """
        times: dict[int, int] = {}
        for one in blocks:
            block: int = one.block_id
            before = times.get(block, 0)
            times[block] = before + 1
            if (reason := self._take_detached(block)) is not None:
                self._emitter.stamped.reclaimed([block], reason)
            elif self._take_pin(block):
                self._emitter.stamped.unpinned([block])
            elif ended == NO_REQUEST and one.ref_cnt - before > self._state.named_references(block):
                self._emitter.count_missed()  # a reference that vLLM took without the pool, as for a copy on write
            else:
                self._emitter.stamped.released(ended, [block], Release.ROLLED_BACK)

    def _take_pin(self, block: int) -> bool:
        pins = self._state.pins
        count = pins.pop(block, 0)
        if count > 1:
            pins[block] = count - 1
        return count > 0

    def _take_detached(self, block: int) -> Release | None:
        detached = self._state.detached
        former = detached.get(block)
        if not former:
            return None
        _, reason = former.popleft()
        if not former:
            del detached[block]
        return reason

    def _popped(self, blocks: Sequence[Any], request: Any) -> None:
        number = self._state.numbers[request.request_id]
        ids = [block.block_id for block in self._state.in_pool(blocks)]
        if not ids:
            return
        reason = self._state.release_reason or Release.ROLLED_BACK
        for block in ids:
            self._state.detached.setdefault(block, deque()).append((number, reason))
        self._emitter.stamped.free_deferred(number, ids, Holder.FENCE, fence=self._state.step - 1)
        self._emitter.stamped.detached(number, ids)

    def _cached_full(
        self, _: None, request: Any, blocks: Sequence[Any], num_cached_blocks: int, num_full_blocks: int
    ) -> None:
        self._notes.append((CACHED, request.request_id, blocks[num_cached_blocks:num_full_blocks], 0))

    def _cached_partial(self, _: Any, *args: Any, **kwargs: Any) -> None:
        blocks = [value for value in (*args, *kwargs.values()) if hasattr(value, "block_id")]
        self._emitter.write_cached(self._emitter.stamped, NO_REQUEST, blocks)

    def _copied(self, group: int, _: None, request_id: str, source_block: Any, cow_block: Any) -> None:
        """Note that a request that hit a block in part goes on with a copy of it.

        Until the worker has copied, vLLM keeps a reference to both: the request's own to the source, and a new one.
        """
        self._pin([source_block.block_id, cow_block.block_id])
        number = self._state.numbers.get(request_id, NO_REQUEST)
        self._emitter.stamped.released(number, [source_block.block_id], Release.ROLLED_BACK, group)

    def _moved(self, _: None, src_block: Any, dst_block: Any) -> None:
        """Note that the cache goes on with a copy, which no request has. vLLM keeps both until the worker has
        copied.
        """
        self._emitter.write_evicted([src_block.block_id], Evict.INVALIDATED)
        self._emitter.write_cached(self._emitter.stamped, NO_REQUEST, [dst_block])
        self._pin([src_block.block_id, dst_block.block_id])
        owner = caller(self._state.scheduler)
        if owner is None or owner[0] not in self._state.numbers:
            self._emitter.count_missed()
            return
        request_id, group, _name = owner
        self._emitter.stamped.released(
            self._state.numbers[request_id], [dst_block.block_id], Release.ROLLED_BACK, group
        )

    def _evicted(self, _: None, block_ids: Iterable[int]) -> None:
        blocks = self._state.pool.blocks
        gone = [block for block in block_ids if blocks[block].block_hash is None]
        self._emitter.write_evicted(gone, Evict.INVALIDATED)

    def _reset(self, done: bool) -> None:
        if done:
            self._emitter.expire_time()
            self._emitter.write_evicted(list(self._emitter.hashes), Evict.RESET)

    def _unpinned(self, blocks: Iterable[Any], *rest: Any, **more: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Note that a connector releases references, and may still read the blocks until they are reused."""
        given = list(blocks)  # it may be read only once
        self._emitter.write_notes()
        self._released_by_others(given)
        return (given, *rest), more
