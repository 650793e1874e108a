"""A KV connector that keeps the KV of finished requests in host memory, block by block under its digest.

When a request ends, its full blocks stay in the pool until a worker thread has copied them out; then `completed`
names the request and the pool gets them back. A later prompt with the same beginning finds them here when the pool
has forgotten them, and the engine copies them in before the step.

The worker only copies. What is stored is changed and read by the engine's thread alone, and grows only in
`completed`, so what `find` promised is there when `load` asks for it in the same pass.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final, NamedTuple

import torch

from engine.blocks.hashing import public_hash
from engine.connectors.base import KVLoad
from engine.request import Request
from monitor.events.kinds import Tier, TierOp
from monitor.events.log import EventLog

logger = logging.getLogger(__name__)

BLOCKS_DIM: Final = 2
"""Which dimension of what ModelRunner.gather gives counts the blocks."""


class _Copy(NamedTuple):
    """A request's blocks on their way out; `stored` is filled in by the worker."""

    request: int
    digests: list[bytes]
    blocks: list[int]
    stored: list[torch.Tensor]


class HostConnector:
    """Keeps at most `capacity` blocks, those used last.

    gather: ModelRunner.gather, a copy on the host of some blocks' KV, [layers, 2, blocks, ...]; it is called from the
    worker's thread, for blocks that nothing writes to until `completed` has named their request.
    block_size: tokens in a block. log: where stores and evictions are said.
    """

    def __init__(
        self, gather: Callable[[list[int]], torch.Tensor], *, block_size: int, capacity: int, log: EventLog
    ) -> None:
        if capacity < 1:
            raise ValueError(f"a host KV store of {capacity} blocks can keep nothing: it needs at least 1")
        self.polls = 0
        self.capacity = capacity
        self.log = log
        self._gather = gather
        self._block_size = block_size
        self._too_late: set[int] = set()
        self._stored: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._jobs: SimpleQueue[_Copy | None] = SimpleQueue()
        self._copied: SimpleQueue[_Copy] = SimpleQueue()
        self._worker = threading.Thread(target=self._work, name="kvscope-host-kv", daemon=True)
        self._worker.start()

    @property
    def num_stored(self) -> int:
        """How many blocks it keeps now."""
        return len(self._stored)

    def find(self, digests: list[bytes]) -> int:
        """How many of these consecutive blocks are stored, from the first on."""
        for count, digest in enumerate(digests):
            if digest not in self._stored:
                return count
        return len(digests)

    def load(self, load: KVLoad) -> torch.Tensor:
        """The KV that `find` found, as ModelRunner.scatter takes it. Raises KeyError for a digest not stored."""
        for digest in reversed(load.digests):  # the beginning of a prefix is worth most: it goes last
            self._stored.move_to_end(digest)
        return torch.stack([self._stored[digest] for digest in load.digests], dim=BLOCKS_DIM)

    def request_finished(self, request: Request, blocks: list[int]) -> bool:
        """Copy out those of its full blocks that are not stored yet, if there are any."""
        full = request.num_computed_tokens // self._block_size
        wanted = [
            (digest, block)
            for digest, block in zip(request.digests[:full], blocks[:full], strict=True)
            if digest not in self._stored
        ]
        if not wanted:
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

    def close(self) -> None:
        """Finish the copies that were asked for, and stop."""
        self._jobs.put(None)
        self._worker.join()

    def _enter(self, copy: _Copy) -> None:
        new = [pair for pair in zip(copy.digests, copy.stored, strict=False) if pair[0] not in self._stored]
        for digest, kv in reversed(new):
            self._stored[digest] = kv
        if new:
            self._say(TierOp.STORED, [digest for digest, _ in new])
        gone = [self._stored.popitem(last=False)[0] for _ in range(len(self._stored) - self.capacity)]
        if gone:
            self._say(TierOp.EVICTED, gone)

    def _say(self, op: TierOp, digests: list[bytes]) -> None:
        self.log.tier(op, Tier.HOST, len(self._stored), self.capacity, [public_hash(digest) for digest in digests])

    def _work(self) -> None:
        while (copy := self._jobs.get()) is not None:
            try:
                kv = self._gather(copy.blocks)
                # A copy each: an evicted block must not keep its neighbours' memory.
                copy.stored.extend(block.clone() for block in kv.unbind(BLOCKS_DIM))
            except RuntimeError:  # what torch raises, out of memory for one: the request's blocks must come back
                copy.stored.clear()
                logger.exception("the KV of a finished request could not be copied to the host and is not kept")
            self._copied.put(copy)
