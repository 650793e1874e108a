"""Paged decode attention in Triton. Shapes are those of kernels/__init__.py.

A program serves one sequence and one key-value head, with all query heads that share it, so that each key is read
once. It walks the sequence in tiles of tokens, whatever the block size, keeping the running maximum, sum and weighted
values of the softmax (Milakov and Gimelshein, https://arxiv.org/abs/1805.02867).
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE: Final = 32
"""Tokens a tile: enough for a tensor core's product, few enough that no head size spills."""
MIN_SIDE: Final = 16
"""Query rows, and head size, that a tensor core's product takes at least; what is too many is masked."""
MAX_HEAD_SIZE: Final = 256
"""A head's values must stay in registers."""


def paged_decode(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, scale: float
) -> Tensor:
    """The kernel. Raises ValueError for heads that are too wide for it."""
    sequences, heads, head_size = query.shape
    _, block_size, kv_heads, _ = key_cache.shape
    if head_size > MAX_HEAD_SIZE:
        raise ValueError(f"the head size is {head_size} and may be {MAX_HEAD_SIZE} at most")
    out = torch.empty(sequences, heads, head_size, device=query.device, dtype=query.dtype)
    paged_decode_kernel[(sequences, kv_heads)](
        out, query, key_cache, value_cache, block_tables, seq_lens, scale, query.stride(0), block_tables.stride(0),
        **constants(heads, kv_heads, head_size, block_size), num_warps=num_warps(head_size),
    )  # fmt: skip
    return out


def constants(heads: int, kv_heads: int, head_size: int, block_size: int) -> dict[str, int]:
    """What the kernel is compiled for."""
    group = heads // kv_heads
    return {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "GROUP_PADDED": max(MIN_SIDE, triton.next_power_of_2(group)),
        "HEAD_SIZE": head_size,
        "HEAD_PADDED": max(MIN_SIDE, triton.next_power_of_2(head_size)),
        "BLOCK_SIZE": block_size,
        "TILE": TILE,
    }


def num_warps(head_size: int) -> int:
    """Threads / 32 of a program: what the widest heads need for their values to stay in registers."""
    return 8 if head_size > 128 else 4


@triton.jit  # type: ignore[untyped-decorator]  # Triton takes no annotations but its own
def paged_decode_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    tables_ptr,
    lens_ptr,
    scale,
    query_stride,
    tables_stride,
    KV_HEADS: tl.constexpr,  # noqa: N803  # compile-time constants are written as such
    GROUP: tl.constexpr,  # noqa: N803
    GROUP_PADDED: tl.constexpr,  # noqa: N803
    HEAD_SIZE: tl.constexpr,  # noqa: N803
    HEAD_PADDED: tl.constexpr,  # noqa: N803
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
) -> None:
    """Program (sequence, key-value head). Rows of the query are `query_stride` apart, heads within one contiguous."""
    # 64 bits throughout: a pool of many blocks is larger than 2^31 elements.
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    seq_len = tl.load(lens_ptr + sequence)

    rows = tl.arange(0, GROUP_PADDED)
    columns = tl.arange(0, HEAD_PADDED)
    in_head = columns < HEAD_SIZE
    query_mask = (rows < GROUP)[:, None] & in_head[None, :]
    head_offsets = (kv_head * GROUP + rows)[:, None] * HEAD_SIZE + columns[None, :]
    query = tl.load(query_ptr + sequence * query_stride + head_offsets, mask=query_mask, other=0.0)

    largest = tl.full([GROUP_PADDED], float("-inf"), dtype=tl.float32)
    total = tl.zeros([GROUP_PADDED], dtype=tl.float32)
    weighted = tl.zeros([GROUP_PADDED, HEAD_PADDED], dtype=tl.float32)
    for start in range(0, seq_len, TILE):
        tokens = start + tl.arange(0, TILE)
        seen = tokens < seq_len
        blocks = tl.load(tables_ptr + sequence * tables_stride + tokens // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
        slots = blocks * BLOCK_SIZE + tokens % BLOCK_SIZE
        offsets = (slots * KV_HEADS + kv_head)[:, None] * HEAD_SIZE + columns[None, :]
        kv_mask = seen[:, None] & in_head[None, :]

        key = tl.load(key_ptr + offsets, mask=kv_mask, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        correction = tl.exp(largest - new_largest)
        weights = tl.exp(scores - new_largest[:, None])

        value = tl.load(value_ptr + offsets, mask=kv_mask, other=0.0)
        total = total * correction + tl.sum(weights, 1)
        weighted = weighted * correction[:, None]
        weighted = tl.dot(weights.to(value.dtype), value, acc=weighted, input_precision="ieee")
        largest = new_largest

    out = (weighted / total[:, None]).to(out_ptr.dtype.element_ty)
    out_stride = KV_HEADS * GROUP * HEAD_SIZE
    tl.store(out_ptr + sequence * out_stride + head_offsets, out, mask=query_mask)
