"""Runs the model over one step's plan, through the paged KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, wraps
from typing import Any, Final, Protocol, TypeVar, cast

import torch
from torch import Tensor

from ..config import DEFAULT_KV_BYTES, EngineConfig
from ..faults import Faults
from ..models import LoadedModel, ModelConfig
from ..models.layers import Model
from ..requests.request import Sampled
from ..scheduling.scheduler_state import SchedulerOutput
from .attention import BatchAttention, PagedKV
from .cuda_graphs import DecodeGraphs
from .input_batch import InputBatch, PromptRows, StepLayout
from .sampler import choose, likelihoods_of

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

    def run(self, batch: Any) -> Callable[[], list[Sampled]]:
        """Start the step. Return a function that waits for a token for each request of the plan that samples."""
        ...

    def check(self) -> None:
        """Raise if the device computes nothing any more, whatever it is given."""
        ...

    def gather(self, blocks: Sequence[int]) -> Tensor:
        """Return a copy of these blocks' keys and values."""
        ...

    def scatter(self, blocks: Sequence[int], kv: Tensor) -> None:
        """Put back what `gather` gave."""
        ...


Method = TypeVar("Method", bound=Callable[..., Any])


def _on_its_device(method: Method) -> Method:
    """Make the runner's device the current one of the calling thread: Triton launches where that is."""

    @wraps(method)
    def on_device(self: ModelRunner, *given: Any) -> Any:
        with torch.inference_mode(), torch.cuda.device(self._device if self._device.startswith("cuda") else -1):
            return method(self, *given)

    return cast("Method", on_device)


class ModelRunner:
    """The model `loaded` and the KV of `num_blocks` blocks.

    `prepare` reads what the scheduler has, and is called where that is not changed meanwhile. `run` may go on in
    another thread, one batch at a time in the order of their steps. On a GPU neither waits for the device. `gather` may
    be called from any thread.

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
        self._block_size = block_size
        self._device = device
        self._layout = StepLayout(loaded.config, block_size, device, seed)
        self._cache = PagedKV(loaded.config, num_blocks, block_size, device, getattr(torch, dtype))
        self._forward = partial(_forward, loaded.module, self._cache)
        self._graphs: DecodeGraphs | None = None
        self._faults = faults or Faults()
        self._kept: list[Tensor] = []
        """Finished logits that the fault sizing.elsewhere did not free."""
        self._chosen: Tensor | None = None
        """Tokens that the last batch chose, on the device. None: it chose none, or failed."""

    @_on_its_device
    def capture(self, sizes: Sequence[int]) -> DecodeGraphs:
        """Capture decodes of that many requests each, and replay them from now on. Raises torch.OutOfMemoryError."""
        self._graphs = DecodeGraphs(self._forward, sizes, self._config, self._block_size, self._device)
        return self._graphs

    @_on_its_device
    def prepare(self, plan: SchedulerOutput, tables: Mapping[int, Sequence[Sequence[int]]]) -> InputBatch:
        """Return the plan as `run` takes it. `tables` are the block tables of each KV group, by request number."""
        return self._layout.lay_out(plan, tables)

    @_on_its_device
    def run(self, batch: InputBatch) -> Callable[[], list[Sampled]]:
        """Start to compute the batch. Return a function that waits for its tokens, one for each request that samples.

        KV that the plan loads must be in its blocks already. Where the step before failed, what it should have
        sampled is UNKNOWN_TOKEN, and what comes of that is worth nothing.
        """
        before, self._chosen = self._chosen, None
        if batch.carried is not None and before is not None:
            rows, places = batch.carried
            batch.token_ids.index_copy_(0, rows, before[places])
        graphs = self._graphs
        hidden = graphs.replay(batch) if graphs is not None and graphs.take(batch) else self._forward(batch)
        for prompt in batch.prompts:
            self._compute_prompt(hidden, prompt)
        if batch.sampling is None:
            return list
        logits = self._model.logits(hidden[batch.sampling.rows])
        if self._faults.triggers("sizing.elsewhere", ""):
            self._kept.append(logits)
        chosen = choose(logits, batch.sampling, before)
        self._chosen = chosen.tokens
        outcome = chosen.home(batch.sampling)
        if not batch.sampling.matchers:
            return outcome
        # What a grammar allows next follows from the token that it had.
        sampled = outcome()
        return lambda: sampled

    @_on_its_device
    def check(self) -> None:
        """Raise if the device computes nothing any more: an error of a kernel comes again with each call."""
        if self._device.startswith("cuda"):
            torch.cuda.synchronize(self._device)

    def _compute_prompt(self, hidden: Tensor, prompt: PromptRows) -> None:
        """Enter how likely the prompt's tokens were, a few rows at a time, since a row has a logit for each token."""
        at_once = max(1, LOGITS_BYTES // (LOGITS_COPIES * 4 * self._config.vocab_size))
        for first in range(0, len(prompt.token_ids), at_once):
            tokens = prompt.token_ids[first : first + at_once]
            rows = hidden[prompt.first_row + first : prompt.first_row + first + len(tokens)]
            likelihoods = likelihoods_of(
                self._model.logits(rows), torch.tensor(tokens, device=self._device), prompt.likeliest
            )
            logprobs = likelihoods.named(tokens, [prompt.likeliest] * len(tokens))
            prompt.into[prompt.place + first : prompt.place + first + len(tokens)] = logprobs

    @_on_its_device
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

    @_on_its_device
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
