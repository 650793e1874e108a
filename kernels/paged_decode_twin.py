"""Paged decode attention in plain torch. Shapes are those of kernels/__init__.py."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

GATHERED_BYTES: Final = 1 << 20
"""Keys and values copied out at a time. Larger copies leave the core's cache, and the system maps fresh pages for each:
at 16 MiB a step took three times as long."""


def gather_pages(cache: Tensor, block_tables: Tensor) -> Tensor:
    """Copy what the tables name out of a cache: [B, K, M * block_size, D]."""
    sequences, blocks = block_tables.shape
    pages = cache.flatten(1).index_select(0, block_tables.reshape(-1))
    return pages.view(sequences, blocks * cache.shape[1], *cache.shape[2:]).transpose(1, 2)


def paged_decode_torch(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Compute the same as the kernel, on any device and dtype. Values that a sequence does not see must be finite.

    It works through the sequences in groups: best those of about one length stand together.
    """
    _, block_size, kv_heads, head_size = key_cache.shape
    lens = seq_lens.tolist()
    # As in a step that is padded for a graph, tables may be wider than the longest sequence needs.
    block_tables = block_tables[:, : -(-max(lens) // block_size)]
    group = max(1, GATHERED_BYTES // (2 * block_tables.shape[1] * key_cache[0].nbytes))
    tokens = torch.arange(block_tables.shape[1] * block_size, device=query.device)
    unseen = tokens >= seq_lens[:, None]
    if window is not None:
        unseen |= tokens < seq_lens[:, None] - window
    # As what is added to the scores, for all sequences at once: of a mask SDPA would make that itself, group by group.
    bias = torch.zeros(unseen.shape, device=query.device, dtype=query.dtype).masked_fill_(unseen, float("-inf"))
    # Query heads that share a key are to SDPA as many queries of one head.
    queries = query.view(len(lens), kv_heads, -1, head_size)
    parts = []
    for start in range(0, len(lens), group):
        end = start + group
        blocks = block_tables[start:end, : -(-max(lens[start:end]) // block_size)]
        keys, values = gather_pages(key_cache, blocks), gather_pages(value_cache, blocks)
        added = bias[start:end, None, None, : keys.shape[2]]
        parts.append(scaled_dot_product_attention(queries[start:end], keys, values, added, scale=scale))
    return torch.cat(parts).view_as(query)
