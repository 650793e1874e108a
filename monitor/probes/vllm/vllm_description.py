"""The description of vLLM when its scheduler starts, and the memory bill: what its worker measured of its device when
it sized the pool.

Nothing is measured here, and the device is asked nothing: the worker keeps its figures. They can be read where it is in
the scheduler's process, as vLLM has it when one worker is all. Values that a release, a setting or a device lacks are
reported as unknown.

    requested = weights + non-torch + peak activations + kept for graphs + available for KV

is how vLLM sizes its pool in all releases from 0.10.2 to 0.33. Only which of these it keeps one by one differs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final

from ...contract.description import EngineDescription, KVGroup
from ...contract.kinds import SCHEMA, Kind

LEASE_VARIABLES = {
    "nixl": "VLLM_NIXL_ABORT_REQUEST_TIMEOUT",
    "mooncake": "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT",
}
"""By a part of the connector's name: where vLLM has how long it keeps a finished request's blocks, in seconds."""
NO_LEASE, UNKNOWN_LEASE = 0, -1
DEFAULT_NIXL_LEASE_S = 30
"""vLLM's own, where its configuration has none."""


def describe(scheduler: Any) -> EngineDescription:
    """Return the settings in force, in the field's own names, without those that a release lacks."""
    import vllm

    config = scheduler.vllm_config
    model, cache, scheduling = config.model_config, config.cache_config, config.scheduler_config
    groups = scheduler.kv_cache_config.kv_cache_groups
    return EngineDescription(
        engine="vllm",
        version=vllm.__version__,
        model=without_path(str(model.model)),
        served_model_name=served_model_name(scheduler),
        device=str(getattr(config.device_config, "device_type", "")),
        pid=os.getpid(),
        block_size=scheduler.block_size,
        num_gpu_blocks=scheduler.kv_cache_manager.block_pool.num_gpu_blocks,
        max_model_len=model.max_model_len,
        max_num_seqs=scheduling.max_num_seqs,
        max_num_batched_tokens=scheduling.max_num_batched_tokens,
        enable_prefix_caching=bool(cache.enable_prefix_caching),
        scheduling_policy=str(scheduling.policy),
        kv_connector=kv_connector(scheduler),
        kv_role=kv_role(scheduler),
        kv_lease_s=renewable_lease_s(scheduler),
        kv_bytes_per_block=_bytes_per_block(scheduler.kv_cache_config),
        reports_modes=True,
        groups=[
            KVGroup(
                kind=type(group.kv_cache_spec).__name__,
                layers=len(group.layer_names),
                window=getattr(group.kv_cache_spec, "sliding_window", None) or 0,
            )
            for group in groups
        ],
    )


def served_model_name(scheduler: Any) -> str:
    """Return the first name that clients may use, or the directory's name for a model in a local directory without
    one.
    """
    model = scheduler.vllm_config.model_config
    names = getattr(model, "served_model_name", None) or model.model
    name = str(names if isinstance(names, str) else names[0])
    return Path(name).name if _is_path(name) else name


def without_path(model: str) -> str:
    """Return the model's public id. Its location on this machine never leaves the process."""
    return "" if _is_path(model) else model


