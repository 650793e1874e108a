"""Paged decode attention in plain torch. Shapes are those of kernels/__init__.py."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def gather_pages(cache: Tensor, block_tables: Tensor) -> Tensor:
    """Copy what the tables name out of a cache: [B, K, M * block_size, D]."""
    sequences, blocks = block_tables.shape
    pages = cache.flatten(1).index_select(0, block_tables.flatten())
    return pages.view(sequences, blocks * cache.shape[1], *cache.shape[2:]).transpose(1, 2)


def paged_decode_torch(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, scale: float
) -> Tensor:
    """The twin, for any device and dtype. What lies beyond a sequence's end must be finite."""
    keys, values = gather_pages(key_cache, block_tables), gather_pages(value_cache, block_tables)
    visible = torch.arange(keys.shape[2], device=query.device) < seq_lens[:, None]
    # Query heads that share a key are to SDPA as many queries of one head.
    grouped = query.view(len(query), keys.shape[1], -1, query.shape[2])
    out = scaled_dot_product_attention(grouped, keys, values, visible[:, None, None], scale=scale)
    return out.flatten(1, 2)
