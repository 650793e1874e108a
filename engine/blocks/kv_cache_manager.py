"""Block tables: which blocks each request has, in the order of its tokens.

    who frees a request's blocks     when
    ------------------------------   -------------------------------------------------------------------
    Scheduler.finish                 it reached a stop, its length, or was aborted, and no connector defers it
    ConnectorTransfers               the connector that deferred the free reports completion, or its lease ends
    PreemptionPolicy                 another request needs the room
    KVCacheManager.advance           a sliding window has left them behind

Layers that keep the same tokens are a KV group: those that see everything, and those with a sliding window. A request
has a table for each group, all of one length, over one pool: block i of each has the same tokens, in that group's
layers. Blocks behind a window are freed, and NULL_BLOCK stands in their place.

A free can be fenced: the blocks leave the table and stay referenced until `reclaim` learns that the step which may
still write to them is complete.

`allocate` either gives all that was asked for or changes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from kvscope.monitor.contract.kinds import Holder, Release

from ..faults import Faults
from ..requests.request import Request
from .block_pool import NULL_BLOCK, BlockPool
from .prefix_hashes import PrefixHasher, in_group


class Prefix(NamedTuple):
    """The cached part of a request's beginning: its first `num_blocks` blocks.

    blocks: of each group, the last of them. Those before, that its window does not reach from there, are not needed.
    found: how many each group has, of as many as the group before it has.
    """

    num_blocks: int
    blocks: list[list[int]]
    found: list[int]


class Fenced(NamedTuple):
    """Blocks that a request has freed, by group, and that become free when the step `fence` is complete."""

    fence: int
    request: Request
    blocks: list[list[int]]
    reason: Release


class KVCacheManager:
    """Tables over `pool`, in blocks of `block_size` tokens. Without `hasher` there is no prefix cache.

    windows: of each KV group, how many tokens its layers see (None: all). At most one, the last, has a window.
    max_tokens_ahead: of one request, tokens at most in steps that are launched and not complete.
    settles_when_planned: see SchedulingRules.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        hasher: PrefixHasher | None,
        faults: Faults,
        windows: Sequence[int | None] = (None,),
        max_tokens_ahead: int = 0,
        settles_when_planned: bool = False,
    ) -> None:
        self.pool = pool
        self.settles_when_planned = settles_when_planned
        self.block_size = block_size
        self.hasher = hasher
        self.faults = faults
        self.windows = tuple(windows)
        self.tables: dict[int, list[list[int]]] = {}
        """Tables of each request, by its number: one for each group."""
        self.fenced: list[Fenced] = []
        """In the order of their fences."""
        self._cached_blocks: dict[int, int] = {}
        self._sliding = [(group, window) for group, window in enumerate(self.windows) if window is not None]
        # The tokens that a window reaches back from the first one of a step, and the step's own, wherever they begin.
        self._most_blocks = [
            sys.maxsize
            if window is None
            else self._blocks(window + max_tokens_ahead - (1 if settles_when_planned else 2)) + 1
            for window in self.windows
        ]

    @property
    def num_fenced(self) -> int:
        """Blocks that wait for a fence."""
        return sum(len(blocks) for fenced in self.fenced for blocks in fenced.blocks)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the blocks that a request of so many tokens has at its peak, in all groups."""
        blocks = self._blocks(num_tokens)
        return sum(min(blocks, most) for most in self._most_blocks)

    def fits(self, num_tokens: int) -> bool:
        """Whether so many tokens of a request have room when it has the whole pool for itself."""
        return self.blocks_for(num_tokens) <= self.pool.usable

    def held(self, number: int) -> list[list[int]]:
        """Return the blocks that a request has, by group."""
        tables = self.tables.get(number) or [[] for _ in self.windows]
        return [[block for block in table if block != NULL_BLOCK] for table in tables]

    def find_prefix(self, request: Request) -> Prefix:
        """Return the cached part of the request's beginning, never all of it: one token must be computed.

        A group that sees everything needs all of a prefix. One with a window needs the part that it reaches from the
        next token. A prefix is found where every group has its part, so that the others waste the blocks that one of
        them misses.
        """
        if self.hasher is None:
            return Prefix(0, [[] for _ in self.windows], [0 for _ in self.windows])
        self.hasher.extend(request.digests, request.token_ids)
        missed = self.faults.triggers("collapse.prefix-hits", request.id)
        most = (request.num_tokens - 1) // self.block_size
        blocks, found = [], []
        for group, window in enumerate(self.windows):
            if missed and group == len(self.windows) - 1:
                most, hits = 0, []
            elif window is None:
                hits = self._find_all(request, group, most)
                most = len(hits)
            else:
                most, hits = self._find_reached(request, group, most, window)
            blocks.append(hits)
            found.append(most)
        return Prefix(most, [hits[:most] for hits in blocks], found)

    def _find_all(self, request: Request, group: int, most: int) -> list[int]:
        """Return those of the first `most` blocks before the first that is not cached."""
        hits = []
        for digest in request.digests[:most]:
            block = self.pool.find(in_group(digest, group))
            if block is None:
                break
            hits.append(block)
        return hits

    def _find_reached(self, request: Request, group: int, most: int, window: int) -> tuple[int, list[int]]:
        """Return the longest prefix, `most` blocks at most, at whose end all that the window reaches is cached, and
        these blocks.
        """
        end, backwards = most, list[int]()
        while len(backwards) < end - self._num_passed(end * self.block_size, window):
            block = self.pool.find(in_group(request.digests[end - len(backwards) - 1], group))
            if block is None:
                end -= len(backwards) + 1
                backwards = []
            else:
                backwards.append(block)
        return end, backwards[::-1]

    def allocate(
        self,
        request: Request,
        num_new_tokens: int,
        prefix: Prefix | None = None,
        room_for: int = 0,
        fetched: bool = False,
    ) -> bool:
        """Give the request blocks for `num_new_tokens` tokens beyond those computed or hit.

        The blocks of `prefix` are taken over as they are, before new ones. There must be room, besides, for `room_for`
        tokens in all (the whole prompt, at admission), though only what this step needs is taken. False if there is
        not enough: then nothing is changed, and the log has what was needed and what was free. fetched: the tokens are
        not computed but brought from outside, and are not in the prefix cache before they are there.
        """
        number = request.number
        tables = self.tables.get(number)
        hit = prefix.num_blocks if prefix is not None else 0
        have = hit + (len(tables[0]) if tables is not None else 0)
        if tables is not None and self.settles_when_planned:
            self._give_back_passed(request)
        end = max(request.num_scheduled_tokens, have * self.block_size if hit else 0) + num_new_tokens
        wanted = self._blocks(end) - have
        if room_for > end and self.faults.triggers("thrash.preemption", request.id):
            room_for = 0
        needed, free = wanted * len(self.windows), self.pool.num_free
        if prefix is not None:
            # A hit without an owner is in the free queue: taking it uses a free block.
            free -= sum(self.pool.refs[block] == 0 for blocks in prefix.blocks for block in blocks)
        if room_for:
            needed = self._needed_for_all(self._blocks(room_for), wanted, have, prefix)
        if needed > free:
            if request.shortage != (needed, free):
                request.shortage = (needed, free)
                self.pool.log.allocation_failed(number, needed, free)
            return False
        request.shortage = None
        if tables is None:
            tables = self.tables[number] = [[] for _ in self.windows]
        if prefix is not None and hit:
            self._take_over(number, prefix)
        if wanted > 0:
            for group, table in enumerate(tables):
                table += self.pool.allocate(number, wanted, group)
        if self.settles_when_planned and self.hasher is not None and not fetched:
            self._cache_until(request, min(end, request.num_tokens), self.hasher)
        return True

    def _needed_for_all(self, blocks: int, wanted: int, have: int, prefix: Prefix | None) -> int:
        """Return how many new blocks a request needs that has `have` and will have `blocks`, of which `wanted` now."""
        if self.settles_when_planned:  # vLLM counts the whole request and the step by themselves, over all groups
            whole = sum(max(0, min(blocks, most) - have) for most in self._most_blocks)
            return max(whole, wanted * len(self.windows))
        hits = prefix.blocks if prefix is not None else [[] for _ in self.windows]
        return sum(
            max(wanted, min(blocks - have, most - len(hit))) for most, hit in zip(self._most_blocks, hits, strict=True)
        )

    def _take_over(self, number: int, prefix: Prefix) -> None:
        for group, (table, blocks) in enumerate(zip(self.tables[number], prefix.blocks, strict=True)):
            table += [NULL_BLOCK] * (prefix.num_blocks - len(blocks)) + blocks
            if blocks:
                self.pool.reuse(number, blocks, group)
        self._cached_blocks[number] = prefix.num_blocks

    def advance(self, request: Request) -> None:
        """More of the request's tokens are computed: enter what they fill in the prefix cache, and give back what the
        windows have left behind.

        Only complete steps count. One that is in flight, or still to come, begins with the token after them or with a
        later one, and neither reads nor writes what the window does not reach from there: no fence is needed.
        """
        if self.hasher is not None:
            self._cache_until(request, request.num_computed_tokens, self.hasher)
        if not self.settles_when_planned:
            self._give_back_passed(request)

    def _give_back_passed(self, request: Request) -> None:
        for group, window in self._sliding:
            table, passed = self.tables[request.number][group], []
            for place in reversed(range(self._num_passed(request.num_computed_tokens, window))):
                if table[place] == NULL_BLOCK:
                    break
                passed.append(table[place])
                table[place] = NULL_BLOCK
            if passed:
                self.pool.release(request.number, passed, Release.OUT_OF_WINDOW, group)

    def _cache_until(self, request: Request, num_tokens: int, hasher: PrefixHasher) -> None:
        done = self._cached_blocks.get(request.number, 0)
        full = num_tokens // self.block_size
        if full > done:
            hasher.extend(request.digests, request.token_ids)
            for group, table in enumerate(self.tables[request.number]):
                digests = [in_group(digest, group) for digest in request.digests[done:full]]
                self.pool.cache(request.number, table[done:full], digests, group)
            self._cached_blocks[request.number] = full

    def free(self, request: Request, reason: Release, fence: int | None = None) -> None:
        """Take the request's blocks back, its last first, so that a prefix outlives what followed it.

        They are free at once, or with a `fence` when that step is complete.
        """
        held = self.held(request.number)
        self.tables.pop(request.number, None)
        self._cached_blocks.pop(request.number, None)
        if not any(held) or (reason == Release.ABORTED and self.faults.triggers("leak.unaccounted", request.id)):
            return
        if reason == Release.FINISHED and self.faults.triggers("leak.rising-floor", request.id):
            held = [blocks[:-1] for blocks in held]
        backwards = [blocks[::-1] for blocks in held]
        if fence is None:
            self._release(request, backwards, reason)
            if reason == Release.FINISHED and self.faults.triggers("corrupt.double-free", request.id):
                self._release(request, backwards, reason)
            return
        for group, blocks in enumerate(held):
            if blocks:
                self.pool.log.detached(request.number, blocks, group)
                self.pool.log.free_deferred(request.number, blocks, Holder.FENCE, fence, group=group)
        fenced = Fenced(fence, request, backwards, reason)
        if self.faults.triggers("corrupt.use-after-free", request.id):
            self._reclaim(fenced)
        else:
            self.fenced.append(fenced)

    def reclaim(self, completed_step: int) -> None:
        """Free what was fenced behind steps up to this one, which is complete."""
        while self.fenced and self.fenced[0].fence <= completed_step:
            fenced = self.fenced.pop(0)
            if not self.faults.triggers("leak.deferred-free-stalled", fenced.request.id):
                self._reclaim(fenced)

    def _release(self, request: Request, held: list[list[int]], reason: Release) -> None:
        for group, blocks in enumerate(held):
            if blocks:
                self.pool.release(request.number, blocks, reason, group)

    def _reclaim(self, fenced: Fenced) -> None:
        for group, blocks in enumerate(fenced.blocks):
            if blocks:
                self.pool.reclaim(fenced.request.number, blocks, fenced.reason, group)

    def _blocks(self, num_tokens: int) -> int:
        """Return how many blocks of a table so many tokens take, the last one perhaps partly."""
        return -(-num_tokens // self.block_size)

    def _num_passed(self, num_tokens: int, window: int) -> int:
        """Return how many blocks of a table the window has left behind for the token after so many."""
        return max(0, num_tokens + 1 - window) // self.block_size
