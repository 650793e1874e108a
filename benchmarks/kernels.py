"""The paged decode kernel on this machine's GPU: right first, then how long it takes beside its torch twin.

    python -m benchmarks.kernels
"""

from __future__ import annotations

import sys
from typing import Final

import torch
from torch import Tensor

from benchmarks.machine import machine
from kernels.paged_decode_twin import paged_decode_torch

BLOCK_SIZE: Final = 16
HEADS, KV_HEADS, HEAD_SIZE = 32, 8, 128
SHAPES: Final = ((1, 512), (1, 8192), (32, 512), (32, 4096), (128, 1024))
"""Sequences, tokens of each."""
ROUNDING: Final = {torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA GPU that torch can use: nothing measured (the kernel's tests need none: pytest tests/kernels)")
        return 0
    from triton.testing import do_bench

    from kernels.paged_decode import paged_decode

    print(machine("torch", "triton"))
    print(f"{torch.cuda.get_device_name()}, {HEADS} heads on {KV_HEADS}, head size {HEAD_SIZE}, blocks of {BLOCK_SIZE}")
    print(f"{'dtype':10}{'sequences':>10}{'tokens':>8}{'kernel us':>11}{'twin us':>10}{'GB/s':>7}   error")
    wrong = False
    for dtype, rounding in ROUNDING.items():
        for sequences, length in SHAPES:
            query, caches, block_tables, seq_lens = case(dtype, sequences, length)
            scale = HEAD_SIZE**-0.5
            got = paged_decode(query, *caches, block_tables, seq_lens, scale)
            exact = paged_decode_torch(query.double(), *(c.double() for c in caches), block_tables, seq_lens, scale)
            error = ((got - exact).square().mean().sqrt() / exact.square().mean().sqrt()).item()
            if not error < 4 * rounding:
                wrong = True
                print(f"{dtype!s:10}{sequences:10}{length:8}   WRONG, so not timed: error {error:.1e}")
                continue
            kernel_ms = do_bench(lambda a=(query, *caches, block_tables, seq_lens, scale): paged_decode(*a))
            twin_ms = do_bench(lambda a=(query, *caches, block_tables, seq_lens, scale): paged_decode_torch(*a))
            read = 2 * sequences * length * KV_HEADS * HEAD_SIZE * dtype.itemsize
            name = str(dtype).removeprefix("torch.")
            print(
                f"{name:10}{sequences:10}{length:8}{1000 * kernel_ms:11.1f}{1000 * twin_ms:10.1f}"
                f"{read / kernel_ms / 1e6:7.0f}   {error:.1e}"
            )
    return int(wrong)


def case(dtype: torch.dtype, sequences: int, length: int) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    """Query, both caches, block tables in random order, lengths."""
    blocks = sequences * -(-length // BLOCK_SIZE)
    torch.manual_seed(0)
    block_tables = 1 + torch.randperm(blocks, device="cuda").view(sequences, -1)
    caches = [torch.randn(1 + blocks, BLOCK_SIZE, KV_HEADS, HEAD_SIZE, device="cuda", dtype=dtype) for _ in range(2)]
    query = torch.randn(sequences, HEADS, HEAD_SIZE, device="cuda", dtype=dtype)
    return query, caches, block_tables, torch.full((sequences,), length, device="cuda")


if __name__ == "__main__":
    sys.exit(main())
