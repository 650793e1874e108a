"""The shared state of the hooks of one probe: vLLM's objects, and the requests that the probe tracks beside them."""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

from ...contract.kinds import Cause, Release, Status
from .blocks_needed import BlocksNeeded

RESERVED_BLOCKS: Final = 1
"""vLLM's null block, which is block 0 and never handed out."""
INTERNAL_SUFFIX: Final = re.compile(r"-[0-9a-f]{8}$")
"""The suffix that vLLM appends to a client's request id (from 0.14 on) to make its own."""
STATUS_BY_NAME: Final = {status.name: status for status in Status} | {
    "WAITING_FOR_FSM": Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
}
"""By vLLM's names: its numbers shift between releases."""
BLOCKED_STATUSES: Final = (
    Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
    Status.WAITING_FOR_REMOTE_KVS,
    Status.WAITING_FOR_STREAMING_REQ,
)
ENDED_NUMBERS: Final = 512
"""Ended requests whose numbers are kept, for a free that comes after the end: those of many steps."""
WAITING_QUEUES: Final = ("kv_holding_waiting", "skipped_waiting", "waiting")


class ProbeState:
    """`scheduler` and what is known of its requests. Only the engine's thread writes to it.

    Raises AttributeError if the scheduler is not of a shape that the probe knows.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.manager = scheduler.kv_cache_manager
        self.pool = self.manager.block_pool
        self.free_queue = self.pool.free_block_queue
        self.total: int = self.pool.num_gpu_blocks
        self.usable = self.total - RESERVED_BLOCKS
        self.numbers: dict[str, int] = {}
        """By vLLM's request id, which is not the one that clients know."""
        self.ended: dict[str, int] = {}
        """The numbers of the last requests that vLLM has dropped."""
        self.deferred: dict[str, int] = {}
        """Finished requests whose blocks the connector still needs, with their lease deadline (0: none)."""
        self.detached: dict[int, deque[tuple[int, Release]]] = {}
        """Blocks that wait for a step in flight to end: whose they were, and why they were freed."""
        self.pins: dict[int, int] = {}
        """How many references to a block something other than a request has taken."""
        self.lookups: dict[str, tuple[tuple[Any, ...], int]] = {}
        """Hits of this pass in the prefix cache for waiting requests: blocks of each group, and tokens."""
        self.matches: dict[str, int | None] = {}
        """How many tokens the connector would load for them, or None while that is unknown."""
        self.without_encoder: set[str] = set()
        """Requests for whose next image this pass had no encoder budget or cache left."""
        self.popped: set[str] = set()
        """Requests that this pass took from their queue: those still waiting were put back."""
        self.blocked: dict[str, tuple[Any, Status]] = {}
        """Requests that wait for something outside the scheduler, and the status in which they do."""
        self.preempted: set[str] = set()
        self.without_token: dict[str, Any] = {}
        self.passed_over: dict[str, tuple[Cause, int, int]] = {}
        """By request: why passes left it out, at how many computed tokens, and how often in a row."""
        self.gave_blocks: list[str] = []
        """Requests that the pool gave blocks in this pass of the scheduler, and perhaps in some before."""
        self.preempted_in_pass = False
        self.free_before_copies: int | None = None
        """Blocks that were free in this pass of the scheduler before it freed those that it kept for copies on write,
        or None if it kept none.
        """
        self.release_reason: Release | None = None
        """Why blocks are freed by the call that is under way."""
        self.launched: deque[tuple[Any, ...]] = deque()
        """Steps whose output has not come yet: kind, number, launch time, requests, tokens, vLLM's output, limit."""
        self.updating: object = None
        """The step whose output the scheduler received last, where vLLM does not count tokens in flight."""
        self.step = 0
        self.counts_in_flight = requests_count_in_flight()
        self._names: dict[str, int] = {}
        numbers = itertools.count(1)
        self.next_number: Callable[[str], int] = lambda _request_id: next(numbers)
        """Numbers a new request, by vLLM's id."""
        pool, managers = self.pool, self.manager.coordinator.single_type_managers
        self.managers = [manager for manager in managers if getattr(manager, "block_pool", pool) is pool]
        """Managers of the KV cache groups in this pool: some releases have groups with a pool of their own, in host
        memory.
        """
        self.needed = BlocksNeeded(scheduler)
        self.queue_names = [name for name in WAITING_QUEUES if hasattr(scheduler, name)]

    def track(self, request_id: str) -> int:
        """Return the number of a new request."""
        number = self.numbers[request_id] = self.next_number(request_id)
        self._names.setdefault(INTERNAL_SUFFIX.sub("", request_id), number)
        return number

    def forget(self, request_id: str) -> None:
        """Drop a request that vLLM has dropped."""
        number, name = self.numbers.pop(request_id), INTERNAL_SUFFIX.sub("", request_id)
        if self._names.get(name) == number:
            del self._names[name]
        self.ended[request_id] = number
        if len(self.ended) > ENDED_NUMBERS:
            del self.ended[next(iter(self.ended))]

    def name(self, request_id: str) -> str:
        """Return the id that the client knows, unless another live request has it too."""
        name = INTERNAL_SUFFIX.sub("", request_id)
        return name if self._names.get(name) == self.numbers[request_id] else request_id

    def is_taken(self, name: str, request_id: str) -> bool:
        """Whether a living request other than this one has the client's id."""
        return self._names.get(name) not in (None, self.numbers.get(request_id))

    def queues(self) -> list[Any]:
        """Return the waiting queues that this release has, first served first."""
        scheduler = self.scheduler
        return [getattr(scheduler, name) for name in self.queue_names]

    def in_pool(self, blocks: Iterable[Any]) -> list[Any]:
        """Return the blocks that this pool handed out. The null block is its own."""
        pool = self.pool
        return [block for block in blocks if not block.is_null and getattr(block, "pool", pool) in (pool, None)]

    def blocks_of(self, request_id: str) -> list[int]:
        """Return the request's block table, of all KV cache groups."""
        tables = [manager.req_to_blocks.get(request_id, ()) for manager in self.managers]
        return [block.block_id for table in tables for block in table if not block.is_null]

    def named_references(self, block: int) -> int:
        """How many references vLLM's own tables have to the block. It reads all tables: for rare cases."""
        tables = (table for manager in self.managers for table in list(manager.req_to_blocks.values()))
        return sum(one.block_id == block for table in tables for one in table)

    def computed(self, request: Any) -> int:
        """Tokens whose KV is there: vLLM counts what steps in flight compute too."""
        total: int = request.num_computed_tokens
        return max(0, total - self.in_flight(request))

    def in_flight(self, request: Any) -> int:
        """Tokens that steps in flight compute for the request."""
        if self.counts_in_flight:
            tokens: int = request.num_in_flight_tokens
            return tokens
        steps = (output for *_, output, _ in self.launched if output is not self.updating)
        return sum(output.num_scheduled_tokens.get(request.request_id, 0) for output in steps)

    def counts(self) -> tuple[int, int, int, int]:
        """Return the pool's own counts: free, cached-idle (-1: vLLM does not count it), used, total."""
        free: int = self.free_queue.num_free_blocks
        return free, -1, self.usable - free, self.total


def requests_count_in_flight() -> bool:
    """Whether requests of this vLLM count what steps in flight compute: from 0.26 on."""
    from vllm.v1.request import Request

    return "num_in_flight_tokens" in Request.__init__.__code__.co_names


def status_of(request: Any) -> Status:
    """Return the request's status, by vLLM's name for it."""
    return STATUS_BY_NAME[request.status.name]


def flat_blocks(blocks: Iterable[Any]) -> Iterable[Any]:
    """Blocks, or lists of them by KV cache group, as releases up to 0.12 have it."""
    for one in blocks:
        if hasattr(one, "block_id"):
            yield one
        else:
            yield from one
