"""A KV connector that keeps the KV of finished requests in host memory, block by block under its digest.

When a request ends, its full blocks stay in the pool until a worker thread has copied them out. Then `completed` names
the request and the pool gets them back. A later prompt with the same beginning finds them here when the pool has
forgotten them, and waits until the worker has copied them in. Its blocks are pinned for that time, and not evicted.

The worker only copies. The engine's thread alone changes and reads the store, which grows only in `completed`.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from itertools import islice
from queue import Queue, SimpleQueue
from typing import Final, NamedTuple

import torch

from kvscope.monitor.contract.event_log import EventLog
from kvscope.monitor.contract.kinds import Tier, TierOp

from ..blocks.prefix_hashes import public_hashes
from ..faults import Faults
from ..requests.request import Request
from .base import KVLoad

logger = logging.getLogger(__name__)

BLOCKS_DIM: Final = 2
"""Which dimension of what ModelRunner.gather gives counts the blocks."""


class _Copy(NamedTuple):
    """A request's blocks on their way out. The worker fills in `stored`."""

    request: int
    digests: list[bytes]
    blocks: list[int]
    stored: list[torch.Tensor]


class _HostFetch(NamedTuple):
    """Stored blocks on their way in."""

    request: int
    digests: list[bytes]
    blocks: list[int]
    stored: list[torch.Tensor]


