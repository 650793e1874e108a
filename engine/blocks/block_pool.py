"""Every block of the pool: its reference count, its hash, its place in the free queue.

All changes to a block happen here, and each is logged at that place. A block with reference count 0 is in the free
queue. It keeps its hash there, so that a prefix hit can take it back, until it is allocated again. Blocks without a
hash are handed out first, then the least recently used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from kvscope.monitor.contract.event_log import EventLog
from kvscope.monitor.contract.kinds import Evict, Release

from ..faults import Faults
from .prefix_hashes import kv_group_of, public_hashes

_NOT_IN_QUEUE = -1


class FreeQueue:
    """The free blocks in eviction order: the front is handed out next. `initial` are in the queue to begin with.

    A doubly linked list threaded through two lists of ints, so that a prefix hit can take a block out of the middle in
    O(1), and nothing is allocated while serving.
    """

    def __init__(self, capacity: int, initial: Iterable[int]) -> None:
        # The list's two ends are one sentinel, `capacity` itself.
        self._end = capacity
        self._next = [_NOT_IN_QUEUE] * capacity + [capacity]
        self._previous = [_NOT_IN_QUEUE] * capacity + [capacity]
        self._count = 0
        self.extend(initial)

    def __len__(self) -> int:
        return self._count

    def __contains__(self, block: int) -> bool:
        return self._next[block] != _NOT_IN_QUEUE

    def has_each(self, first: int, end: int) -> list[bool]:
        """Return for each block from `first` to before `end` whether it is in the queue."""
        return [following != _NOT_IN_QUEUE for following in self._next[first:end]]

    def __iter__(self) -> Iterator[int]:
        block = self._next[self._end]
        while block != self._end:
            yield block
            block = self._next[block]

    def take(self, count: int) -> list[int]:
        """Remove `count` blocks from the front. Raises IndexError, and changes nothing, if there are fewer."""
        if count > self._count:
            raise IndexError(f"{count} blocks wanted, {self._count} free")
        taken = []
        following = self._next
        block = following[self._end]
        for _ in range(count):
            taken.append(block)
            after = following[block]
            following[block] = _NOT_IN_QUEUE
            block = after
        following[self._end] = block
        self._previous[block] = self._end
        self._count -= count
        return taken

    def remove(self, block: int) -> None:
        """Take one block out from wherever it stands. Raises KeyError if it is not in the queue."""
        after = self._next[block]
        if after == _NOT_IN_QUEUE:
            raise KeyError(f"block {block} is not in the free queue")
        before = self._previous[block]
        self._next[before] = after
        self._previous[after] = before
        self._next[block] = _NOT_IN_QUEUE
        self._count -= 1

    def extend(self, blocks: Iterable[int]) -> None:
        """Put blocks at the back, in order: the last to be handed out."""
        end, last = self._end, self._previous[self._end]
        for block in blocks:
            self._next[last] = block
            self._previous[block] = last
            last = block
            self._count += 1
        self._next[last] = end
        self._previous[end] = last

    def extend_front(self, blocks: Iterable[int]) -> None:
        """Put blocks at the front, the last of them to be handed out first."""
        end, first = self._end, self._next[self._end]
        for block in blocks:
            self._previous[first] = block
            self._next[block] = first
            first = block
            self._count += 1
        self._previous[first] = end
        self._next[end] = first


NULL_BLOCK = 0
"""Never handed out: what a block table names where there is nothing, and where padding is written."""
NULL_BLOCK_COUNT = 1


class BlockPool:
    """`total` blocks, of which the first is reserved.

    keeps_duplicates: several blocks of one prefix can be in the cache. A lookup finds the one entered first.
    """

    def __init__(self, total: int, log: EventLog, faults: Faults | None = None, keeps_duplicates: bool = False) -> None:
        if total <= NULL_BLOCK_COUNT:
            raise ValueError(f"a pool of {total} blocks has none to hand out: it needs at least {NULL_BLOCK_COUNT + 1}")
        self.total = total
        self.log = log
        self.faults = faults or Faults()
        self.refs = [0] * total
        self.digests: list[bytes | None] = [None] * total
        self.free_queue = FreeQueue(total, range(NULL_BLOCK_COUNT, total))
        self.num_cached_idle = 0
        self.keeps_duplicates = keeps_duplicates
        self._by_digest: dict[bytes, int] = {}
        self._duplicates: defaultdict[bytes, list[int]] = defaultdict(list)
        """Blocks of a prefix beside the one in `_by_digest`, in the order in which they were entered."""

    @property
    def usable(self) -> int:
        """The most blocks that can be handed out."""
        return self.total - NULL_BLOCK_COUNT

    @property
    def num_free(self) -> int:
        """Blocks that could be handed out now, cached-idle ones included."""
        return len(self.free_queue)

    def counts(self) -> tuple[int, int, int, int]:
        """Free (cached-idle included), cached-idle, used, total."""
        free = len(self.free_queue)
        return free, self.num_cached_idle, self.total - NULL_BLOCK_COUNT - free, self.total

    def find(self, digest: bytes) -> int | None:
        """Return the block that holds this prefix's last block, if it is cached."""
        return self._by_digest.get(digest)

    def allocate(self, request: int, count: int, group: int = 0) -> list[int]:
        """Hand `count` blocks to the request. Raises IndexError, and changes nothing, if there are fewer."""
        blocks = self.free_queue.take(count)
        evicted = []
        for block in blocks:
            self.refs[block] = 1
            digest = self.digests[block]
            if digest is not None:
                evicted.append(digest)
                self._forget(block, digest)
                self.num_cached_idle -= 1
        self.log.allocated(request, blocks, public_hashes(evicted) if evicted else [], group)
        return blocks

    def reuse(self, request: int, blocks: Sequence[int], group: int = 0) -> None:
        """Take a prefix hit: one more reference to each."""
        for block in blocks:
            if self.refs[block] == 0:
                self.free_queue.remove(block)
                self.num_cached_idle -= 1
            self.refs[block] += 1
        self.log.reused(request, blocks, group)

    def cache(self, request: int, blocks: Sequence[int], digests: Sequence[bytes], group: int = 0) -> None:
        """Enter full blocks in the prefix cache.

        One whose prefix is there already, in another block, is left out unless duplicates are kept.
        """
        entered, named = [], []
        for block, digest in zip(blocks, digests, strict=True):
            first = self._by_digest.setdefault(digest, block)
            if first != block and self.keeps_duplicates and self.digests[block] is None:
                self._duplicates[digest].append(block)
                first = block
            if first == block and self.digests[block] is None:
                self.digests[block] = digest
                entered.append(block)
                named.append(digest)
        if entered:
            self.log.cached(request, entered, public_hashes(named), group)

    def release(self, request: int, blocks: Sequence[int], reason: Release, group: int = 0) -> None:
        """Release one reference to each. Blocks without any go to the free queue, first ones first."""
        self._unreference(request, blocks)
        self.log.released(request, blocks, reason, group)

    def reclaim(self, request: int, blocks: Sequence[int], reason: Release, group: int = 0) -> None:
        """As `release`, of blocks that have left the request's table before."""
        self._unreference(request, blocks)
        self.log.reclaimed(blocks, reason, group)

    def _unreference(self, request: int, blocks: Sequence[int]) -> None:
        hashed, unhashed = [], []
        for block in blocks:
            self.refs[block] -= 1
            if self.refs[block] == 0:
                if self.digests[block] is None:
                    unhashed.append(block)
                else:
                    hashed.append(block)
        if hashed and self.faults.triggers("collapse.cache-flushed", f"#{request}"):
            self.free_queue.extend_front(hashed)
        else:
            self.free_queue.extend(hashed)
        self.free_queue.extend_front(unhashed)
        if not (hashed and self.faults.triggers("corrupt.counter-drift", f"#{request}")):
            self.num_cached_idle += len(hashed)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix. Return False, and change nothing, while any block is in use, as in vLLM."""
        if self.num_free < self.usable:
            return False
        by_group: defaultdict[int, list[int]] = defaultdict(list)
        for digest, block in self._by_digest.items():
            self.digests[block] = None
            by_group[kv_group_of(digest)].append(block)
        for digest, blocks in self._duplicates.items():
            for block in blocks:
                self.digests[block] = None
                by_group[kv_group_of(digest)].append(block)
        self._by_digest.clear()
        self._duplicates.clear()
        self.num_cached_idle = 0
        for group, blocks in by_group.items():
            self.log.evicted(blocks, Evict.RESET, group)
        return True

    def _forget(self, block: int, digest: bytes) -> None:
        self.digests[block] = None
        others = self._duplicates.get(digest)
        if self._by_digest.get(digest) == block:
            del self._by_digest[digest]
            if others:
                self._by_digest[digest] = others.pop(0)
        elif others:
            others.remove(block)
        if others is not None and not others:
            del self._duplicates[digest]
