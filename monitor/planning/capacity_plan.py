"""`monitor plan`: how large the KV pool is, how many requests it holds at once, and which settings follow.

requested   = device memory * gpu_memory_utilization
KV          = requested - weights - everything else       (or --kv-cache-memory-bytes as it is)
blocks      = KV / bytes per block, rounded down; one of them is never handed out
at once     = usable blocks / blocks of one request, rounded down
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from kvscope.monitor.errors import BadQuestion
from kvscope.monitor.planning.kv_pool import RESERVED_NULL_BLOCKS, EngineSettings, KvPool, pool_of
from kvscope.monitor.planning.model_shape import ModelShape

GIB_BYTES: Final = 1 << 30
OTHER_BYTES: Final = 2 * GIB_BYTES
"""Taken for activations, graphs and libraries where nothing was measured; the plan says so."""
GROUP_AWARE_SINCE: Final = (0, 20)
"""Since then vLLM's `KV cache size` in tokens counts every group; before, it was too low for several groups."""
MAX_TOKENS: Final = 1 << 30


class MemoryBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on one device. `device` and `weights` are not needed if `kv` is given."""

    device: int | None = None
    free_at_start: int | None = None
    utilization: float = 0.9
    weights: int | None = None
    other: int | None = None
    """Activations, graphs, libraries: everything but weights and KV."""
    kv: int | None = None
    source: str = "assumed"
    """Where weights and `other` come from: measured in a log, or assumed."""


class ExpectedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The requests that are expected, in tokens."""

    prompt: int = 0
    output: int = 0
    shared_prefix: int = 0
    max_model_len: int = 0
    """0: the model's own."""
    max_num_seqs: int = 0
    """0: not limited."""


class PlannedSetting(msgspec.Struct, frozen=True):
    """A flag, the value that follows, and why."""

    flag: str
    value: str
    why: str


class PlannedGroup(msgspec.Struct, frozen=True):
    """A KV cache group: layers that share a block table."""

    kind: str
    groups: int
    """So many alike."""
    layers: int
    """Of the largest of them."""
    block_size: int
    blocks_at_full_length: int


class CapacityPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan for one rank. Sizes in bytes; lengths in tokens. Null: not asked for, or not known."""

    schema_version: str = "1.0"
    model: str
    release: str
    kv_bytes: int
    device_bytes: int | None
    bytes_per_token: int
    """That a long request adds with each token: windows and states add none."""
    bytes_per_block: int
    block_size: int
    groups: list[PlannedGroup]
    blocks: int
    usable_blocks: int
    pool_tokens: int
    """As vLLM prints it: "KV cache size"."""
    max_model_len: int
    max_concurrency: float
    """As vLLM prints it: requests of max_model_len at once."""
    longest_request: int
    request_tokens: int | None
    blocks_per_request: int | None
    requests_at_once: int | None
    requests_at_once_sharing: int | None
    limited_by: str | None
    settings: list[PlannedSetting]
    assumed: list[str]
    notes: list[str]


class _Lengths(NamedTuple):
    usable_blocks: int
    longest: int
    max_model_len: int
    at_once: int | None


def plan_capacity(
    shape: ModelShape, settings: EngineSettings, budget: MemoryBudget, demand: ExpectedLoad
) -> CapacityPlan:
    """Return the plan. Raises BadQuestion for what makes no sense, with the remedy."""
    _check_load(demand)
    pool = pool_of(shape, settings)
    kv_bytes, assumed = _kv_bytes(budget)
    blocks = kv_bytes // pool.bytes_per_block
    usable = blocks - RESERVED_NULL_BLOCKS
    if usable < 1:
        raise BadQuestion(
            f"{_size_text(kv_bytes)} for KV hold {blocks} blocks of {pool.bytes_per_block:,} bytes, and one is"
            " never handed out: give the engine more memory, a smaller --block-size or an 8-bit --kv-cache-dtype"
        )
    length = demand.max_model_len or shape.max_model_len
    if not length:
        raise BadQuestion(f"{shape.family} does not say how long a request may be: give --max-model-len")
    tokens = demand.prompt + demand.output
    request = pool.blocks_of(tokens) if tokens else None
    shared = pool.shared_blocks(min(demand.shared_prefix, demand.prompt))
    at_once = usable // request if request else None
    sharing = (usable - shared) // (request - shared) if request and shared and request > shared else None
    longest = pool.longest(usable, min(length, MAX_TOKENS))
    full = pool.blocks_of(length)
    return CapacityPlan(
        model=shape.family,
        release=".".join(map(str, settings.release)),
        kv_bytes=kv_bytes,
        device_bytes=budget.device,
        bytes_per_token=sum(layer.bytes_per_token for layer in shape.layers if layer.kind == "full attention"),
        bytes_per_block=pool.bytes_per_block,
        block_size=pool.block_size,
        groups=_planned_groups(pool, length),
        blocks=blocks,
        usable_blocks=usable,
        pool_tokens=_pool_tokens(pool, settings, blocks, length),
        max_model_len=length,
        max_concurrency=blocks / full,
        longest_request=longest,
        request_tokens=tokens or None,
        blocks_per_request=request,
        requests_at_once=at_once,
        requests_at_once_sharing=sharing,
        limited_by=_limit_of(at_once if sharing is None else sharing, demand.max_num_seqs),
        settings=_planned_settings(
            pool, settings, budget, demand, _Lengths(usable, longest, length, sharing or at_once)
        ),
        assumed=[*assumed, *shape.assumed],
        notes=_plan_notes(pool, settings, longest, length),
    )


def _planned_groups(pool: KvPool, length: int) -> list[PlannedGroup]:
    alike: dict[tuple[str, int, int], list[int]] = {}
    for group in pool.groups:
        key = group.kind.value, group.block_size, group.blocks_of(length, pool.in_flight)
        alike.setdefault(key, []).append(group.layers)
    return [PlannedGroup(kind, len(layers), max(layers), size, need) for (kind, size, need), layers in alike.items()]


def _check_load(demand: ExpectedLoad) -> None:
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
    """The bytes for KV, and what was taken for granted."""
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
            f"{_size_text(budget.weights)} of weights and {_size_text(other)} of other memory leave nothing for KV of"
            f" {_size_text(int(budget.device * budget.utilization))}: raise --gpu-memory-utilization, add"
            " tensor-parallel ranks, or quantize the weights"
        )
    said = [] if budget.other is not None else [f"{_size_text(other)} for activations, graphs and libraries"]
    return kv, said


def _pool_tokens(pool: KvPool, settings: EngineSettings, blocks: int, length: int) -> int:
    if settings.release < GROUP_AWARE_SINCE:
        return blocks // len(pool.groups) * min(group.block_size for group in pool.groups)
    return int(blocks / pool.blocks_of(length) * length)


def _limit_of(at_once: int | None, max_num_seqs: int) -> str | None:
    if at_once is None:
        return None
    return "--max-num-seqs" if 0 < max_num_seqs < at_once else "KV blocks"


def _planned_settings(
    pool: KvPool, settings: EngineSettings, budget: MemoryBudget, demand: ExpectedLoad, found_lengths: _Lengths
) -> list[PlannedSetting]:
    usable, longest, length, at_once = found_lengths
    found: list[PlannedSetting] = []
    if longest < length:
        why = "no longer request fits into the pool, and vLLM refuses to start with a longer one"
        found.append(PlannedSetting("--max-model-len", str(longest), why))
    if at_once is not None and at_once >= 1:
        why = f"requests of {demand.prompt + demand.output:,} tokens that fit at once; more are preempted in turn"
        found.append(PlannedSetting("--max-num-seqs", str(at_once), why))
    windows = [group for group in pool.groups if group.reach]
    if windows:
        per_thousand = sum(-(-1024 // group.block_size) for group in windows)
        why = f"each 1,024 tokens more take up to {per_thousand} blocks of every running request in windows and chunks"
        found.append(PlannedSetting("--max-num-batched-tokens", str(settings.max_num_batched_tokens), why))
    kv = usable * pool.bytes_per_block + RESERVED_NULL_BLOCKS * pool.bytes_per_block
    found.append(PlannedSetting("--kv-cache-memory-bytes", str(kv), "this pool, whatever the profile finds"))
    if budget.device is not None and budget.weights is not None:
        other = OTHER_BYTES if budget.other is None else budget.other
        share = (kv + budget.weights + other) / budget.device
        found.append(PlannedSetting("--gpu-memory-utilization", f"{min(share, 1):.3f}", "the same pool as a share"))
        static = (kv + budget.weights) / budget.device
        found.append(
            PlannedSetting("--mem-fraction-static", f"{static:.3f}", "the same pool in SGLang: weights and KV")
        )
    return found


def _plan_notes(pool: KvPool, settings: EngineSettings, longest: int, length: int) -> list[str]:
    found: list[str] = []
    if longest < length:
        found.append(f"a request of {length:,} tokens does not fit: the longest that does has {longest:,}")
    if pool.block_size != settings.block_size:
        found.append(
            f"blocks have {pool.block_size} tokens, not {settings.block_size}: a block has room for a layer's state"
        )
    if settings.pipeline_parallel > 1 and len(pool.groups) > 1:
        found.append("with several groups of layers the share of a pipeline stage is an estimate")
    return found


def _size_text(size: int) -> str:
    return f"{size / GIB_BYTES:.2f} GiB" if size >= GIB_BYTES // 100 else f"{size:,} bytes"
