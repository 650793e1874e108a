"""The engine's description of itself when it starts."""

from __future__ import annotations

import os

from kvscope.engine.config import EngineConfig
from kvscope.engine.execution.model_runner import kv_bytes_per_block
from kvscope.engine.faults import Faults
from kvscope.engine.models import LoadedModel
from kvscope.monitor.events.description import EngineDescription, KVGroup
from kvscope.version import kvscope_version


def describe_engine(config: EngineConfig, loaded: LoadedModel, total_blocks: int, faults: Faults) -> EngineDescription:
    """Return the settings in force, the pool, the model's shape as the pool sees it, and the faults that are on."""
    return EngineDescription(
        engine="kvscope",
        version=kvscope_version(),
        model=config.model,
        served_model_name=config.served_model_name,
        device=config.device,
        pid=os.getpid(),
        block_size=config.block_size,
        num_gpu_blocks=total_blocks,
        max_model_len=loaded.config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
        scheduling_policy=config.scheduling_policy,
        kv_connector=config.kv_connector,
        queues_ready=True,
        kv_bytes_per_block=kv_bytes_per_block(loaded.config, config.block_size, config.dtype),
        groups=[
            KVGroup("full_attention" if window is None else "sliding_window", len(layers), window or 0)
            for window, layers in loaded.config.kv_groups
        ],
        faults=[str(fault) for fault in faults.on.values()],
    )
