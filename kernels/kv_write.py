"""The write of new keys and values into the paged cache in Triton. Shapes are those of kernels/__init__.py."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from .tiles import COMMON

KV_WRITE_WIDTH: Final = 1024
"""Values of a key, and of a value, that a program copies: enough for 16 bytes a thread."""


def kv_write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Write both caches in one launch, in Triton."""
    row = key.shape[1] * key.shape[2]
    kv_write_kernel[(len(key), triton.cdiv(row, KV_WRITE_WIDTH))](
        key, value, key_cache, value_cache, slots, row, key.stride(0), value.stride(0), WIDTH=KV_WRITE_WIDTH, **COMMON
    )


@triton.jit  # type: ignore[untyped-decorator]  # Triton takes no annotations but its own
def kv_write_kernel(  # type: ignore[no-untyped-def]
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slots_ptr,
    row,
    key_stride,
    value_stride,
    WIDTH: tl.constexpr,  # noqa: N803  # compile-time constants are written as such
) -> None:
    """Program (token, part of its row of `row` values). Rows are `key_stride` and `value_stride` apart."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = columns < row
    # 64 bits: a pool of many blocks is larger than 2^31 elements.
    cached = tl.load(slots_ptr + token).to(tl.int64) * row + columns
    tl.store(key_cache_ptr + cached, tl.load(key_ptr + token * key_stride + columns, mask=mask), mask=mask)
    tl.store(value_cache_ptr + cached, tl.load(value_ptr + token * value_stride + columns, mask=mask), mask=mask)
