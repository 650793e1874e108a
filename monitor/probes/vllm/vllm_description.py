"""What is said of vLLM when its scheduler starts."""

from __future__ import annotations

import os
from typing import Any

from kvscope.monitor.events.description import EngineDescription, KVGroup

LEASES = {
    "nixl": "VLLM_NIXL_ABORT_REQUEST_TIMEOUT",
    "mooncake": "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT",
}
"""By a part of the connector's name: where vLLM has how long it keeps a finished request's blocks, in seconds. Later
releases of NIXL's have a lease that its consumer renews; its end cannot be told in advance, so none is said."""


def describe(scheduler: Any) -> EngineDescription:
    """The settings in force, in the field's own names; what a release does not have is left out."""
    import vllm

    config = scheduler.vllm_config
    model, cache, scheduling = config.model_config, config.cache_config, config.scheduler_config
    groups = scheduler.kv_cache_config.kv_cache_groups
    return EngineDescription(
        engine="vllm",
        version=vllm.__version__,
        model=str(model.model),
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
        kv_bytes_per_block=_bytes_per_block(scheduler.kv_cache_config),
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
    """The first name that clients may use."""
    model = scheduler.vllm_config.model_config
    names = getattr(model, "served_model_name", None) or model.model
    return str(names if isinstance(names, str) else names[0])


def kv_connector(scheduler: Any) -> str:
    """The KV connector's name, empty if there is none."""
    transfer = scheduler.vllm_config.kv_transfer_config
    return str(transfer.kv_connector or "") if transfer is not None else ""


def lease_ns(scheduler: Any) -> int:
    """How long the connector keeps a finished request's blocks unasked; 0: until it says that it is done."""
    import vllm.envs

    name = kv_connector(scheduler).lower()
    for part, variable in LEASES.items():
        if part in name and (seconds := getattr(vllm.envs, variable, None)):
            return round(float(seconds) * 1e9)
    return 0


def _bytes_per_block(config: Any) -> int:
    sizes = [
        getattr(group.kv_cache_spec, "page_size_bytes", 0) * len(group.layer_names) for group in config.kv_cache_groups
    ]
    return max(sizes, default=0)
