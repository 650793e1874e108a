"""Reads the engine's own tables out to the event stream, a slice between two steps, so that no step ever waits for a
walk over the pool. The sum of the events can then be compared with the engine's real state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count

from kvscope.monitor.contract.kinds import Holder

from ..requests.request import Request
from .block_pool import NULL_BLOCK_COUNT
from .kv_cache_manager import KVCacheManager

REQUESTS_A_SLICE = 16


class TableAuditor:
    """Audits `manager` and its pool. `requests` are all that the scheduler knows, `deferred` those of them whose
    blocks outlive their end, with their lease deadline in monotonic ns (0: none).
    """

    def __init__(self, manager: KVCacheManager, requests: Mapping[int, Request], deferred: Mapping[int, int]) -> None:
        self.manager = manager
        self.requests = requests
        self.deferred = deferred
        # A whole cycle in about a thousand slices at most: some seconds of steps for the largest pools.
        self.blocks_a_slice = max(64, manager.pool.total // 1000)
        self.cycles = 0
        """The number of complete audits."""
        self._slices = self._forever()

    def slice(self) -> None:
        """Read out the next slice. After the last one a new cycle begins."""
        next(self._slices)

    def whole(self) -> None:
        """Read out one cycle at once: for tests."""
        for _ in self._cycle(0):
            pass

    def _forever(self) -> Iterator[None]:
        for cycle in count(1):
            yield from self._cycle(cycle)
            self.cycles = cycle

    def _cycle(self, cycle: int) -> Iterator[None]:
        """Read one cycle, stopping after each slice."""
        pool, log = self.manager.pool, self.manager.pool.log
        log.audit_begin(cycle)
        yield
        for first in range(NULL_BLOCK_COUNT, pool.total, self.blocks_a_slice):
            self._blocks(first)
            yield
        numbers = list(self.requests)
        audited = 0
        for start in range(0, len(numbers), REQUESTS_A_SLICE):
            present = [n for n in numbers[start : start + REQUESTS_A_SLICE] if n in self.requests]
            self._requests(present)
            audited += len(present)
            yield
        self._fenced()
        log.audit_end(cycle, *pool.counts()[:3], audited)
        yield

    def _blocks(self, first: int) -> None:
        pool = self.manager.pool
        end = min(first + self.blocks_a_slice, pool.total)
        refs, queued, digests = pool.refs[first:end], pool.free_queue.has_each(first, end), pool.digests[first:end]
        if all(queued) and not (any(refs) or any(digests)):
            packed = [2] * len(refs)  # as most of a large pool, which takes a tenth of the time
        else:
            columns = zip(refs, queued, digests, strict=True)
            packed = [count * 4 + free * 2 + (digest is not None) for count, free, digest in columns]
        pool.log.audit_blocks(first, packed)

    def _requests(self, numbers: list[int]) -> None:
        for number in numbers:
            request = self.requests[number]
            lease = self.deferred.get(number)
            # The first group last: with it, a reader has the whole request.
            for group, blocks in reversed(list(enumerate(self.manager.held(number)))):
                self.manager.pool.log.audit_request(
                    number,
                    request.id,
                    request.status,
                    request.num_computed_tokens,
                    len(request.output_token_ids),
                    blocks,
                    holder=0 if lease is None else Holder.CONNECTOR,
                    lease_deadline_ns=lease or 0,
                    group=group,
                )

    def _fenced(self) -> None:
        for fence, request, held, _ in self.manager.fenced:
            for group, blocks in enumerate(held):
                self.manager.pool.log.audit_request(
                    request.number,
                    request.id,
                    request.status,
                    request.num_computed_tokens,
                    len(request.output_token_ids),
                    blocks,
                    holder=Holder.FENCE,
                    fence=fence,
                    detached=True,
                    group=group,
                )
