"""A plan from what is asked, what was measured on a running engine, and what is assumed: one function for all callers.

`monitor plan`, the HTTP API and the page fill a `PlanRequest`. An input that is not given comes from the running
engine, then from the model, then from an assumption. The plan lists each with its origin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from ..base.errors import BadQuestion
from .capacity_plan import PoolToPlan, plan_capacity, plan_of_pool
from .known_models import KnownModel, known_model
from .kv_pool import EngineSettings, KvPool
from .model_shape import ModelShape, shape_of, shape_of_numbers
from .plan_types import OTHER_BYTES, CapacityPlan, ExpectedLoad, InputOrigin, MemoryBudget, PlanInput

DEFAULT_BLOCK_SIZE: Final = 16
DEFAULT_BATCHED_TOKENS: Final = 8192
DEFAULT_RELEASE_OF_PLAN: Final = (0, 33)
HIGHER_SHARE_SINCE: Final = (0, 32)
"""vLLM's default of --gpu-memory-utilization is 0.92 since then, and 0.9 before."""
AT_LEAST_ONE: Final = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "block_size",
    "max_num_batched_tokens",
    "layers",
    "kv_heads",
    "head_dim",
)
SIZE_INPUTS: Final = ("device_memory", "weights", "other", "kv_cache_memory")


class PlanRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of a plan. Sizes in bytes, lengths in tokens (None: not given)."""

    model: str = ""
    layers: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    device_memory: int | None = None
    gpu_memory_utilization: float | None = None
    weights: int | None = None
    other: int | None = None
    kv_cache_memory: int | None = None
    release: str = ""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    block_size: int | None = None
    kv_cache_dtype: str = "auto"
    prefix_caching: bool = True
    async_scheduling: bool = True
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    prompt_len: int | None = None
    output_len: int | None = None
    shared_prefix: int | None = None


class MeasuredLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load of a running engine, as it was: mean lengths of `requests` requests, and the most that ran at once.

    source: what it was measured by (event stream, metrics or log). None: that source does not state it.
    """

    source: str
    requests: int = 0
    prompt_len: int | None = None
    output_len: int | None = None
    hit_rate: float | None = None
    peak_running: int | None = None
    peak_waiting: int | None = None


class RunningPool(msgspec.Struct, frozen=True, kw_only=True):
    """The pool of a running engine, as it described it. kv_bytes, bytes_per_token: None where it did not."""

    model: str
    release: tuple[int, int]
    pool: KvPool
    blocks: int
    max_model_len: int
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    kv_bytes: int | None = None
    assumed: tuple[str, ...] = ()


def plan_from_request(
    request: PlanRequest,
    *,
    config: Mapping[str, Any] | None = None,
    budget: MemoryBudget | None = None,
    running: RunningPool | None = None,
    measured: MeasuredLoad | None = None,
) -> CapacityPlan:
    """Return the plan. config: the model's, read from a file. budget: from a log's memory breakdown.

    Raises BadQuestion for an input that makes no sense, and for one that is missing, with the flag that takes it.
    """
    _check_request(request)
    model = known_model(request.model) if config is None and request.model else None
    if request.model and config is None and model is None:
        raise BadQuestion(
            f"the plan does not know the model {request.model}: give its config.json, or --layers, --kv-heads and"
            " --head-dim"
        )
    shape = _shape(request, config if model is None else model.config)
    running = running if shape is None else None  # another model has blocks and lengths of its own
    demand = _demand(request, running, measured)
    if shape is not None:
        budget = budget or _budget(request, model)
        plan = plan_capacity(shape, _settings(request, None), budget, demand)
    elif running is not None:
        plan = _plan_running(request, running, demand)
    else:
        raise BadQuestion("give a MODEL, or --layers, --kv-heads and --head-dim")
    return msgspec.structs.replace(plan, inputs=list(_inputs(request, plan, demand, running, measured, budget)))


def load_in_plan(plan: CapacityPlan) -> MeasuredLoad | None:
    """Return the measured inputs of a plan, None if it has none."""
    found = {one.name: one for one in plan.inputs if one.origin == "measured"}
    lengths = {name: int(one.value) for name, one in found.items() if one.unit in ("tokens", "requests")}
    load = {name: lengths[name] for name in ("prompt length", "output length", "concurrency") if name in lengths}
    if not load:
        return None
    prompt = load.get("prompt length")
    shared = lengths.get("shared prefix", 0)
    return MeasuredLoad(
        source=next(found[name].source for name in load),
        prompt_len=prompt,
        output_len=load.get("output length"),
        hit_rate=shared / prompt if prompt else None,
        peak_running=load.get("concurrency"),
    )


