"""Paged decode attention in Triton. Shapes are those of kernels/__init__.py.

A program serves one sequence and one key-value head, with all query heads that share it, so that each key is read
once. It walks the sequence in tiles of tokens, whatever the block size. Where sequences and heads are too few to
occupy the device, each sequence is cut into splits, a program each, and a second kernel weighs their results
(flash-decoding, https://pytorch.org/blog/flash-decoding/). One split is written to the result at once.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvscope.kernels.tiles import COMMON, LEAST, LOG2_E, MIN_SIDE, NO_WINDOW, fold_tile, head_constants

MIN_SPLIT: Final = 256
"""Tokens of a split at least: its result, four bytes a value and written and read again, is then little beside them."""
MAX_SPLITS: Final = 64
"""Bound on the splits that the second kernel holds in registers at once."""


def paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None = None,
    splits: int | None = None,
) -> Tensor:
    """Compute the decode attention in Triton. `splits`, up to MAX_SPLITS, is chosen to occupy the device unless given.

    Raises ValueError for heads that are too wide for it.
    """
    sequences, heads, head_size = query.shape
    _, block_size, kv_heads, _ = key_cache.shape
    fixed = paged_decode_constants(heads, kv_heads, head_size, block_size, query.dtype.itemsize)
    if splits is None:
        longest = min(block_tables.shape[1] * block_size, window or NO_WINDOW)
        splits = splits_for(sequences * kv_heads, longest, _processors(query.device))
    out = torch.empty(sequences, heads, head_size, device=query.device, dtype=query.dtype)
    part, log_sums = out, out
    if splits > 1:
        part = torch.empty(sequences, splits, heads, head_size, device=query.device, dtype=torch.float32)
        log_sums = torch.empty(sequences, splits, heads, device=query.device, dtype=torch.float32)
    paged_decode_kernel[(sequences, kv_heads, splits)](
        part,
        log_sums,
        query,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        scale * LOG2_E,
        window or NO_WINDOW,
        splits,
        query.stride(0),
        block_tables.stride(0),
        **fixed,
        DIRECT=splits == 1,
        **paged_decode_options(head_size, amd=torch.version.hip is not None),
    )
    if splits > 1:
        reduce_splits_kernel[(sequences, heads)](
            out,
            part,
            log_sums,
            seq_lens,
            window or NO_WINDOW,
            splits,
            HEAD_SIZE=head_size,
            HEAD_PADDED=fixed["HEAD_PADDED"],
            SPLITS_PADDED=triton.next_power_of_2(splits),
            TILE=fixed["TILE"],
            **COMMON,
        )
    return out


def splits_for(programs: int, longest: int, processors: int) -> int:
    """Return the splits of a batch that takes `programs` unsplit, its longest sequence `longest`, on that many
    multiprocessors.

    Two programs share a multiprocessor. A batch that gives each one already is not split: the second kernel's launch
    would cost more than the other half.
    """
    if programs >= processors:
        return 1
    return max(1, min(2 * processors // programs, longest // MIN_SPLIT, MAX_SPLITS))


def paged_decode_constants(heads: int, kv_heads: int, head_size: int, block_size: int, itemsize: int) -> dict[str, int]:
    """Return the constants that the kernel is compiled for. Raises ValueError for heads that are too wide for it."""
    return {
        **head_constants(heads, kv_heads, head_size, block_size, itemsize, tile=64),
        "GROUP_PADDED": max(MIN_SIDE, triton.next_power_of_2(heads // kv_heads)),
    }


def paged_decode_options(head_size: int, amd: bool) -> dict[str, int | bool]:
    """Threads / 32 of a program, what the widest heads need to stay in registers, and the depth of its pipeline.

    Block numbers are fetched first, then two tiles at once. An AMD device has shared memory for one.
    """
    return {"num_warps": 8 if head_size > 128 else 4, "num_stages": 2 if amd else 5, **COMMON}


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit  # type: ignore[untyped-decorator]  # Triton takes no annotations but its own
def split_length(seen, splits, TILE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Tokens of each split but the last of those that have any: whole tiles."""
    return tl.cdiv(tl.cdiv(seen, splits), TILE) * TILE


