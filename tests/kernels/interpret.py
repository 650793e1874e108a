"""Runs the paged decode kernel in Triton's interpreter against its twin, and prints the errors as JSON.

TRITON_INTERPRET=1 python -m tests.kernels.interpret     (the variable must be set before the kernel is imported)
"""

from __future__ import annotations

import json
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.paged_decode import TILE, paged_decode
from kernels.paged_decode_twin import paged_decode_torch


class Case(NamedTuple):
    dtype: torch.dtype
    head_size: int
    heads: int
    kv_heads: int
    block_size: int
    seq_lens: list[int]


# Sequences end within, at and just behind a block and a tile; blocks are smaller, larger and no divisor of a tile.
# No bfloat16: the interpreter of Triton 3.9 multiplies its bit patterns.
CASES = [
    Case(torch.float32, 64, 4, 2, 16, [1, TILE, TILE + 1]),
    Case(torch.float32, 80, 3, 1, 5, [7, 2 * TILE + 3]),
    Case(torch.float32, 96, 2, 2, 48, [49, 31]),
    Case(torch.float32, 128, 20, 1, 16, [17]),
    Case(torch.float32, 256, 2, 1, 16, [40]),
    Case(torch.float16, 64, 4, 2, 16, [63, 16]),
    Case(torch.float16, 12, 4, 4, 16, [33, 2]),
]


def rms(values: Tensor) -> float:
    return values.double().square().mean().sqrt().item()


def error(case: Case) -> float:
    """The kernel's error against the twin in fp32, as a ratio of root mean squares; NaN if a poisoned slot was read.

    Whatever no sequence sees is NaN in the kernel's caches, and 0 in the twin's.
    """
    generator = torch.Generator().manual_seed(case.head_size)
    sequences, widest = len(case.seq_lens), -(-max(case.seq_lens) // case.block_size)
    block_tables = 1 + torch.randperm(sequences * widest, generator=generator).view(sequences, widest)
    seen = torch.zeros(1 + sequences * widest, case.block_size, dtype=torch.bool)
    for table, length in zip(block_tables, case.seq_lens, strict=True):
        seen.view(-1)[(table[:, None] * case.block_size + torch.arange(case.block_size)).view(-1)[:length]] = True
        table[-(-length // case.block_size) :] = 0

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(case.dtype)

    # The model hands over a slice of a wider row.
    query = random(sequences, case.heads + 2 * case.kv_heads, case.head_size)[:, : case.heads]
    caches = [random(*seen.shape, case.kv_heads, case.head_size) for _ in range(2)]
    for cache in caches:
        cache[~seen] = float("nan")
    seq_lens = torch.tensor(case.seq_lens)
    scale = case.head_size**-0.5
    got = paged_decode(query, *caches, block_tables, seq_lens, scale)
    clean = [cache.nan_to_num().float() for cache in caches]
    expected = paged_decode_torch(query.float(), *clean, block_tables, seq_lens, scale)
    return rms(got - expected) / rms(expected)


def main() -> None:
    empty = torch.empty
    # What the kernel fails to write is found by its being no number.
    torch.empty = lambda *shape, **how: empty(*shape, **how).fill_(float("nan"))
    print(json.dumps([[str(case.dtype), case.head_size, error(case)] for case in CASES]))


if __name__ == "__main__":
    main()