def release_of_text(text: str) -> tuple[int, int]:
    """Return vLLM's release as two numbers. Raises BadQuestion."""
    parts = text.removeprefix("v").split(".")
    if len(parts) < 2 or not all(part.isdecimal() and len(part) < 5 for part in parts[:2]):
        raise BadQuestion(f"--release {text} is not a release of vLLM: write 0.33")
    return int(parts[0]), int(parts[1])


def default_share(release: tuple[int, int]) -> float:
    """Return vLLM's default of --gpu-memory-utilization."""
    return 0.92 if release >= HIGHER_SHARE_SINCE else 0.9


def _check_request(request: PlanRequest) -> None:
    for name in AT_LEAST_ONE:
        value = getattr(request, name)
        if value is not None and value < 1:
            raise BadQuestion(f"--{name.replace('_', '-')} is {value}: it is at least 1")
    for name in SIZE_INPUTS:
        value = getattr(request, name)
        if value is not None and value < 0:
            raise BadQuestion(f"--{name.replace('_', '-')} is {value}: a size is at least 0")
    if request.gpu_memory_utilization is not None and not 0 < request.gpu_memory_utilization <= 1:
        raise BadQuestion(
            f"--gpu-memory-utilization is a share above 0 and up to 1, not {request.gpu_memory_utilization:g}"
        )


def _demand(request: PlanRequest, running: RunningPool | None, measured: MeasuredLoad | None) -> ExpectedLoad:
    prompt = _first_given(request.prompt_len, measured.prompt_len if measured else None, 0)
    shared = request.shared_prefix
    if shared is None and measured is not None and measured.hit_rate is not None:
        shared = round(prompt * measured.hit_rate)
    return ExpectedLoad(
        prompt=prompt,
        output=_first_given(request.output_len, measured.output_len if measured else None, 0),
        shared_prefix=shared or 0,
        max_model_len=_first_given(request.max_model_len, running.max_model_len if running else None, 0),
        max_num_seqs=_first_given(request.max_num_seqs, running.max_num_seqs if running else None, 0),
    )


def _shape(request: PlanRequest, config: Mapping[str, Any] | None) -> ModelShape | None:
    numbers = (request.layers, request.kv_heads, request.head_dim)
    if config is not None:
        if any(number is not None for number in numbers):
            raise BadQuestion("give a MODEL or its numbers, not both")
        return shape_of(config, request.kv_cache_dtype, request.tensor_parallel_size)
    layers, kv_heads, head_dim = numbers
    if layers is None and kv_heads is None and head_dim is None:
        return None
    if layers is None or kv_heads is None or head_dim is None:
        raise BadQuestion("give a MODEL, or --layers, --kv-heads and --head-dim")
    return shape_of_numbers(layers, kv_heads, head_dim, request.kv_cache_dtype, request.tensor_parallel_size)


def _release(request: PlanRequest, running: RunningPool | None) -> tuple[int, int]:
    if request.release:
        return release_of_text(request.release)
    return running.release if running is not None else DEFAULT_RELEASE_OF_PLAN


def _settings(request: PlanRequest, running: RunningPool | None) -> EngineSettings:
    return EngineSettings(
        release=_release(request, running),
        block_size=_first_given(request.block_size, running.pool.block_size if running else None, DEFAULT_BLOCK_SIZE),
        max_num_batched_tokens=_first_given(
            request.max_num_batched_tokens, running.max_num_batched_tokens if running else None, DEFAULT_BATCHED_TOKENS
        ),
        pipeline_parallel=request.pipeline_parallel_size,
        prefix_caching=request.prefix_caching,
        steps_in_flight=2 if request.async_scheduling else 1,
    )


def _budget(request: PlanRequest, model: KnownModel | None) -> MemoryBudget:
    share, weights = request.gpu_memory_utilization, request.weights
    if weights is None and model is not None:
        weights = model.weights // (request.tensor_parallel_size * request.pipeline_parallel_size)
    return MemoryBudget(
        device=request.device_memory,
        utilization=share if share is not None else default_share(_release(request, None)),
        weights=weights,
        other=request.other,
        kv=request.kv_cache_memory,
    )


