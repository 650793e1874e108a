"""Runs the model over one step's plan, through the paged KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from kvscope.engine.config import DEFAULT_KV_BYTES, EngineConfig
from kvscope.engine.execution.attention import BatchAttention, PagedKV
from kvscope.engine.execution.cuda_graphs import DecodeGraphs
from kvscope.engine.execution.input_batch import UNKNOWN_TOKEN, InputBatch, PromptRows, lay_out
from kvscope.engine.execution.sampler import logprobs_of, sample
from kvscope.engine.faults import Faults
from kvscope.engine.models import LoadedModel, ModelConfig
from kvscope.engine.models.layers import Model
from kvscope.engine.requests.request_output import Sampled
from kvscope.engine.scheduling.step_plan import SchedulerOutput

COPY_BYTES: Final = 32 << 20
"""Device memory that a copy between the pool and a connector takes at most, beside the memory plan, and at least a
block. The plan's headroom of 150 MiB has room for it.
"""
LOGITS_BYTES: Final = 32 << 20
"""Device memory that the log probabilities of prompts take at most, beside the memory plan, and at least a row."""
LOGITS_COPIES: Final = 4
"""In float32: the logits, their log probabilities, what is compared, and what is sorted."""


def kv_bytes_per_block(model: ModelConfig, block_size: int, dtype: str) -> int:
    """Bytes that a block's keys and values take: in all layers, or in as many as the largest KV group has.

    So every block may go to any group, and in those of a smaller one some of it is padding.
    """
    itemsize: int = getattr(torch, dtype).itemsize
    return 2 * model.layers_per_block * block_size * model.num_kv_heads * model.head_size * itemsize


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


def _forward(model: Model, cache: PagedKV, batch: InputBatch) -> Tensor:
    """Return the hidden states [rows, hidden]."""
    return model.forward(batch.token_ids, batch.positions, BatchAttention(cache, batch))


class Runner(Protocol):
    """The interface that the engine's steps run on: ModelRunner, or what stands for it."""

    def capture(self, sizes: Sequence[int], /) -> DecodeGraphs:
        """Capture decodes of so many requests each."""
        ...

    def prepare(self, plan: SchedulerOutput, tables: Mapping[int, Sequence[Sequence[int]]], /) -> Any:
        """Return the plan as `run` takes it."""
        ...

    def run(self, batch: Any) -> list[Sampled]:
        """Return a token for each request of the plan that samples."""
        ...

    def gather(self, blocks: Sequence[int]) -> Tensor:
        """Return a copy of these blocks' keys and values."""
        ...

    def scatter(self, blocks: Sequence[int], kv: Tensor) -> None:
        """Put back what `gather` gave."""
        ...


