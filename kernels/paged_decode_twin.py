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
    """The twin, for any device and dtype. What a sequence does not see must be finite.

    It works through the sequences in groups: best those of about one length stand together.
    """
    _, block_size, kv_heads, head_size = key_cache.shape
    sequence_bytes = 2 * block_tables.shape[1] * key_cache[0].nbytes
    group = max(1, GATHERED_BYTES // sequence_bytes)
    parts = []
    for start in range(0, len(query), group):
        lens = seq_lens[start : start + group]
        blocks = block_tables[start : start + group, : -(-int(lens.max()) // block_size)]
        tokens = torch.arange(blocks.shape[1] * block_size, device=query.device)
        visible = tokens < lens[:, None]
        if window is not None:
            visible &= tokens >= lens[:, None] - window
        # Query heads that share a key are to SDPA as many queries of one head.
        queries = query[start : start + group].view(len(lens), kv_heads, -1, head_size)
        keys, values = gather_pages(key_cache, blocks), gather_pages(value_cache, blocks)
        parts.append(scaled_dot_product_attention(queries, keys, values, visible[:, None, None], scale=scale))
    return torch.cat(parts).view_as(query)
