"""The shared code of the attention kernels: one tile of a sequence's keys and values, folded into a running softmax.

A softmax over tiles keeps, for each row of queries, its largest score, the sum of the exponentials and the weighted
values, and corrects them when the largest grows (Milakov and Gimelshein, https://arxiv.org/abs/1805.02867).
Exponentials are of base 2, which is what a GPU has: scores come in times log2(e).
"""

from __future__ import annotations

from functools import cache
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

LOG2_E: Final = 1.4426950408889634
MIN_SIDE: Final = 16
"""Rows, and head size, that a tensor core's product takes at least. A mask covers the rest."""
TILE_BYTES: Final = 16 << 10
"""Size of a tile's keys, and of its values: with two tiles on their way, within every target's shared memory."""
MAX_HEAD_SIZE: Final = 256
"""A head's values must stay in registers."""
NO_WINDOW: Final = 2**31 - 1
"""More tokens than any sequence has."""
COMMON: Final = {"enable_fp_fusion": True}
"""Options of every launch. A product and a sum in one rounding: Triton's default is to change."""
LEAST: Final = tl.constexpr(-3.0e38)
"""Below any score, and finite: a row that has seen nothing yet must not subtract infinity from infinity."""


class Limits(NamedTuple):
    """What a device has: so many multiprocessors, and AMD's shared memory and warps or NVIDIA's."""

    processors: int
    amd: bool


@cache
def limits_of(device: torch.device) -> Limits:
    """Return the limits of a device. The interpreter has one processor."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return Limits(processors, amd=torch.version.hip is not None)


def head_constants(
    heads: int, kv_heads: int, head_size: int, block_size: int, itemsize: int, tile: int
) -> dict[str, int]:
    """Return the constants that both attention kernels are compiled for, with `tile` tokens a tile if they are not too
    many bytes.

    Raises ValueError for heads that are too wide, or that the key heads do not divide evenly.
    """
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} key heads evenly")
    if head_size > MAX_HEAD_SIZE:
        raise ValueError(f"the head size is {head_size} and may be {MAX_HEAD_SIZE} at most")
    padded = max(MIN_SIDE, triton.next_power_of_2(head_size))
    return {
        "KV_HEADS": kv_heads,
        "GROUP": heads // kv_heads,
        "HEAD_SIZE": head_size,
        "HEAD_PADDED": padded,
        "BLOCK_SIZE": block_size,
        "TILE": min(tile, TILE_BYTES // (padded * itemsize)),
    }


@triton.jit  # type: ignore[untyped-decorator]  # Triton takes no annotations but its own
def fold_tile(  # type: ignore[no-untyped-def]
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
    KV_HEADS: tl.constexpr,  # noqa: N803  # compile-time constants are written as such
    HEAD_SIZE: tl.constexpr,  # noqa: N803
    HEAD_PADDED: tl.constexpr,  # noqa: N803
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
    ENTRY_A_BLOCK: tl.constexpr,  # noqa: N803
):
    """Fold in TILE tokens from `start` on, a multiple of TILE. Those from `first` to before `end` are read, and those
    that are `visible` [rows, TILE] seen. ENTRY_A_BLOCK: the table is read once a block, where blocks and tiles are
    powers of two, and not once a token.

    query [rows, HEAD_PADDED], with `scale` times log2(e). Returns largest [rows], total [rows] and weighted [rows,
    HEAD_PADDED] as they are then.
    """
    columns = tl.arange(0, HEAD_PADDED)
    tokens = start + tl.arange(0, TILE)
    written = (tokens >= first) & (tokens < end)
    # 64 bits: a pool of many blocks is larger than 2^31 elements.
    if not ENTRY_A_BLOCK or BLOCK_SIZE & (BLOCK_SIZE - 1) != 0:
        blocks = tl.load(table_ptr + tokens // BLOCK_SIZE, mask=written, other=0).to(tl.int64)
        slots = blocks * BLOCK_SIZE + tokens % BLOCK_SIZE
    elif BLOCK_SIZE >= TILE:
        block = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)
        slots = block * BLOCK_SIZE + tokens % BLOCK_SIZE
    else:
        each = tl.arange(0, TILE // BLOCK_SIZE)
        entries_ptr = table_ptr + start // BLOCK_SIZE + each
        blocks = tl.load(entries_ptr, mask=start + each * BLOCK_SIZE < end, other=0).to(tl.int64)
        slots = tl.reshape(blocks[:, None] * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)[None, :], [TILE])
    offsets = (slots * KV_HEADS + kv_head)[:, None] * HEAD_SIZE + columns[None, :]
    mask = written[:, None]
    if HEAD_SIZE < HEAD_PADDED:
        mask &= (columns < HEAD_SIZE)[None, :]

    key = tl.load(key_ptr + offsets, mask=mask, other=0.0)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    scores = tl.where(visible, scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    correction = tl.exp2(largest - new_largest)
    weights = tl.exp2(scores - new_largest[:, None])

    value = tl.load(value_ptr + offsets, mask=mask, other=0.0)
    total = total * correction + tl.sum(weights, 1)
    weighted = weighted * correction[:, None]
    weighted = tl.dot(weights.to(value.dtype), value, acc=weighted, input_precision="ieee")
    return new_largest, total, weighted