class ModelRunner:
    """The model `loaded` and the KV of `num_blocks` blocks.

    `prepare` reads what the scheduler has, and is called where that is not changed meanwhile. `run` may go on in
    another thread, one batch at a time in the order of their steps. `gather` may be called from any.

    `seed` is what requests without a seed of their own draw from.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        num_blocks: int,
        block_size: int,
        device: str,
        dtype: str,
        seed: int = 0,
        faults: Faults | None = None,
    ) -> None:
        self._model = loaded.module
        self._config = loaded.config
        self._windows = [group.window for group in loaded.config.kv_groups]
        self._block_size = block_size
        self._device = device
        self._seed = seed
        self._cache = PagedKV(loaded.config, num_blocks, block_size, device, getattr(torch, dtype))
        self._forward = partial(_forward, loaded.module, self._cache)
        self._graphs: DecodeGraphs | None = None
        self._faults = faults or Faults()
        self._kept: list[Tensor] = []
        """Finished logits that the fault sizing.elsewhere did not free."""
        self._sampled: dict[int, int] = {}
        """Tokens that the last batch sampled, by request number."""

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int]) -> DecodeGraphs:
        """Capture decodes of that many requests each, and replay them from now on. Raises torch.OutOfMemoryError."""
        self._graphs = DecodeGraphs(self._forward, sizes, self._config, self._block_size, self._device)
        return self._graphs

    @torch.inference_mode()
    def prepare(self, plan: SchedulerOutput, tables: Mapping[int, Sequence[Sequence[int]]]) -> InputBatch:
        """Return the plan as `run` takes it. `tables` are the block tables of each KV group, by request number."""
        return lay_out(plan, tables, self._block_size, self._device, self._windows)

    @torch.inference_mode()
    def run(self, batch: InputBatch) -> list[Sampled]:
        """Compute the batch's tokens. Return a sampled token for each of `batch.sampled`.

        KV that the plan loads must be in its blocks already. Where the step before failed, what it should have
        sampled is UNKNOWN_TOKEN, and what comes of that is worth nothing.
        """
        before, self._sampled = self._sampled, {}
        if batch.carried:
            self._carry(batch, before)
        sampled = self._compute(batch)
        self._sampled = {row.number: one.token_id for row, one in zip(batch.sampled, sampled, strict=True)}
        return sampled

    def _carry(self, batch: InputBatch, before: Mapping[int, int]) -> None:
        """Put what the step before sampled where this one computes on."""
        tokens = {number: before.get(number, UNKNOWN_TOKEN) for _, number in batch.carried}
        rows = [row for row, _ in batch.carried]
        batch.token_ids[rows] = torch.tensor(list(tokens.values()), device=self._device)
        for sampling in batch.sampled:
            if sampling.number in tokens:
                sampling.learn(tokens[sampling.number])

    def _compute(self, batch: InputBatch) -> list[Sampled]:
        graphs = self._graphs
        hidden = graphs.replay(batch) if graphs is not None and graphs.take(batch) else self._forward(batch)
        for prompt in batch.prompts:
            self._compute_prompt(hidden, prompt)
        if not batch.sampled:
            return []
        logits = self._model.logits(hidden[batch.sampled_rows])
        if self._faults.triggers("sizing.elsewhere", ""):
            self._kept.append(logits)
        return sample(logits, batch.sampled, self._seed, self._config.eos_token_ids)

    def _compute_prompt(self, hidden: Tensor, prompt: PromptRows) -> None:
        """Enter how likely the prompt's tokens were, a few rows at a time, since a row has a logit for each token."""
        at_once = max(1, LOGITS_BYTES // (LOGITS_COPIES * 4 * self._config.vocab_size))
        for first in range(0, len(prompt.token_ids), at_once):
            tokens = prompt.token_ids[first : first + at_once]
            rows = hidden[prompt.first_row + first : prompt.first_row + first + len(tokens)]
            logprobs = logprobs_of(self._model.logits(rows), tokens, [prompt.likeliest] * len(tokens))
            prompt.into[prompt.place + first : prompt.place + first + len(tokens)] = logprobs

    @torch.inference_mode()
    def gather(self, blocks: Sequence[int]) -> Tensor:
        """Return a copy on the host of these blocks' keys and values: [layers, 2, blocks, block_size, kv_heads,
        head_size].

        Any thread may call it while no step writes to these blocks.
        """
        cache = self._cache.kv
        gathered = torch.empty((*cache.shape[:2], len(blocks), *cache.shape[3:]), dtype=cache.dtype)
        for part in self._parts(len(blocks)):
            gathered[:, :, part] = cache[:, :, list(blocks[part])].cpu()
        return gathered

    @torch.inference_mode()
    def scatter(self, blocks: Sequence[int], kv: Tensor) -> None:
        """Put back into these blocks what `gather` gave."""
        for part in self._parts(len(blocks)):
            self._cache.kv[:, :, list(blocks[part])] = kv[:, :, part].to(self._device)

    def _parts(self, count: int) -> Iterator[slice]:
        """Slices of so many blocks, of COPY_BYTES each: all at once would need as much device memory again."""
        cache = self._cache.kv
        of_block = cache.shape[0] * cache.shape[1] * cache[0, 0, 0].numel() * cache.element_size()
        at_once = max(1, COPY_BYTES // of_block)
        return (slice(start, start + at_once) for start in range(0, count, at_once))
