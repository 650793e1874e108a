"""The queue of free blocks in eviction order: the front is handed out next.

A doubly linked list threaded through two lists of ints, so that a prefix hit can take a block out of the middle in
O(1), and nothing is allocated while serving.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

_NOT_IN_QUEUE = -1


class FreeQueue:
    """Blocks 0 to `capacity` - 1, of which `initial` are in the queue to begin with, in that order."""

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
