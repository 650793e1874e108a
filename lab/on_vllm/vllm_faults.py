"""Breaks vLLM's objects from outside, by the names of the fault table. Faults without a patch are loads alone."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, Final

from .vllm_engine import VllmEngine
from .vllm_mutations import Mutation

RETRY_FAULT_S: Final = 0.5
SOME: Final = 0.3
"""The share of requests that a fault hits."""
PROMOTIONS: Final = ("_handle_blocked_waiting_request", "_try_promote_blocked_waiting_request")
"""Methods that promote a parked request, since 0.31 and before."""


class Breaker:
    """Breaks `engine` as its draw has it."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self.vllm = engine.vllm
        self.manager = self.vllm.kv_cache_manager
        self.pool = self.manager.block_pool
        self.rng = random.Random(f"fault {engine.draw.base.seed}")

    def install(self) -> None:
        """Apply the patch of the drawn fault, if it has one."""
        patch = getattr(self, self.engine.draw.fault.replace("-", "_"), None)
        if self.engine.draw.fault and patch is not None:
            patch()

    def _some(self, _request: Any) -> bool:
        return self.rng.random() < SOME

    def _once(self, attempt: Callable[[], bool]) -> None:
        """Have `attempt` made in the first half of the episode, and again until it succeeds."""

        def again() -> None:
            if not attempt():
                self.engine.at(RETRY_FAULT_S, again)

        self.engine.at(self.rng.uniform(0.05, 0.5) * self.engine.draw.base.seconds, again)

    # ---------------------------------------------------------------- the connector

    def sending_never_reported(self) -> None:
        """Let some finished sends go unreported: vLLM #27073, dynamo #3730."""
        self.engine.other.never_sent = self._some

    def consumer_gone_until_lease(self) -> None:
        """Let some consumers never read the blocks, which their lease frees: vLLM #29906, #50425."""
        self.engine.other.never_sent = self._some

    def consumer_stops_renewing(self) -> None:
        """Let some consumers die while they renew the lease of blocks that they have not read."""
        self.engine.other.never_sent = self._some

    def aborted_load_never_reported(self) -> None:
        """Never end the fetches of clients that leave: vLLM #46283."""
        self.engine.other.never_ends = lambda request: request.request_id.startswith("g-")

    def load_never_ends(self) -> None:
        """Let some fetches never end: vLLM #35943."""
        self.engine.other.never_ends = self._some

    def idle_engine_never_polls(self) -> None:
        """Undo vLLM #41180: an engine without unfinished requests sleeps, whatever its connector has to report."""
        self.vllm.has_requests = lambda: self.vllm.has_unfinished_requests() or bool(self.vllm.finished_req_ids)

    def load_never_promoted(self) -> None:
        """Never promote some requests whose KV has arrived: vLLM #53130."""
        name = next(each for each in PROMOTIONS if hasattr(self.vllm, each))
        promote, refused = getattr(self.vllm, name), {}  # type: ignore[var-annotated]

        def refuse(request: Any) -> Any:
            remote = request.status.name == "WAITING_FOR_REMOTE_KVS"
            if remote and refused.setdefault(request.request_id, self._some(request)):
                return False
            return promote(request)

        setattr(self.vllm, name, refuse)

    def blocks_behind_fence(self) -> None:
        """Never free blocks that were freed behind a step in flight: vLLM #49675."""
        self.vllm.defer_block_free = True
        self.vllm._drain_deferred_frees = lambda: None

    def preempts_behind_fence(self) -> None:
        """Preempt requests whose blocks a step in flight still fences, so that more follow: vLLM #49674."""
        self.vllm.defer_block_free = True
        can_be_freed = getattr(self.vllm, "_request_blocks_can_be_freed", None)
        if can_be_freed is None:
            return  # releases before the fix
        free = self.vllm._free_request_blocks

        def free_as_before(request: Any) -> None:
            self.vllm._request_blocks_can_be_freed = can_be_freed
            free(request)
            self.vllm._request_blocks_can_be_freed = lambda _request: True

        self.vllm._request_blocks_can_be_freed = lambda _request: True
        self.vllm._free_request_blocks = free_as_before

    def loads_hold_the_pool(self) -> None:
        """Begin fetches without regard to what those before them still need: vLLM #45388."""
        self.vllm._inflight_prefill_reserved_blocks = lambda: 0

    # ---------------------------------------------------------------- blocks

    def freed_twice(self, when_full: bool = False) -> None:
        """Free blocks that a running request still has: vLLM #33377. when_full: others take the last ones soon."""

        def attempt() -> bool:
            if when_full and self.pool.get_num_free_blocks() > len(self.vllm.running):
                return False
            for request in self.vllm.running:
                table = self.manager.coordinator.single_type_managers[0].req_to_blocks.get(request.request_id, ())
                blocks = [block for block in table if not block.is_null][:2]
                if blocks:
                    self.pool.free_blocks(blocks)
                    return True
            return False

        self._once(attempt)

    def freed_in_a_full_pool(self) -> None:
        """Do the same as requests outgrow the pool, so that others soon get the blocks."""
        self.freed_twice(when_full=True)

    def counter_drifts(self) -> None:
        """Let the pool's counter of free blocks differ from its list: vllm-ascend #10048."""

        def attempt() -> bool:
            self.pool.free_block_queue.num_free_blocks -= 3
            return True

        self._once(attempt)

    def abort_skips_free(self) -> None:
        """Skip the free of aborted requests: sglang #6258."""
        free = self.manager.free

        def skip(request: Any) -> Any:
            if request.status.name != "FINISHED_ABORTED":
                return free(request)
            for one in self.manager.coordinator.single_type_managers:
                one.req_to_blocks.pop(request.request_id, None)
                one.num_cached_block.pop(request.request_id, None)
            return None

        self.manager.free = skip

    def ends_leave_a_block(self) -> None:
        """Leave the last block of some finished requests referenced."""
        free = self.manager.free

        def skip(request: Any) -> Any:
            table = self.manager.coordinator.single_type_managers[0].req_to_blocks.get(request.request_id)
            if table and request.is_finished() and self._some(request):
                del table[-1]
            return free(request)

        self.manager.free = skip

    def pins_never_dropped(self) -> None:
        """Pin cached blocks again and again, and never unpin them: vLLM #35931, LMCache #2951."""
        takes_groups = "tuple" in str(type(self.pool).touch.__annotations__)

        def pin() -> None:
            cached = [block for block in self.pool.blocks[1:2_000] if block.block_hash is not None]
            chosen = self.rng.sample(cached, min(len(cached), 2))
            if chosen:
                self.pool.touch((chosen,) if takes_groups else chosen)

        self.engine.time.every(self.engine.draw.base.seconds / 20, pin)

    def random_mutation(self) -> None:
        """Change the behaviour of one method, which the episode's number draws."""
        Mutation(self.engine, self.rng)

    # ---------------------------------------------------------------- requests and steps

    def grammar_never_compiled(self) -> None:
        """Let the grammar compiler hang: vLLM #45012."""
        self.engine.grammars.never_compiles = True

    def zero_tokens(self) -> None:
        """Lose the sampled tokens of a running request, which is then given 0 tokens in each step: vLLM #55427."""

        def attempt() -> bool:
            decoding = [request for request in self.vllm.running if request.output_token_ids]
            if decoding:
                self.engine.sampler.gives_nothing.add(self.rng.choice(decoding).request_id)
            return bool(decoding)

        self._once(attempt)

    def step_hangs(self) -> None:
        """Let a step never return: vLLM #56816."""
        most = max(self.engine.draw.base.steps / 3, 6)
        self.engine.hang_after = round(math.exp(self.rng.uniform(math.log(5), math.log(most))))

    def lost_from_queue(self) -> None:
        """Drop a running request, and one that waits, from the scheduler's queues."""

        def attempt() -> bool:
            if not self.vllm.running:
                return False
            self.vllm.running = self.vllm.running[1:]
            waiting = next(iter(self.vllm.waiting), None)
            if waiting is not None:
                self.vllm.waiting.remove_requests([waiting])
            return True

        self._once(attempt)
