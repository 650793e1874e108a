"""Paged decode attention in Triton. Shapes are those of kernels/__init__.py.

A program serves a piece of one sequence and one key-value head, with all query heads that share it, so that each key is
read once. It walks the piece in tiles of tokens, whatever the block size. Pieces are of one length over the whole
batch, so that one long sequence among many keeps no multiprocessor for itself. What the pieces of a sequence gave is
weighed by a second kernel (flash-decoding, https://pytorch.org/blog/flash-decoding/). A sequence of one piece is
written to the result at once.

The host knows no length, since a captured step has other ones each time: each program finds its piece by the lengths.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tiles import COMMON, LEAST, LOG2_E, MIN_SIDE, NO_WINDOW, Limits, fold_tile, head_constants, limits_of

MIN_PIECE: Final = 128
"""Tokens of a piece at least: its result, four bytes a value and written and read again, is then little beside them."""
PIECES_A_PROCESSOR: Final = 8
"""Of a batch whose length is known, so many waves of programs that the last one is little beside them."""
SCANNED: Final = tl.constexpr(256)
"""Sequences whose lengths are looked at at once."""
WEIGHED: Final = tl.constexpr(16)
"""Pieces that the second kernel holds in registers at once."""


def paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None = None,
    pieces: int | None = None,
    least: int = MIN_PIECE,
) -> Tensor:
    """Compute the decode attention in Triton.

    All tokens together are cut into about `pieces` pieces of at least `least` tokens, and each sequence has at least
    one. `pieces` is chosen to occupy the device unless given. Raises ValueError for heads that are too wide.
    """
    sequences, heads, head_size = query.shape
    _, block_size, kv_heads, _ = key_cache.shape
    limits = limits_of(query.device)
    fixed = paged_decode_constants(heads, kv_heads, head_size, block_size, query.dtype.itemsize)
    if pieces is None:
        pieces = max(1, PIECES_A_PROCESSOR * limits.processors // kv_heads)
    longest = min(block_tables.shape[1] * block_size, (window or NO_WINDOW - fixed["TILE"]) + fixed["TILE"])
    programs = min(sequences + pieces, sequences * triton.cdiv(longest, least))
    out = torch.empty(sequences, heads, head_size, device=query.device, dtype=query.dtype)
    part, log_sums = out, out
    if programs > sequences:
        part = torch.empty(programs, heads, head_size, device=query.device, dtype=torch.float32)
        log_sums = torch.empty(programs, heads, device=query.device, dtype=torch.float32)
    cut = (seq_lens, sequences, window or NO_WINDOW, pieces, least)
    paged_decode_kernel[(programs, kv_heads)](
        out,
        part,
        log_sums,
        query,
        key_cache,
        value_cache,
        block_tables,
        *cut,
        scale * LOG2_E,
        query.stride(0),
        block_tables.stride(0),
        **fixed,
        **paged_decode_options(head_size, query.dtype.itemsize, limits),
    )
    if programs > sequences:
        reduce_pieces_kernel[(sequences, heads)](
            out,
            part,
            log_sums,
            *cut,
            HEAD_SIZE=head_size,
            HEAD_PADDED=fixed["HEAD_PADDED"],
            TILE=fixed["TILE"],
            **COMMON,
        )
    return out


def paged_decode_constants(heads: int, kv_heads: int, head_size: int, block_size: int, itemsize: int) -> dict[str, int]:
    """Return the constants that the kernel is compiled for. Raises ValueError for heads that are too wide for it."""
    return {
        **head_constants(heads, kv_heads, head_size, block_size, itemsize, tile=128),
        "GROUP_PADDED": max(MIN_SIDE, triton.next_power_of_2(heads // kv_heads)),
    }


def paged_decode_options(head_size: int, itemsize: int, limits: Limits) -> dict[str, int | bool]:
    """Threads / 32 of a program, what the widest heads need to stay in registers, and the depth of its pipeline."""
    return {"num_warps": 8 if head_size * itemsize > 256 else 4, "num_stages": 2 if limits.amd else 3, **COMMON}


@triton.jit  # type: ignore[untyped-decorator]  # Triton takes no annotations but its own
def tokens_read(seq_lens, window, TILE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Tokens that are read of each sequence, from the beginning of a tile on."""
    return seq_lens - tl.maximum(seq_lens - window, 0) // TILE * TILE


