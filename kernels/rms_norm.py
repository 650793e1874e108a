"""RMSNorm in Triton, of hidden states or of heads, after a residual addition if there is one.

Root mean square layer normalisation, https://arxiv.org/abs/1910.07467. Shapes are those of kernels/__init__.py.

A program takes whole rows, as many narrow ones as fill it. A row is read once and stays in registers, so that addition
and norm cost only reading and writing.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tiles import COMMON

VALUES: Final = 1024
"""Values of a program, unless a single row has more."""
MAX_SIZE: Final = 1 << 14
"""A row's values must stay in registers."""


def rms_norm(
    hidden: Tensor, weight: Tensor, epsilon: float, delta: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Compute addition and norm in one launch, in Triton. Raises ValueError for rows that are too wide for it."""
    size = hidden.shape[-1]
    fixed = rms_norm_constants(size, added=delta is not None)
    if out is None:
        out = torch.empty(hidden.shape, device=hidden.device, dtype=hidden.dtype)
    heads = hidden.shape[1] if hidden.dim() == 3 else 1
    rows = len(hidden) * heads
    if delta is None:
        delta = hidden
    rms_norm_kernel[(triton.cdiv(rows, fixed["ROWS"]),)](
        out,
        hidden,
        delta,
        weight,
        rows,
        heads,
        epsilon,
        out.stride(0),
        hidden.stride(0),
        delta.stride(0),
        **fixed,
        **rms_norm_options(size),
    )
    return out


def rms_norm_constants(size: int, added: bool) -> dict[str, int]:
    """Return the constants that the kernel is compiled for. Raises ValueError for rows that are too wide for it."""
    if size > MAX_SIZE:
        raise ValueError(f"rows of {size} values are to be normed, and may have {MAX_SIZE} at most")
    padded = triton.next_power_of_2(size)
    return {"SIZE": size, "PADDED": padded, "ROWS": max(1, VALUES // padded), "ADDED": added}


def rms_norm_options(size: int) -> dict[str, int | bool]:
    """Threads / 32 of a program: each thread has 16 values of a wide row, and 32 of the widest."""
    return {"num_warps": min(16, max(4, triton.next_power_of_2(size) // 512)), **COMMON}


@triton.jit  # type: ignore[untyped-decorator]  # Triton takes no annotations but its own
def rms_norm_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    hidden_ptr,
    delta_ptr,
    weight_ptr,
    rows,
    heads,
    epsilon,
    out_stride,
    hidden_stride,
    delta_stride,
    SIZE: tl.constexpr,  # noqa: N803  # compile-time constants are written as such
    PADDED: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    ADDED: tl.constexpr,  # noqa: N803
) -> None:
    """Program (tile of rows), a row being one of `heads` of a token. Tokens are the strides apart, heads contiguous."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, PADDED)
    mask = (row < rows)[:, None] & (columns < SIZE)[None, :]
    # 64 bits: many tokens of wide rows are more than 2^31 elements.
    token = (row // heads).to(tl.int64)
    in_token = ((row % heads) * SIZE)[:, None] + columns[None, :]
    at = (token * hidden_stride)[:, None] + in_token

    values = tl.load(hidden_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if ADDED:
        values += tl.load(delta_ptr + (token * delta_stride)[:, None] + in_token, mask=mask, other=0.0).to(tl.float32)
        # The norm is of the sum in the type that is stored.
        total = values.to(hidden_ptr.dtype.element_ty)
        tl.store(hidden_ptr + at, total, mask=mask)
        values = total.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, 1) / SIZE + epsilon)
    weight = tl.load(weight_ptr + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    out = (values * scale[:, None] * weight[None, :]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (token * out_stride)[:, None] + in_token, out, mask=mask)