def _is_path(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or os.path.isdir(model)


def rank_of(scheduler: Any) -> tuple[int, bool]:
    """Return the engine's data-parallel rank, and whether there are others: each rank of a dense model is configured
    alone.
    """
    parallel = scheduler.vllm_config.parallel_config
    rank: int = getattr(parallel, "data_parallel_index", parallel.data_parallel_rank)
    local = getattr(parallel, "data_parallel_rank_local", None)
    return rank, rank > 0 or parallel.data_parallel_size > 1 or local is not None


def kv_connector(scheduler: Any) -> str:
    """Return the KV connector's name, or an empty string if there is none."""
    transfer = scheduler.vllm_config.kv_transfer_config
    return str(transfer.kv_connector or "") if transfer is not None else ""


def kv_role(scheduler: Any) -> str:
    """Return the KV connector's role, or an empty string if there is none."""
    transfer = scheduler.vllm_config.kv_transfer_config
    return str(getattr(transfer, "kv_role", None) or "")


def lease_ns(scheduler: Any) -> int:
    """How long the connector keeps a finished request's blocks unasked, or UNKNOWN_LEASE if it does not show that.

    NIXL leases that consumers renew (kv_lease_duration) end when renewals stop, which only the workers see.
    """
    import vllm.envs

    name = kv_connector(scheduler).lower()
    if not name:
        return NO_LEASE
    for part, variable in LEASE_VARIABLES.items():
        if part in name and (seconds := getattr(vllm.envs, variable, None)):
            return round(float(seconds) * 1e9)
    return UNKNOWN_LEASE


def renewable_lease_s(scheduler: Any) -> float:
    """Return how long NIXL keeps blocks until a consumer renews the lease, or 0 for a release or a connector without
    renewals.
    """
    import vllm.envs

    if "nixl" not in kv_connector(scheduler).lower() or hasattr(vllm.envs, LEASE_VARIABLES["nixl"]):
        return 0
    extra = scheduler.vllm_config.kv_transfer_config.kv_connector_extra_config or {}
    return float(extra.get("kv_lease_duration", DEFAULT_NIXL_LEASE_S))


def workers(scheduler: Any) -> int:
    """Return how many workers report of each transfer."""
    return int(getattr(getattr(scheduler.vllm_config, "parallel_config", None), "world_size", 1))


def expired_leases(kv_connector_output: Any) -> int:
    """Return how many leases all workers together count as expired in this report. Releases without counts have 0."""
    stats = getattr(kv_connector_output, "kv_connector_stats", None)
    return len(getattr(stats, "data", {}).get("num_kv_expired_reqs", ()))


def _bytes_per_block(config: Any) -> int:
    sizes = [
        getattr(group.kv_cache_spec, "page_size_bytes", 0) * len(group.layer_names) for group in config.kv_cache_groups
    ]
    return max(sizes, default=0)


UNKNOWN: Final = -1


def breakdown(scheduler: Any) -> list[int]:
    """Return the numbers of a MEMORY event in bytes, in the order of its schema, or nothing if there is no worker to
    read.

    Call it while `scheduler` is being made: its maker has the worker. Raises AttributeError or TypeError if the worker
    is not of the shape that is known.
    """
    worker = _worker(scheduler)
    if worker is None:
        return []
    known = {"kv_pool": _pool(worker)} | (_measured(worker) if hasattr(worker, "init_snapshot") else {})
    return [known.get(name, UNKNOWN) for name in SCHEMA[Kind.MEMORY].args]


def _worker(scheduler: Any) -> Any:
    """Return the worker that the calling engine has in this process, or None if there are others, or none."""
    if scheduler.vllm_config.parallel_config.world_size != 1:
        return None
    worker = getattr(getattr(calling_executor(), "driver_worker", None), "worker", None)
    return worker if hasattr(worker, "model_runner") else None


def calling_executor() -> Any:
    """Return the executor of the engine that is being made by a caller, or None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (executor := getattr(frame.f_locals.get("self"), "model_executor", None)) is not None:
            return executor
        frame = frame.f_back
    return None


def _pool(worker: Any) -> int:
    """Return the device memory of the KV tensors, each piece of memory once: layers may share one."""
    pieces = {}
    for tensor in _tensors(worker.model_runner.kv_caches):
        if tensor.device.type == worker.device.type:
            piece = tensor.untyped_storage()
            pieces[piece.data_ptr()] = piece.nbytes()
    return sum(pieces.values())


def _tensors(caches: Any) -> Iterator[Any]:
    """Yield the tensor or tensors of each layer."""
    for one in caches:
        if isinstance(one, list | tuple):
            yield from _tensors(one)
        elif one is not None:
            yield one


def _measured(worker: Any) -> dict[str, int]:
    weights = int(worker.model_runner.model_memory_usage)
    known = {"device_total": int(worker.init_snapshot.total_memory), "weights": weights}
    if worker.model_config.enforce_eager:
        known["graphs_actual"] = 0
    if not hasattr(worker, "available_kv_cache_memory_bytes"):
        return known  # its pool has a configured size, and it has not measured the rest
    kept = _kept_for_graphs(worker)
    if kept is not None:
        known["graphs_estimated"] = kept
    # Since 0.27 a figure of its own; what is not weights of it vLLM calls non-torch.
    together = getattr(worker, "total_consumed", None)
    non_torch = worker.non_torch_memory if together is None else together - weights
    peak = worker.requested_memory - worker.available_kv_cache_memory_bytes - (kept or 0) - weights - non_torch
    # It keeps the peak too, in some releases with what it keeps for graphs. Where that is not so, the sum is another.
    if any(abs(worker.peak_activation_memory - more - peak) < 1 for more in (0, kept or 0)):
        known |= {"non_torch": int(non_torch), "activations_peak": round(peak)}
    return known


def _kept_for_graphs(worker: Any) -> int | None:
    """Return the part of its estimate that it took off the pool, or None where it makes none."""
    import vllm.envs

    estimate = getattr(worker, "cudagraph_memory_estimate", None)
    if estimate is None:
        return None
    return int(estimate) if vllm.envs.VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS else 0
