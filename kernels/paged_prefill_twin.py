"""Chunked prefill over a paged prefix in plain torch. Shapes are those of kernels/__init__.py."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .paged_decode_twin import gather_pages


def paged_prefill_torch(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    longest: int,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Compute the same as the kernel, on any device and dtype, one sequence after another. Values that no row sees must
    be finite.

    `longest` is there for the kernel.
    """
    parts = []
    ends = query_starts.tolist()
    for index, seq_len in enumerate(seq_lens.tolist()):
        rows = query[ends[index] : ends[index + 1]].transpose(0, 1)
        keys, values = (gather_pages(cache, block_tables[index : index + 1])[0] for cache in (key_cache, value_cache))
        tokens = torch.arange(keys.shape[1], device=query.device)
        positions = torch.arange(seq_len - rows.shape[1], seq_len, device=query.device)[:, None]
        visible = tokens <= positions
        if window is not None:
            visible &= tokens > positions - window
        parts.append(scaled_dot_product_attention(rows, keys, values, visible, scale=scale, enable_gqa=True))
    return torch.cat(parts, 1).transpose(0, 1)
