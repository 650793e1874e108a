"""The settings that follow from a pool: each with its value, its cost, and whether it limits the requests at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from kvscope.monitor.planning.kv_pool import RESERVED_NULL_BLOCKS, EngineSettings, KvPool
from kvscope.monitor.planning.plan_types import (
    GIB_BYTES,
    OTHER_BYTES,
    ExpectedLoad,
    MemoryBudget,
    PlannedSetting,
    planned_size,
)

TOKENS_MORE: Final = 1024
"""The cost of --max-num-batched-tokens is given for so many more."""
SHARE_STEP: Final = 0.01


class SizedPool(msgspec.Struct, frozen=True, kw_only=True):
    """A pool and the requests that it holds. request, shared: blocks of one request, and those it shares."""

    pool: KvPool
    usable: int
    longest: int
    max_model_len: int
    request: int | None
    shared: int
    at_once: int | None
    limited_by: str | None


def advised_settings(
    sized: SizedPool, settings: EngineSettings, budget: MemoryBudget, demand: ExpectedLoad
) -> list[PlannedSetting]:
    """Return every setting that follows, those that a request needs to start first."""
    return [
        *_model_length(sized),
        *_sequences(sized, demand),
        *_batched_tokens(sized, settings),
        *_memory_settings(sized, budget),
    ]


def _model_length(sized: SizedPool) -> Iterator[PlannedSetting]:
    length = min(sized.longest, sized.max_model_len)
    if not length:
        return
    is_too_long = sized.longest < sized.max_model_len
    blocks = sized.pool.blocks_of(length)
    yield PlannedSetting(
        "--max-model-len",
        str(length),
        "no longer request fits into the pool, and vLLM refuses to start with a longer one"
        if is_too_long
        else "the longest request that the model takes fits into the pool",
        f"one request of that length takes {blocks:,} blocks, {100 * blocks / sized.usable:.3g} % of the pool",
        is_too_long,
    )


def _sequences(sized: SizedPool, demand: ExpectedLoad) -> Iterator[PlannedSetting]:
    if not sized.at_once:
        return
    yield PlannedSetting(
        "--max-num-seqs",
        str(sized.at_once),
        f"requests of {demand.prompt + demand.output:,} tokens that fit at once"
        + (f", and {demand.max_num_seqs:,} may run now" if demand.max_num_seqs else ""),
        "a higher value admits requests that preempt each other, a lower one leaves blocks unused",
        sized.limited_by == "--max-num-seqs",
    )


def _batched_tokens(sized: SizedPool, settings: EngineSettings) -> Iterator[PlannedSetting]:
    windows = [group for group in sized.pool.groups if group.reach]
    per_step = sum(-(-TOKENS_MORE // group.block_size) for group in windows)
    yield PlannedSetting(
        "--max-num-batched-tokens",
        str(settings.max_num_batched_tokens),
        "as given: a larger value shortens prefill and lengthens the steps between two tokens",
        f"{TOKENS_MORE:,} more take up to {per_step} blocks of every running request in windows and chunks, and"
        " activations in proportion"
        if windows
        else "activations grow in proportion, and the pool shrinks by as much",
    )


def _memory_settings(sized: SizedPool, budget: MemoryBudget) -> Iterator[PlannedSetting]:
    pool = sized.pool
    if not pool.bytes_per_block:
        return
    kv = (sized.usable + RESERVED_NULL_BLOCKS) * pool.bytes_per_block
    limits = sized.limited_by == "KV blocks"
    yield PlannedSetting(
        "--kv-cache-memory-bytes",
        str(kv),
        "this pool, whatever the profile finds",
        _worth(sized, GIB_BYTES, "each GiB more"),
        limits,
    )
    if budget.device is None or budget.weights is None:
        return
    other = OTHER_BYTES if budget.other is None else budget.other
    share = (kv + budget.weights + other) / budget.device
    step = _worth(sized, int(SHARE_STEP * budget.device), f"each {SHARE_STEP:g} more")
    yield PlannedSetting("--gpu-memory-utilization", f"{min(share, 1):.3f}", "the same pool as a share", step, limits)
    static = (kv + budget.weights) / budget.device
    yield PlannedSetting(
        "--mem-fraction-static", f"{static:.3f}", "the same pool in SGLang: weights and KV", step, limits
    )


def _worth(sized: SizedPool, size: int, of_what: str) -> str:
    blocks = size // sized.pool.bytes_per_block
    text = f"{of_what} takes {planned_size(size)} and adds {blocks:,} blocks"
    own = sized.request - sized.shared if sized.request else 0
    return f"{text}, {blocks / own:,.{1 if blocks < 100 * own else 0}f} such requests" if own else text
