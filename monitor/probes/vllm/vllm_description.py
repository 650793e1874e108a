"""The description of vLLM when its scheduler starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kvscope.monitor.events.description import EngineDescription, KVGroup

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


def _bytes_per_block(config: Any) -> int:
    sizes = [
        getattr(group.kv_cache_spec, "page_size_bytes", 0) * len(group.layer_names) for group in config.kv_cache_groups
    ]
    return max(sizes, default=0)
