"""Runs the model over one step's plan, through the paged KV cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.attention import BatchAttention, PagedKV
from engine.batch import lay_out
from engine.config import DEFAULT_KV_BYTES, EngineConfig
from engine.models import LoadedModel, ModelConfig
from engine.output import Sampled
from engine.sampler import sample
from engine.scheduler import SchedulerOutput


def kv_bytes_per_block(model: ModelConfig, block_size: int, dtype: str) -> int:
    """Bytes that a block's keys and values take in all layers."""
    itemsize: int = getattr(torch, dtype).itemsize
    return 2 * model.num_layers * block_size * model.num_kv_heads * model.head_size * itemsize


def num_blocks_for(config: EngineConfig, model: ModelConfig) -> int:
    """Blocks of the pool, the reserved one included: as set, or as many as fit. Raises ValueError if too few fit."""
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    block = kv_bytes_per_block(model, config.block_size, config.dtype)
    given = DEFAULT_KV_BYTES if config.kv_cache_memory_bytes is None else config.kv_cache_memory_bytes
    blocks = given // block
    if blocks < 2:
        raise ValueError(
            f"kv_cache_memory_bytes is {given} and holds {blocks} blocks of {block} bytes;"
            f" at least 2 are needed, one of which is reserved: give {2 * block} or more"
        )
    return blocks


class ModelRunner:
    """The model `loaded` and the KV of `num_blocks` blocks. One thread only, `gather` excepted.

    `seed` is what requests without a seed of their own draw from.
    """

    def __init__(
        self, loaded: LoadedModel, num_blocks: int, block_size: int, device: str, dtype: str, seed: int = 0
    ) -> None:
        self._model = loaded.module
        self._config = loaded.config
        self._block_size = block_size
        self._device = device
        self._seed = seed
        self._cache = PagedKV(loaded.config, num_blocks, block_size, device, getattr(torch, dtype))

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput, tables: Mapping[int, list[int]]) -> list[Sampled]:
        """Compute the plan's tokens; the sampled tokens of those requests that want one, in the order of the plan.

        `tables` are the block tables by request number. KV that the plan loads must be in its blocks already.
        """
        batch = lay_out(plan, tables, self._block_size, self._device, self._config)
        hidden = self._model.forward(batch.token_ids, batch.positions, BatchAttention(self._cache, batch))
        if not batch.sampled:
            return []
        return sample(self._model.logits(hidden[batch.sampled_rows]), batch.sampled, self._seed)

    @torch.inference_mode()
    def gather(self, blocks: Sequence[int]) -> Tensor:
        """A copy on the host of these blocks' keys and values: [layers, 2, blocks, block_size, kv_heads, head_size].

        From any thread, as long as nobody writes to these blocks meanwhile: steps write to others.
        """
        return self._cache.kv[:, :, list(blocks)].cpu()

    @torch.inference_mode()
    def scatter(self, blocks: Sequence[int], kv: Tensor) -> None:
        """Put back into these blocks what `gather` gave."""
        self._cache.kv[:, :, list(blocks)] = kv.to(self._device)
