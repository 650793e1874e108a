"""How many blocks a request needs, in each KV cache group: what vLLM's own coordinator answers.

A group with a sliding window, chunked attention or Mamba layers recycles blocks, so it never needs as many as all
tokens fill. From 0.24 on vLLM itself caps what it asks for. For earlier releases the spec determines the cap.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Final

MAMBA_RUNNING_BLOCKS: Final = 1
_ASKED: Final = frozenset(
    (
        "request_id",
        "num_tokens",
        "new_computed_blocks",
        "num_encoder_tokens",
        "total_computed_tokens",
        "num_local_computed_tokens",
        "num_tokens_main_model",
        "apply_admission_cap",
        "prefill_end",
    )
)


class BlocksNeeded:
    """Answers for `scheduler`, which has just been made."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        self._coordinator = self._manager.coordinator
        self._managers = self._coordinator.single_type_managers
        self.no_blocks: tuple[Sequence[Any], ...] = tuple([] for _ in self._managers)
        self._max_tokens: int = scheduler.max_num_scheduled_tokens
        self._max_model_len: int = scheduler.max_model_len
        pool = self._manager.block_pool
        self._groups = [
            (int(manager.block_size), _cap(manager, self._max_tokens))
            for manager in self._managers
            if getattr(manager, "block_pool", pool) is pool
        ]
        """Block size and most blocks of a request, of the KV cache groups in this pool."""
        self._takes = _takes(self._coordinator)
        self._align = scheduler._mamba_block_aligned_split if aligns_chunks(scheduler) else None
        self._watermark: int = getattr(self._manager, "watermark_blocks", 0)
        self._whole = bool(getattr(scheduler, "scheduler_reserve_full_isl", False))

    def from_scratch(self, tokens: int) -> int:
        """For a request of so many tokens that holds nothing yet, all KV cache groups together."""
        return sum(min(-(-tokens // size), cap) for size, cap in self._groups)

    def to_grow(self, request: Any, tokens: int) -> int:
        """Blocks beyond those it has, for a running request that is to compute so many tokens more."""
        lookahead = getattr(self._scheduler, "num_lookahead_tokens", 0)
        computed: int = request.num_computed_tokens
        slots = min(computed + tokens + lookahead, self._max_model_len)
        return self._ask(request, slots, computed + tokens, computed, computed, self.no_blocks, False)

    def to_admit(self, request: Any, budget: int, hit: tuple[tuple[Sequence[Any], ...], int], external: int) -> int:
        """Free blocks at which the scheduler would have admitted this waiting request in the last pass.

        budget: tokens that were left of the step. hit: the cached blocks that the pass found for it, and their
        tokens. external: tokens that its connector would load.
        """
        scheduler = self._scheduler
        blocks, local_tokens = hit
        local = request.num_computed_tokens + local_tokens
        computed = min(local + external, self._max_model_len)
        watermark = self._watermark if scheduler.running else 0
        needed = 0
        if self._whole:
            whole = min(request.num_tokens, self._max_model_len)
            needed = self._ask(request, whole, whole, computed, local, blocks, True)
        if external:
            chunk, reserved = 0, self._reserved()
        else:
            chunk, reserved = self.chunk(request, budget, local_tokens), 0
        lookahead = 0 if external else getattr(scheduler, "num_lookahead_tokens", 0)
        slots = min(computed + chunk + lookahead, self._max_model_len)
        now = self._ask(request, slots, computed + chunk, local + external, local, blocks, False)
        return max(needed, now + reserved) + watermark

    def chunk(self, request: Any, budget: int, local_tokens: int, external: int = 0) -> int:
        """Return the tokens of it that a step would compute, or 0 if so few must not be computed, to end where state is
        cached.

        local_tokens: those that the pass found in the prefix cache.
        """
        computed = request.num_computed_tokens + local_tokens + external
        tokens: int = min(request.num_tokens - computed, budget, self._longest_chunk())
        return tokens if self._align is None else int(self._align(request, tokens, local_tokens, external))

    def _longest_chunk(self) -> int:
        threshold: int = getattr(self._scheduler.scheduler_config, "long_prefill_token_threshold", 0)
        return threshold if threshold > 0 else self._max_tokens

    def _reserved(self) -> int:
        """Return the blocks that vLLM keeps free for loads in progress, from 0.23 on."""
        count = getattr(self._scheduler, "_inflight_prefill_reserved_blocks", None)
        if count is None:
            return 0
        return int(count()) + int(getattr(self._scheduler, "_spec_decode_step_blocks", 0))

    def _ask(
        self,
        request: Any,
        tokens: int,
        main_tokens: int,
        computed: int,
        local: int,
        blocks: tuple[Sequence[Any], ...],
        capped: bool,
    ) -> int:
        known = {
            "request_id": request.request_id,
            "num_tokens": tokens,
            "new_computed_blocks": blocks,
            "num_encoder_tokens": 0,
            "total_computed_tokens": computed,
            "num_local_computed_tokens": local,
            "num_tokens_main_model": main_tokens,
            "apply_admission_cap": capped,
            "prefill_end": max(request.num_prompt_tokens, request.num_tokens - 1),
        }
        needed: int = self._coordinator.get_num_blocks_to_allocate(**{name: known[name] for name in self._takes})
        return needed


def aligns_chunks(scheduler: Any) -> bool:
    """Whether it cuts chunks of prompts to whole blocks, for the sake of Mamba layers."""
    return bool(getattr(scheduler, "need_mamba_block_aligned_split", False))


def _takes(coordinator: Any) -> frozenset[str]:
    """Return the arguments of this release. Raises AttributeError if it asks for one that is not known."""
    parameters = inspect.signature(coordinator.get_num_blocks_to_allocate).parameters
    unknown = [name for name, one in parameters.items() if one.default is one.empty and name not in _ASKED]
    if unknown:
        raise AttributeError(f"get_num_blocks_to_allocate takes {', '.join(unknown)}")
    return frozenset(parameters) & _ASKED


def _cap(manager: Any, max_tokens: int) -> int:
    """Return the most blocks that one request ever holds in this group."""
    cap: int | None = getattr(manager, "max_admission_blocks_per_request", None)
    if cap is not None:
        return cap
    spec = manager.kv_cache_spec
    kind, size = type(spec).__name__, int(manager.block_size)
    window = int(getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None) or 0)
    if kind.startswith("Mamba"):
        if getattr(spec, "mamba_cache_mode", "none") == "all":
            return 1 << 62
        aligned = getattr(spec, "mamba_cache_mode", "none") == "align"
        return MAMBA_RUNNING_BLOCKS + aligned + int(getattr(spec, "num_speculative_blocks", 0))
    if kind.startswith(("SlidingWindow", "ChunkedLocal")) and window:
        return -(-(window - 1 + max_tokens) // size) + 1
    return 1 << 62
