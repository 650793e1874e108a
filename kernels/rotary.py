"""Rotary positions in Triton, in the halves layout: dimension i turns with i + D / 2.

https://arxiv.org/abs/2104.09864. Shapes are those of kernels/__init__.py. Query and key heads stand side by side, so
that one launch turns both, in place.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from .tiles import COMMON

PAIRS: Final = 1024
"""Pairs of a program: enough for 16 bytes a thread."""


def rotary(heads: Tensor, turns: Tensor) -> None:
    """Turn the heads in Triton."""
    tokens, count, head_size = heads.shape
    fixed = rotary_constants(head_size)
    rotary_kernel[(tokens, triton.cdiv(count, fixed["HEADS"]))](heads, turns, count, heads.stride(0), **fixed, **COMMON)


def rotary_constants(head_size: int) -> dict[str, int]:
    """Return the constants that the kernel is compiled for."""
    padded = triton.next_power_of_2(head_size // 2)
    return {"HALF": head_size // 2, "HALF_PADDED": padded, "HEADS": max(1, PAIRS // padded)}


@triton.jit  # type: ignore[untyped-decorator]  # Triton takes no annotations but its own
def rotary_kernel(  # type: ignore[no-untyped-def]
    heads_ptr,
    turns_ptr,
    count,
    heads_stride,
    HALF: tl.constexpr,  # noqa: N803  # compile-time constants are written as such
    HALF_PADDED: tl.constexpr,  # noqa: N803
    HEADS: tl.constexpr,  # noqa: N803
) -> None:
    """Program (token, tile of its `count` heads). Tokens are `heads_stride` apart, heads contiguous."""
    # 64 bits: many tokens of many heads are more than 2^31 elements.
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, HALF_PADDED)
    in_half = pair < HALF
    mask = (head < count)[:, None] & in_half[None, :]

    # The cosine and the sine with which the second half turns: the first of one row, the last of the other.
    turn_ptr = turns_ptr + token * (4 * HALF) + pair
    cos = tl.load(turn_ptr, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(turn_ptr + 3 * HALF, mask=in_half, other=0.0).to(tl.float32)[None, :]
    first_ptr = heads_ptr + token * heads_stride + (head * (2 * HALF))[:, None] + pair[None, :]
    first = tl.load(first_ptr, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(first_ptr + HALF, mask=mask, other=0.0).to(tl.float32)
    kept = heads_ptr.dtype.element_ty
    tl.store(first_ptr, (first * cos - second * sin).to(kept), mask=mask)
    tl.store(first_ptr + HALF, (second * cos + first * sin).to(kept), mask=mask)
