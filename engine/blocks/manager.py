"""Block tables: which blocks each request has, in the order of its tokens.

    who frees a request's blocks     when
    ------------------------------   -------------------------------------------------------------------
    Scheduler.finish                 it reached a stop, its length, or was aborted, and nobody defers it
    Scheduler.take_completions       the connector that deferred the free says that it is done, or its lease ends
    Scheduler._preempt               another request needs the room

A free can be fenced: the blocks leave the table and stay referenced until `reclaim` is told that the step which may
still write to them is complete.

`allocate` either gives all that was asked for or changes nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from engine.blocks.hashing import PrefixHasher
from engine.blocks.pool import BlockPool
from engine.faults import Faults
from engine.request import Request
from monitor.events.kinds import Holder, Release


class Fenced(NamedTuple):
    """Blocks that a request has given back and that become free when the step `fence` is complete."""

    fence: int
    request: Request
    blocks: list[int]
    reason: Release


class KVCacheManager:
    """Tables over `pool`, in blocks of `block_size` tokens. Without `hasher` there is no prefix cache."""

    def __init__(self, pool: BlockPool, block_size: int, hasher: PrefixHasher | None, faults: Faults) -> None:
        self.pool = pool
        self.block_size = block_size
        self.hasher = hasher
        self.faults = faults
        self.tables: dict[int, list[int]] = {}
        self.fenced: list[Fenced] = []
        """In the order of their fences."""
        self._cached_blocks: dict[int, int] = {}

    @property
    def num_fenced(self) -> int:
        """Blocks that wait for a fence."""
        return sum(len(fenced.blocks) for fenced in self.fenced)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks so many tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def fits(self, num_tokens: int) -> bool:
        """Whether so many tokens of a request have room when it has the whole pool for itself."""
        return self.blocks_for(num_tokens) <= self.pool.usable

    def find_prefix(self, request: Request) -> list[int]:
        """Cached blocks that hold the beginning of the request's tokens, never all of them: one must be computed."""
        if self.hasher is None:
            return []
        self.hasher.extend(request.digests, request.token_ids)
        if self.faults.strikes("collapse.prefix-hits", request.id):
            return []
        hits = []
        for digest in request.digests[: (request.num_tokens - 1) // self.block_size]:
            block = self.pool.find(digest)
            if block is None:
                break
            hits.append(block)
        return hits

    def allocate(self, request: Request, num_new_tokens: int, hits: list[int] | None = None, room_for: int = 0) -> bool:
        """Give the request blocks for `num_new_tokens` tokens beyond those computed or hit.

        `hits` are taken over as they are, before new ones. There must be room, besides, for `room_for` tokens in all
        (the whole prompt, at admission), though only what this step needs is taken. False if there is not enough:
        then nothing is changed, and the log has what was needed and what was free.
        """
        hits = hits or []
        table = self.tables.get(request.number, [])
        have = len(table) + len(hits)
        end = max(request.num_scheduled_tokens, have * self.block_size if hits else 0) + num_new_tokens
        wanted = self.blocks_for(end) - have
        if room_for > end and self.faults.strikes("thrash.preemption", request.id):
            room_for = 0
        needed = max(wanted, self.blocks_for(room_for) - have)
        # A hit that nobody holds stands in the free queue: taking it over uses it up.
        free = self.pool.num_free - sum(self.pool.refs[block] == 0 for block in hits)
        if needed > free:
            if request.shortage != (needed, free):
                request.shortage = (needed, free)
                self.pool.log.allocation_failed(request.number, needed, free)
            return False
        request.shortage = None
        if hits:
            self.pool.reuse(request.number, hits)
            self._cached_blocks[request.number] = len(hits)
        if wanted > 0:
            hits = hits + self.pool.allocate(request.number, wanted)
        if hits:
            self.tables.setdefault(request.number, []).extend(hits)
        return True

    def cache_computed(self, request: Request) -> None:
        """Enter in the prefix cache what the request has computed in full since last time."""
        if self.hasher is None:
            return
        done = self._cached_blocks.get(request.number, 0)
        full = request.num_computed_tokens // self.block_size
        if full > done:
            self.hasher.extend(request.digests, request.token_ids)
            table = self.tables[request.number]
            self.pool.cache(request.number, table[done:full], request.digests[done:full])
            self._cached_blocks[request.number] = full

    def free(self, request: Request, reason: Release, fence: int | None = None) -> None:
        """Take the request's blocks back, its last first, so that a prefix outlives what followed it.

        They are free at once, or with a `fence` when that step is complete.
        """
        table = self.tables.pop(request.number, [])
        self._cached_blocks.pop(request.number, None)
        if not table or (reason == Release.ABORTED and self.faults.strikes("leak.unaccounted", request.id)):
            return
        if reason == Release.FINISHED and self.faults.strikes("leak.rising-floor", request.id):
            table = table[:-1]
        if fence is not None:
            self.pool.log.detached(request.number, table)
            self.pool.log.free_deferred(request.number, table, Holder.FENCE, fence)
            if self.faults.strikes("corrupt.use-after-free", request.id):
                self.pool.reclaim(request.number, table[::-1], reason)
            else:
                self.fenced.append(Fenced(fence, request, table[::-1], reason))
            return
        self.pool.release(request.number, table[::-1], reason)
        if reason == Release.FINISHED and self.faults.strikes("corrupt.double-free", request.id):
            self.pool.release(request.number, table[::-1], reason)

    def reclaim(self, completed_step: int) -> None:
        """Free what was fenced behind steps up to this one, which is complete."""
        while self.fenced and self.fenced[0].fence <= completed_step:
            _, request, blocks, reason = self.fenced.pop(0)
            if self.faults.strikes("leak.deferred-free-stalled", request.id):
                continue
            self.pool.reclaim(request.number, blocks, reason)
