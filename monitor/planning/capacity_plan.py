"""`monitor plan`: how large the KV pool is, how many requests it holds at once, and which settings follow.

requested   = device memory * gpu_memory_utilization
KV          = requested - weights - everything else       (or --kv-cache-memory-bytes itself)
blocks      = KV / bytes per block, rounded down, one of which is never allocated
at once     = usable blocks / blocks of one request, rounded down
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from ..base.errors import BadQuestion
from ..base.text import percent
from ..ledger.pool_account import share_of_pool
from .kv_pool import RESERVED_NULL_BLOCKS, EngineSettings, KvPool, pool_of
from .model_shape import ModelShape
from .plan_types import (
    GIB_BYTES,
    MAX_TOKENS,
    OTHER_BYTES,
    CapacityPlan,
    ExpectedLoad,
    LengthPoint,
    MemoryBudget,
    PlannedGroup,
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
        f"one request of that length takes {blocks:,} blocks, {percent(share_of_pool(blocks, sized.usable) or 0.0)} of"
        " the pool",
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


GROUP_AWARE_SINCE: Final = (0, 20)
"""Since then vLLM's `KV cache size` in tokens counts every group. Before, it was too low for several groups."""
SHORTEST_CHARTED: Final = 256
"""Tokens: concurrency over length is charted from here on, in doublings."""


class PoolToPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A pool of known geometry and size: of a model that will be served, or of an engine that runs."""

    model: str
    pool: KvPool
    settings: EngineSettings
    blocks: int
    max_model_len: int
    kv_bytes: int | None
    bytes_per_token: int | None
    budget: MemoryBudget = MemoryBudget()
    assumed: tuple[str, ...] = ()


def plan_capacity(
    shape: ModelShape, settings: EngineSettings, budget: MemoryBudget, demand: ExpectedLoad
) -> CapacityPlan:
    """Return the plan of a model. Raises BadQuestion for what makes no sense, with the remedy."""
    check_load(demand)
    pool = pool_of(shape, settings)
    kv_bytes, assumed = _kv_bytes(budget)
    blocks = kv_bytes // pool.bytes_per_block
    if blocks <= RESERVED_NULL_BLOCKS:
        raise BadQuestion(
            f"{planned_size(kv_bytes)} for KV hold {blocks} blocks of {pool.bytes_per_block:,} bytes, and one is"
            " never handed out: give the engine more memory, a smaller --block-size or an 8-bit --kv-cache-dtype"
        )
    return plan_of_pool(
        PoolToPlan(
            model=shape.family,
            pool=pool,
            settings=settings,
            blocks=blocks,
            max_model_len=shape.max_model_len,
            kv_bytes=kv_bytes,
            bytes_per_token=sum(layer.bytes_per_token for layer in shape.layers if layer.kind == "full attention"),
            budget=budget,
            assumed=(*assumed, *shape.assumed),
        ),
        demand,
    )


def plan_of_pool(given: PoolToPlan, demand: ExpectedLoad) -> CapacityPlan:
    """Return the plan of a pool. Raises BadQuestion for lengths that make no sense."""
    check_load(demand)
    pool, settings = given.pool, given.settings
    usable = given.blocks - RESERVED_NULL_BLOCKS
    length = demand.max_model_len or given.max_model_len
    if not length:
        raise BadQuestion(f"{given.model} has no maximum request length: give --max-model-len")
    tokens = demand.prompt + demand.output
    request = pool.blocks_of(tokens) if tokens else None
    shared = pool.shared_blocks(min(demand.shared_prefix, demand.prompt))
    at_once = usable // request if request else None
    sharing = (usable - shared) // (request - shared) if request and shared and request > shared else None
    longest = pool.longest(usable, min(length, MAX_TOKENS))
    most = at_once if sharing is None else sharing
    limited_by = _limit_of(most, demand.max_num_seqs)
    sized = SizedPool(
        pool=pool,
        usable=usable,
        longest=longest,
        max_model_len=length,
        request=request,
        shared=shared if sharing is not None else 0,
        at_once=most,
        limited_by=limited_by,
    )
    return CapacityPlan(
        model=given.model,
        release=".".join(map(str, settings.release)),
        kv_bytes=given.kv_bytes,
        device_bytes=given.budget.device,
        bytes_per_token=given.bytes_per_token,
        bytes_per_block=pool.bytes_per_block or None,
        block_size=pool.block_size,
        groups=_planned_groups(pool, length),
        blocks=given.blocks,
        usable_blocks=usable,
        pool_tokens=_pool_tokens(pool, settings, given.blocks, length),
        max_model_len=length,
        max_concurrency=given.blocks / pool.blocks_of(length),
        longest_request=longest,
        request_tokens=tokens or None,
        blocks_per_request=request,
        requests_at_once=at_once,
        requests_at_once_sharing=sharing,
        limited_by=limited_by,
        requests_by_length=[LengthPoint(size, usable // pool.blocks_of(size)) for size in _charted(length)],
        settings=advised_settings(sized, settings, given.budget, demand),
        assumed=list(given.assumed),
        notes=_plan_notes(pool, settings, longest, length, tokens),
    )


def _charted(length: int) -> list[int]:
    sizes = []
    size = SHORTEST_CHARTED
    while size < length:
        sizes.append(size)
        size *= 2
    return [*sizes, length]


def _planned_groups(pool: KvPool, length: int) -> list[PlannedGroup]:
    alike: dict[tuple[str, int, int], list[int]] = {}
    for group in pool.groups:
        key = group.kind.value, group.block_size, group.blocks_of(length, pool.in_flight)
        alike.setdefault(key, []).append(group.layers)
    return [PlannedGroup(kind, len(layers), max(layers), size, need) for (kind, size, need), layers in alike.items()]


def check_load(demand: ExpectedLoad) -> None:
    """Raise BadQuestion for a length that is negative or beyond every model."""
    for flag, value in (
        ("--prompt-len", demand.prompt),
        ("--output-len", demand.output),
        ("--shared-prefix", demand.shared_prefix),
        ("--max-model-len", demand.max_model_len),
        ("--max-num-seqs", demand.max_num_seqs),
    ):
        if not 0 <= value <= MAX_TOKENS:
            raise BadQuestion(f"{flag} is {value:,}: give 0 to {MAX_TOKENS:,}")


def _kv_bytes(budget: MemoryBudget) -> tuple[int, list[str]]:
    """Return the bytes for KV, and the assumptions."""
    if budget.kv is not None:
        return budget.kv, []
    if budget.device is None or budget.weights is None:
        lacking = "--device-memory" if budget.device is None else "--weights (the size of the model's files)"
        raise BadQuestion(f"the bytes for KV are not known: give {lacking}, --kv-cache-memory, or the engine's --log")
    if not 0 < budget.utilization <= 1:
        raise BadQuestion(f"--gpu-memory-utilization is a share above 0 and up to 1, not {budget.utilization:g}")
    other = OTHER_BYTES if budget.other is None else budget.other
    kv = int(budget.device * budget.utilization) - budget.weights - other
    if kv <= 0:
        raise BadQuestion(
            f"{planned_size(budget.weights)} of weights and {planned_size(other)} of other memory leave nothing for KV"
            f" of {planned_size(int(budget.device * budget.utilization))}: raise --gpu-memory-utilization, add"
            " tensor-parallel ranks, or quantize the weights"
        )
    assumptions = [] if budget.other is not None else [f"{planned_size(other)} for activations, graphs and libraries"]
    return kv, assumptions


def _pool_tokens(pool: KvPool, settings: EngineSettings, blocks: int, length: int) -> int:
    if settings.release < GROUP_AWARE_SINCE:
        return blocks // len(pool.groups) * min(group.block_size for group in pool.groups)
    return int(blocks / pool.blocks_of(length) * length)


def _limit_of(at_once: int | None, max_num_seqs: int) -> str | None:
    if at_once is None:
        return None
    return "--max-num-seqs" if 0 < max_num_seqs < at_once else "KV blocks"


def _plan_notes(pool: KvPool, settings: EngineSettings, longest: int, length: int, tokens: int) -> list[str]:
    found: list[str] = []
    if tokens > length:
        found.append(f"a request of {tokens:,} tokens is longer than --max-model-len {length:,}: vLLM rejects it")
    if longest < length:
        found.append(f"a request of {length:,} tokens does not fit: the longest that does has {longest:,}")
    if pool.block_size != settings.block_size:
        found.append(
            f"blocks have {pool.block_size} tokens, not {settings.block_size}: a block has room for a layer's state"
        )
    if settings.pipeline_parallel > 1 and len(pool.groups) > 1:
        found.append("with several groups of layers the share of a pipeline stage is an estimate")
    return found
