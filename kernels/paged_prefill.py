"""Chunked prefill over a paged prefix in Triton. Shapes are those of kernels/__init__.py.

A program serves one sequence, one key-value head and a tile of rows, a row being one query head of one token. The heads
that share a key stand side by side, so that a tile is full whatever their number. It walks what its rows see in tiles
of tokens, whatever the block size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tiles import COMMON, LEAST, LOG2_E, NO_WINDOW, Limits, fold_tile, head_constants, limits_of


def paged_prefill(
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
    """Compute the prefill attention in Triton. `longest` is the most rows that a sequence has, known to the host.

    Raises ValueError for heads that are too wide for it.
    """
    _, heads, head_size = query.shape
    _, block_size, kv_heads, _ = key_cache.shape
    limits = limits_of(query.device)
    fixed = paged_prefill_constants(heads, kv_heads, head_size, block_size, query.dtype.itemsize, limits)
    out = torch.empty(query.shape, device=query.device, dtype=query.dtype)
    tiles = triton.cdiv(longest * fixed["GROUP"], fixed["ROWS"])
    paged_prefill_kernel[(tiles, kv_heads, len(seq_lens))](
        out,
        query,
        key_cache,
        value_cache,
        block_tables,
        query_starts,
        seq_lens,
        scale * LOG2_E,
        window or NO_WINDOW,
        query.stride(0),
        block_tables.stride(0),
        **fixed,
        **paged_prefill_options(head_size, query.dtype.itemsize, limits),
    )
    return out


def paged_prefill_constants(
    heads: int, kv_heads: int, head_size: int, block_size: int, itemsize: int, limits: Limits
) -> dict[str, int]:
    """Return the constants that the kernel is compiled for. Raises ValueError for heads that are too wide for it."""
    narrow, wide = (128 if limits.amd else 64, 64) if itemsize == 2 else (32, 16)
    tile = 64 if itemsize == 2 and head_size <= 64 and not limits.amd else 32
    return {
        **head_constants(heads, kv_heads, head_size, block_size, itemsize, tile),
        # As many as do not spill.
        "ROWS": narrow if head_size <= 64 * (4 // itemsize) else wide,
    }


def paged_prefill_options(head_size: int, itemsize: int, limits: Limits) -> dict[str, int | bool]:
    """Threads / 32 of a program, and the depth of its pipeline.

    On NVIDIA's devices four warps multiply 64 rows of 16 bits at once. Eight, which the widest heads need to stay in
    registers, took 1.7 times as long on an H200.
    """
    if itemsize == 2 and head_size <= 128 and not limits.amd:
        return {"num_warps": 4, "num_stages": 3, **COMMON}
    return {"num_warps": 8 if itemsize == 2 else 4, "num_stages": 2, **COMMON}


@triton.jit(do_not_specialize=["window", "tables_stride"])  # type: ignore[untyped-decorator]  # Triton takes no annotations but its own
def paged_prefill_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    tables_ptr,
    starts_ptr,
    lens_ptr,
    scale,
    window,
    query_stride,
    tables_stride,
    KV_HEADS: tl.constexpr,  # noqa: N803  # compile-time constants are written as such
    GROUP: tl.constexpr,  # noqa: N803
    HEAD_SIZE: tl.constexpr,  # noqa: N803
    HEAD_PADDED: tl.constexpr,  # noqa: N803
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
) -> None:
    """Program (tile of rows, key-value head, sequence). Tokens of the query are `query_stride` apart."""
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    query_start = tl.load(starts_ptr + sequence)
    query_len = (tl.load(starts_ptr + sequence + 1) - query_start).to(tl.int32)
    seq_len = tl.load(lens_ptr + sequence).to(tl.int32)
    first_row = tl.program_id(0) * ROWS
    if first_row >= query_len * GROUP:
        return

    rows = first_row + tl.arange(0, ROWS)
    queries = rows // GROUP
    # Rows beyond the last are computed as the last token's, and not stored.
    positions = seq_len - query_len + tl.minimum(queries, query_len - 1)
    columns = tl.arange(0, HEAD_PADDED)
    mask = (queries < query_len)[:, None] & (columns < HEAD_SIZE)[None, :]
    query_rows = query_start + queries
    in_row = (kv_head * GROUP + rows % GROUP)[:, None] * HEAD_SIZE + columns[None, :]
    query = tl.load(query_ptr + (query_rows * query_stride)[:, None] + in_row, mask=mask, other=0.0)

    largest = tl.full([ROWS], LEAST, dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    weighted = tl.zeros([ROWS, HEAD_PADDED], dtype=tl.float32)
    table_ptr = tables_ptr + sequence * tables_stride
    # From what the first row's window begins with to what the last row sees.
    first = tl.maximum(tl.min(positions, 0) - window + 1, 0)
    end = tl.max(positions, 0) + 1
    for start in range(first // TILE * TILE, end, TILE):
        tokens = start + tl.arange(0, TILE)
        visible = (tokens[None, :] <= positions[:, None]) & (tokens[None, :] > positions[:, None] - window)
        largest, total, weighted = fold_tile(
            query,
            key_ptr,
            value_ptr,
            table_ptr,
            start,
            first,
            end,
            visible,
            kv_head,
            scale,
            largest,
            total,
            weighted,
            KV_HEADS,
            HEAD_SIZE,
            HEAD_PADDED,
            BLOCK_SIZE,
            TILE,
            # Rearranging the entries, which decodes gain by, spills here.
            ENTRY_A_BLOCK=False,
        )

    out = (weighted / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (query_rows * (KV_HEADS * GROUP * HEAD_SIZE))[:, None] + in_row, out, mask=mask)