def _plan_running(request: PlanRequest, running: RunningPool, demand: ExpectedLoad) -> CapacityPlan:
    """Return the plan of the engine's own pool, or of as many of its blocks as --kv-cache-memory holds."""
    blocks, kv_bytes = running.blocks, running.kv_bytes
    if request.kv_cache_memory is not None:
        if not running.pool.bytes_per_block:
            raise BadQuestion("the engine does not state the bytes of a block: give a MODEL with --kv-cache-memory")
        blocks, kv_bytes = request.kv_cache_memory // running.pool.bytes_per_block, request.kv_cache_memory
    if blocks < 2:
        raise BadQuestion(f"{blocks} blocks hold no request, since one is never handed out: raise --kv-cache-memory")
    per_token = running.pool.bytes_per_block // running.pool.block_size if len(running.pool.groups) == 1 else 0
    return plan_of_pool(
        PoolToPlan(
            model=running.model or "the running engine",
            pool=running.pool,
            settings=_settings(request, running),
            blocks=blocks,
            max_model_len=running.max_model_len,
            kv_bytes=kv_bytes,
            bytes_per_token=per_token or None,
            assumed=running.assumed,
        ),
        demand,
    )


def _inputs(
    request: PlanRequest,
    plan: CapacityPlan,
    demand: ExpectedLoad,
    running: RunningPool | None,
    measured: MeasuredLoad | None,
    budget: MemoryBudget | None,
) -> Iterator[PlanInput]:
    """Each input with its origin."""
    source = measured.source if measured is not None else ""
    for name, given, found, value in (
        ("prompt length", request.prompt_len, measured and measured.prompt_len, demand.prompt),
        ("output length", request.output_len, measured and measured.output_len, demand.output),
        ("shared prefix", request.shared_prefix, measured and measured.hit_rate, demand.shared_prefix),
    ):
        if value or given is not None:
            yield PlanInput(name, value, "tokens", *_origin(given, found, source))
    if measured is not None and measured.peak_running is not None:
        yield PlanInput("concurrency", measured.peak_running, "requests", "measured", source)
    described = "the engine's description" if running is not None else ""
    length_origin = _origin(request.max_model_len, running and running.max_model_len, described, "model")
    yield PlanInput("longest request allowed", plan.max_model_len, "tokens", *length_origin)
    yield PlanInput(
        "block size", plan.block_size, "tokens", *_origin(request.block_size, running and running.blocks, described)
    )
    if demand.max_num_seqs:
        allowed = _origin(request.max_num_seqs, running, described)
        yield PlanInput("sequences allowed", demand.max_num_seqs, "requests", *allowed)
    of_a_step = _settings(request, running).max_num_batched_tokens
    stated = running.max_num_batched_tokens if running is not None else 0
    yield PlanInput(
        "tokens of a step", of_a_step, "tokens", *_origin(request.max_num_batched_tokens, stated, described)
    )
    if budget is None:
        blocks_origin = _origin(request.kv_cache_memory, running, described)
        yield PlanInput("blocks", plan.blocks, "blocks", *blocks_origin)
        return
    log = "the log's memory breakdown" if budget.source == "measured" else None
    if budget.kv is not None:
        yield PlanInput("memory for KV", budget.kv, "bytes", *_origin(request.kv_cache_memory, log, log or ""))
        return
    yield PlanInput("device memory", budget.device or 0, "bytes", *_origin(request.device_memory, log, log or ""))
    share_origin = _origin(request.gpu_memory_utilization, log, log or "")
    yield PlanInput("share of the device", round(budget.utilization, 4), "of the device", *share_origin)
    yield PlanInput("weights", budget.weights or 0, "bytes", *_origin(request.weights, log, log or "", "model"))
    other = OTHER_BYTES if budget.other is None else budget.other
    yield PlanInput("other memory", other, "bytes", *_origin(request.other, log, log or ""))


def _origin(
    given: object, measured: object, source: str, otherwise: InputOrigin = "assumed"
) -> tuple[InputOrigin, str]:
    if given is not None:
        return "given", ""
    return ("measured", source) if measured else (otherwise, "")


def _first_given(*values: int | None) -> int:
    """Return the first that is given and not 0."""
    return next((value for value in values if value), 0)