@triton.jit
def load_lens(lens_ptr, start, sequences):  # type: ignore[no-untyped-def]
    """Return SCANNED lengths from `start` on, 0 behind the last."""
    at = start + tl.arange(0, SCANNED)
    return tl.load(lens_ptr + at, mask=at < sequences, other=0).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def piece_length(lens_ptr, sequences, window, pieces, least, TILE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Tokens of each piece, whole tiles, but for the last of a sequence."""
    tokens = 0
    for start in range(0, sequences, SCANNED):
        tokens += tl.sum(tokens_read(load_lens(lens_ptr, start, sequences), window, TILE), 0)
    return tl.cdiv(tl.maximum(tl.cdiv(tokens, pieces), least), TILE) * TILE


@triton.jit(do_not_specialize=["sequences", "window", "pieces", "least", "tables_stride"])  # type: ignore[untyped-decorator]
def paged_decode_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    part_ptr,
    log_sums_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    tables_ptr,
    lens_ptr,
    sequences,
    window,
    pieces,
    least,
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
    """Program (piece, key-value head). Rows of the query are `query_stride` apart, its heads contiguous.

    Pieces are counted through the batch. `part` is [pieces, heads, HEAD_SIZE], and `log_sums` [pieces, heads] is log2
    of the sum of each row's exponentials. A sequence's only piece is written to `out` [sequences, heads, HEAD_SIZE].
    """
    piece = tl.program_id(0)
    kv_head = tl.program_id(1)
    length = piece_length(lens_ptr, sequences, window, pieces, least, TILE)
    # How many sequences, and how many pieces, end before this one.
    sequence = 0
    before = 0
    counted = 0
    for start in range(0, sequences, SCANNED):
        seq_lens = load_lens(lens_ptr, start, sequences)
        of_each = tl.cdiv(tokens_read(seq_lens, window, TILE), length)
        ended = (counted + tl.cumsum(of_each, 0) <= piece) & (start + tl.arange(0, SCANNED) < sequences)
        sequence += tl.sum(ended.to(tl.int32), 0)
        before += tl.sum(tl.where(ended, of_each, 0), 0)
        counted += tl.sum(of_each, 0)
    if piece >= counted:
        return

    seq_len = tl.load(lens_ptr + sequence).to(tl.int32)
    read = tokens_read(seq_len, window, TILE)
    begin = seq_len - read + (piece - before) * length
    end = tl.minimum(begin + length, seq_len)
    first = tl.maximum(seq_len - window, 0)

    # 64 bits: many sequences of many heads are more than 2^31 elements.
    sequence = tl.cast(sequence, tl.int64)
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
        largest, total, weighted = fold_tile(
            query,
            key_ptr,
            value_ptr,
            table_ptr,
            start,
            first,
            end,
            ((tokens >= first) & (tokens < end))[None, :],
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
            ENTRY_A_BLOCK=True,
        )

    weighted = weighted / total[:, None]
    if read <= length:
        row = sequence * KV_HEADS * GROUP
        tl.store(out_ptr + row * HEAD_SIZE + offsets, weighted.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        row = piece.to(tl.int64) * KV_HEADS * GROUP
        tl.store(part_ptr + row * HEAD_SIZE + offsets, weighted.to(part_ptr.dtype.element_ty), mask=mask)
        tl.store(
            log_sums_ptr + row + heads, (largest + tl.log2(total)).to(log_sums_ptr.dtype.element_ty), mask=row_mask
        )


@triton.jit(do_not_specialize=["sequences", "window", "pieces", "least"])  # type: ignore[untyped-decorator]
def reduce_pieces_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    part_ptr,
    log_sums_ptr,
    lens_ptr,
    sequences,
    window,
    pieces,
    least,
    HEAD_SIZE: tl.constexpr,  # noqa: N803
    HEAD_PADDED: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
) -> None:
    """Program (sequence, query head): what its pieces gave, weighted by the sums of their exponentials."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    length = piece_length(lens_ptr, sequences, window, pieces, least, TILE)
    count = tl.cdiv(tokens_read(tl.load(lens_ptr + sequence).to(tl.int32), window, TILE), length)
    if count <= 1:
        return
    before = 0
    for start in range(0, sequence, SCANNED):
        seq_lens = load_lens(lens_ptr, start, sequence)
        before += tl.sum(tl.cdiv(tokens_read(seq_lens, window, TILE), length), 0)

    columns = tl.arange(0, HEAD_PADDED)
    in_head = columns < HEAD_SIZE
    largest = -3.0e38
    total = 0.0
    weighted = tl.zeros([HEAD_PADDED], dtype=tl.float32)
    for start in range(0, count, WEIGHED):
        parts = start + tl.arange(0, WEIGHED)
        rows = (before + parts).to(tl.int64) * heads + head
        log_sums = tl.load(log_sums_ptr + rows, mask=parts < count, other=float("-inf"))
        mask = (parts < count)[:, None] & in_head[None, :]
        values = tl.load(part_ptr + rows[:, None] * HEAD_SIZE + columns[None, :], mask=mask, other=0.0)
        new_largest = tl.maximum(largest, tl.max(log_sums, 0))
        correction = tl.exp2(largest - new_largest)
        weights = tl.exp2(log_sums - new_largest)
        total = total * correction + tl.sum(weights, 0)
        weighted = weighted * correction + tl.sum(values * weights[:, None], 0)
        largest = new_largest
    row = sequence.to(tl.int64) * heads + head
    tl.store(out_ptr + row * HEAD_SIZE + columns, (weighted / total).to(out_ptr.dtype.element_ty), mask=in_head)