@triton.jit  # type: ignore[untyped-decorator]
def paged_decode_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    log_sums_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    tables_ptr,
    lens_ptr,
    scale,
    window,
    splits,
    query_stride,
    tables_stride,
    KV_HEADS: tl.constexpr,  # noqa: N803  # compile-time constants are written as such
    GROUP: tl.constexpr,  # noqa: N803
    GROUP_PADDED: tl.constexpr,  # noqa: N803
    HEAD_SIZE: tl.constexpr,  # noqa: N803
    HEAD_PADDED: tl.constexpr,  # noqa: N803
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
    DIRECT: tl.constexpr,  # noqa: N803
) -> None:
    """Program (sequence, key-value head, split). Rows of the query are `query_stride` apart, its heads contiguous.

    `out` is [sequences, splits, heads, HEAD_SIZE] and, unless DIRECT, `log_sums` [sequences, splits, heads] is log2 of
    the sum of each row's exponentials. A split that no token falls to writes nothing.
    """
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    seq_len = tl.load(lens_ptr + sequence).to(tl.int32)
    first = tl.maximum(seq_len - window, 0)
    length = split_length(seq_len - first, splits, TILE)
    begin = first + split * length
    end = tl.minimum(begin + length, seq_len)
    if begin >= end:
        return

    rows = tl.arange(0, GROUP_PADDED)
    columns = tl.arange(0, HEAD_PADDED)
    row_mask = rows < GROUP
    mask = row_mask[:, None] & (columns < HEAD_SIZE)[None, :]
    heads = kv_head * GROUP + rows
    offsets = heads[:, None] * HEAD_SIZE + columns[None, :]
    query = tl.load(query_ptr + sequence * query_stride + offsets, mask=mask, other=0.0)

    largest = tl.full([GROUP_PADDED], LEAST, dtype=tl.float32)
    total = tl.zeros([GROUP_PADDED], dtype=tl.float32)
    weighted = tl.zeros([GROUP_PADDED, HEAD_PADDED], dtype=tl.float32)
    table_ptr = tables_ptr + sequence * tables_stride
    for start in range(begin, end, TILE):
        tokens = start + tl.arange(0, TILE)
        written = tokens < end
        largest, total, weighted = fold_tile(
            query,
            key_ptr,
            value_ptr,
            table_ptr,
            tokens,
            written,
            written[None, :],
            kv_head,
            scale,
            largest,
            total,
            weighted,
            KV_HEADS,
            HEAD_SIZE,
            HEAD_PADDED,
            BLOCK_SIZE,
        )

    row = (sequence * splits + split) * KV_HEADS * GROUP
    out = (weighted / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * HEAD_SIZE + offsets, out, mask=mask)
    if not DIRECT:
        tl.store(log_sums_ptr + row + heads, largest + tl.log2(total), mask=row_mask)


@triton.jit  # type: ignore[untyped-decorator]
def reduce_splits_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    part_ptr,
    log_sums_ptr,
    lens_ptr,
    window,
    splits,
    HEAD_SIZE: tl.constexpr,  # noqa: N803
    HEAD_PADDED: tl.constexpr,  # noqa: N803
    SPLITS_PADDED: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
) -> None:
    """Program (sequence, query head): what the splits gave, weighted by the sums of their exponentials."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    seen = tl.minimum(tl.load(lens_ptr + sequence).to(tl.int32), window)
    used = tl.cdiv(seen, split_length(seen, splits, TILE))

    parts = tl.arange(0, SPLITS_PADDED)
    columns = tl.arange(0, HEAD_PADDED)
    in_head = columns < HEAD_SIZE
    rows = (sequence * splits + parts) * heads + head
    log_sums = tl.load(log_sums_ptr + rows, mask=parts < used, other=float("-inf"))
    weights = tl.exp2(log_sums - tl.max(log_sums, 0))
    mask = (parts < used)[:, None] & in_head[None, :]
    values = tl.load(part_ptr + rows[:, None] * HEAD_SIZE + columns[None, :], mask=mask, other=0.0)
    out = tl.sum(values * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out_ptr + (sequence * heads + head) * HEAD_SIZE + columns, out.to(out_ptr.dtype.element_ty), mask=in_head)