class HostConnector:
    """Keeps at most `capacity` blocks, those used last.

    gather: ModelRunner.gather, a copy on the host of some blocks' KV, [layers, 2, blocks, ...]. It is called from the
    worker's thread, for blocks that nothing writes to until `completed` has named their request. scatter:
    ModelRunner.scatter, the way back, into blocks that no other request has. block_size: tokens in a block. log: for
    stores, pins and evictions. wake: called in the worker's thread when a fetch has ended.
    """

    def __init__(
        self,
        gather: Callable[[list[int]], torch.Tensor],
        scatter: Callable[[list[int], torch.Tensor], None],
        *,
        block_size: int,
        capacity: int,
        log: EventLog,
        wake: Callable[[], None] = lambda: None,
        faults: Faults | None = None,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"a host KV store of {capacity} blocks can keep nothing: it needs at least 1")
        self.polls = 0
        self.capacity = capacity
        self.log = log
        self.faults = faults or Faults()
        self._gather = gather
        self._scatter = scatter
        self._wake = wake
        self._block_size = block_size
        self._too_late: set[int] = set()
        self._stored: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._pins: Counter[bytes] = Counter()
        self._jobs: Queue[_Copy | _HostFetch | None] = Queue()
        self._copied: SimpleQueue[_Copy] = SimpleQueue()
        self._fetched: SimpleQueue[tuple[_HostFetch, bool]] = SimpleQueue()
        self._worker = threading.Thread(target=self._work, name="kvscope-host-kv", daemon=True)
        self._worker.start()

    @property
    def num_stored(self) -> int:
        """The blocks that it keeps now."""
        return len(self._stored)

    def find(self, request: Request, first: int, end: int) -> int:
        """See KVConnector: how many of these consecutive blocks are stored, by their digests."""
        wanted = request.digests[first:end]
        for count, digest in enumerate(wanted):
            if digest not in self._stored:
                return count
        return len(wanted)

    def start_load(self, load: KVLoad) -> None:
        """See KVConnector. Raises KeyError for what `find` did not find."""
        digests = load.request.digests[load.first : load.first + len(load.blocks)]
        for digest in reversed(digests):  # the beginning of a prefix is worth most: it goes last
            self._stored.move_to_end(digest)
        self._pins.update(digests)
        self._emit_tier(TierOp.PINNED, digests)
        kv = [self._stored[digest] for digest in digests]
        self._jobs.put(_HostFetch(load.request.number, digests, load.blocks, kv))

    def loaded(self) -> list[tuple[int, bool]]:
        """See KVConnector. The pins of a fetch that has ended are gone."""
        ended = []
        while not self._fetched.empty():
            fetch, delivered = self._fetched.get()
            if not self.faults.triggers("leak.external-pins", f"#{fetch.request}"):
                self._pins -= Counter(fetch.digests)
                self._emit_tier(TierOp.UNPINNED, fetch.digests)
            ended.append((fetch.request, delivered))
        return ended

    def request_finished(self, request: Request, blocks: list[int]) -> bool:
        """Copy out those of its full blocks that are not stored yet, if there are any and there is room for one."""
        full = request.num_computed_tokens // self._block_size
        wanted = [
            (digest, block)
            for digest, block in zip(request.digests[:full], blocks[:full], strict=True)
            if digest not in self._stored
        ]
        if not wanted or len(self._pins) >= self.capacity:
            return False
        self._jobs.put(_Copy(request.number, [d for d, _ in wanted], [b for _, b in wanted], []))
        return True

    def completed(self) -> list[int]:
        """Enter what the worker has copied, make room for it, and name its requests."""
        self.polls += 1
        done = []
        while not self._copied.empty():
            copy = self._copied.get()
            if copy.request in self._too_late:  # another request may have written to the blocks meanwhile
                self._too_late.remove(copy.request)
                continue
            self._enter(copy)
            done.append(copy.request)
        return done

    def lease_ended(self, number: int) -> None:
        """Forget the copy when it comes."""
        self._too_late.add(number)

    @property
    def num_pinned(self) -> int:
        """The stored blocks that are pinned for fetches."""
        return len(self._pins)

    @property
    def num_fetched(self) -> int:
        """The fetches that have ended and that `loaded` has not reported."""
        return self._fetched.qsize()

    @property
    def num_copied(self) -> int:
        """The copies that have ended and that `completed` has not reported."""
        return self._copied.qsize()

    def replace_jobs(self, jobs: Queue[_Copy | _HostFetch | None]) -> None:
        """Take jobs from this queue instead, before any was asked for: a lab's, in which they take virtual time."""
        self._jobs.put(None)
        self._worker.join()
        self._jobs = jobs
        self._worker = threading.Thread(target=self._work, name="kvscope-host-kv", daemon=True)
        self._worker.start()

    def settle(self) -> None:
        """Wait until all copies are done."""
        self._jobs.join()

    def close(self) -> None:
        """Finish the copies that were asked for, and stop."""
        self._jobs.put(None)
        self._worker.join()

    def _enter(self, copy: _Copy) -> None:
        new = [pair for pair in zip(copy.digests, copy.stored, strict=False) if pair[0] not in self._stored]
        for digest, kv in reversed(new):
            self._stored[digest] = kv
        if new:
            self._emit_tier(TierOp.STORED, [digest for digest, _ in new])
        surplus = max(0, len(self._stored) - self.capacity)
        gone = list(islice((digest for digest in self._stored if not self._pins[digest]), surplus))
        for digest in gone:
            del self._stored[digest]
        if gone:
            self._emit_tier(TierOp.EVICTED, gone)

    def _emit_tier(self, op: TierOp, digests: list[bytes]) -> None:
        self.log.tier(op, Tier.HOST, len(self._stored), self.capacity, public_hashes(digests))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, _Copy):
                self._copy_out(job)
                self._copied.put(job)
            else:
                self._fetched.put((job, self._copy_in(job)))
                self.log.fetch_ended(job.request)
                self._wake()
            self._jobs.task_done()

    def _copy_out(self, copy: _Copy) -> None:
        try:
            kv = self._gather(copy.blocks)
            # A copy each: an evicted block must not keep its neighbours' memory.
            copy.stored.extend(block.clone() for block in kv.unbind(BLOCKS_DIM))
        except RuntimeError:  # what torch raises, out of memory for one: the request's blocks must come back
            copy.stored.clear()
            logger.exception("the KV of a finished request could not be copied to the host and is not kept")

    def _copy_in(self, fetch: _HostFetch) -> bool:
        try:
            self._scatter(fetch.blocks, torch.stack(fetch.stored, dim=BLOCKS_DIM))
        except RuntimeError:
            logger.exception("stored KV could not be copied back from the host: it is computed again")
            return False
        return True
