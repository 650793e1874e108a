"""The paged KV cache of all layers, and attention over it."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvscope.kernels import run_on
from kvscope.kernels.kv_write_twin import kv_write_torch
from kvscope.kernels.paged_decode_twin import gather_pages, paged_decode_torch
from kvscope.kernels.paged_prefill_twin import paged_prefill_torch

from ..models import ModelConfig
from .input_batch import Chunks, InputBatch


class PagedKV:
    """Keys and values of `num_blocks` blocks in one tensor `kv`: [layers, 2, blocks, block_size, kv_heads, head_size].

    `layers` is the model's layers_per_block: a block belongs to one KV group at a time, and has that group's layers.

    Zeros at first: slots beyond a sequence's end are masked wherever they are read, but a mask does not stop what is
    not a number. A host allocates memory only at the first write, so they are written at the start, and not under load.
    """

    def __init__(self, model: ModelConfig, num_blocks: int, block_size: int, device: str, dtype: torch.dtype) -> None:
        shape = (model.layers_per_block, 2, num_blocks, block_size, model.num_kv_heads, model.head_size)
        self.kv = torch.empty(shape, device=device, dtype=dtype).zero_()
        self.windows = [group.window for group in model.kv_groups]
        self.places = {
            layer: (number, place)
            for number, group in enumerate(model.kv_groups)
            for place, layer in enumerate(group.layers)
        }
        """Group of each layer, and its index in that group's blocks."""
        self.scale = 1 / math.sqrt(model.head_size)
        self.write, self.decode, self.prefill = kv_write_torch, paged_decode_torch, paged_prefill_torch
        if run_on(device):
            # Triton is there where there is a GPU for it.
            from kvscope.kernels.kv_write import kv_write
            from kvscope.kernels.paged_decode import paged_decode
            from kvscope.kernels.paged_prefill import paged_prefill

            self.write, self.decode, self.prefill = kv_write, paged_decode, paged_prefill


class BatchAttention:
    """Attention of one batch over `cache`: what the model is handed as its `attend`."""

    def __init__(self, cache: PagedKV, batch: InputBatch) -> None:
        self._cache = cache
        self._batch = batch

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See Attend. Keys and values are written first, so a chunk's tokens see one another through the cache."""
        cache, batch = self._cache, self._batch
        group, place = cache.places[layer]
        window = cache.windows[group]
        slots, reach = batch.groups[group]
        key_cache, value_cache = cache.kv[place]
        cache.write(key, value, key_cache, value_cache, slots)
        parts: list[Tensor] = []
        if reach.decodes is not None:
            tables, lens = reach.decodes
            parts.append(cache.decode(query[: len(lens)], key_cache, value_cache, tables, lens, cache.scale, window))
        if reach.prefills is not None:
            first_row, tables, starts, lens, longest = reach.prefills
            rows = query[first_row:]
            parts.append(
                cache.prefill(rows, key_cache, value_cache, tables, starts, lens, longest, cache.scale, window)
            )
        parts += [_attend_chunks(query, key_cache, value_cache, chunks, cache.scale) for chunks in reach.chunks]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)


def _attend_chunks(query: Tensor, key_cache: Tensor, value_cache: Tensor, chunks: Chunks, scale: float) -> Tensor:
    """Return the rows [n, H, D] of the chunks' tokens, in the order of the batch."""
    keys = gather_pages(key_cache, chunks.block_tables)
    values = gather_pages(value_cache, chunks.block_tables)
    requests, kv_heads, _, head_size = keys.shape
    longest = chunks.visible.shape[2]
    # [requests, K, group, L, D]: the query heads that share a key, one after another, as queries of one head.
    grouped = query[chunks.rows].view(requests, longest, kv_heads, -1, head_size).permute(0, 2, 3, 1, 4)
    group = grouped.shape[2]
    queries = grouped.reshape(requests, kv_heads, group * longest, head_size)
    visible = chunks.visible.repeat(1, 1, group, 1)
    out = scaled_dot_product_attention(queries, keys, values, visible, scale=scale)
    # [requests, L, K, group, D]
    rows = out.view(requests, kv_heads, group, longest, head_size).permute(0, 3, 1, 2, 4)
    return rows.reshape(requests * longest, kv_heads * group, head_size)[chunks.kept]
