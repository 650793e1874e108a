"""Runs the kernels in Triton's interpreter against their twins, and prints the errors as JSON.

TRITON_INTERPRET=1 python -m tests.kernels.interpret SEED     (the variable must be set before a kernel is imported)
"""

from __future__ import annotations

import json
import sys
from typing import NamedTuple

import torch
from torch import Tensor

from kvscope.kernels.kv_write import KV_WRITE_WIDTH, kv_write
from kvscope.kernels.kv_write_twin import kv_write_torch
from kvscope.kernels.paged_decode import paged_decode, paged_decode_constants
from kvscope.kernels.paged_decode_twin import paged_decode_torch
from kvscope.kernels.paged_prefill import paged_prefill
from kvscope.kernels.paged_prefill_twin import paged_prefill_torch
from kvscope.kernels.rms_norm import VALUES, rms_norm
from kvscope.kernels.rms_norm_twin import rms_norm_torch
from kvscope.kernels.rotary import rotary
from kvscope.kernels.rotary_twin import rotary_torch


class Case(NamedTuple):
    dtype: torch.dtype
    head_size: int
    heads: int
    kv_heads: int
    block_size: int
    seq_lens: list[int]
    window: int | None = None


TILE = paged_decode_constants(1, 1, 64, 16, itemsize=4)["TILE"]
# Sequences end within, at and just behind a block and a tile; blocks are smaller, larger and no divisor of a tile.
# No bfloat16 where there are products: the interpreter of Triton 3.9 multiplies its bit patterns.
DECODES = [
    (Case(torch.float32, 64, 4, 2, 16, [1, TILE, TILE + 1, 2 * TILE, 2 * TILE + 1]), 1),
    (Case(torch.float32, 80, 3, 1, 5, [7, 2 * TILE + 3]), 1),
    (Case(torch.float32, 96, 2, 2, 48, [49, 31], window=20), 1),
    (Case(torch.float32, 128, 20, 1, 16, [17]), 1),
    (Case(torch.float32, 256, 2, 1, 16, [40], window=1), 1),
    (Case(torch.float16, 64, 4, 2, 16, [63, 16]), 1),
    (Case(torch.float16, 12, 4, 4, 16, [33, 2], window=32), 1),
    # Fewer tokens than pieces, a last one that is not full, windows across them, long sequences among short ones, more
    # pieces than are weighed at once, and more sequences than are looked at at once.
    (Case(torch.float32, 64, 4, 2, 16, [1, 2 * TILE + 2, 3 * TILE, 3 * TILE + 1]), 3),
    (Case(torch.float32, 80, 3, 1, 5, [150, 9], window=40), 5),
    (Case(torch.float16, 128, 2, 1, 16, [2 * TILE + 1, 200]), 5),
    (Case(torch.float32, 16, 1, 1, 64, [1, 20 * TILE, 3, 2 * TILE]), 40),
    (Case(torch.float16, 16, 1, 1, 16, [1 + at % 3 * TILE for at in range(260)], window=TILE), 300),
]
# With each sequence's rows: whole prompts, chunks behind a prefix, single tokens, more rows than a tile holds, and rows
# whose window begins behind the first tile.
PREFILLS = [
    (Case(torch.float32, 64, 4, 2, 16, [33, 1, TILE, 70]), [33, 1, 5, 2]),
    (Case(torch.float32, 80, 3, 1, 5, [40, 27], window=9), [40, 3]),
    (Case(torch.float32, 96, 2, 2, 48, [49]), [35]),
    (Case(torch.float32, 256, 2, 1, 16, [36], window=1), [4]),
    (Case(torch.float16, 128, 10, 2, 16, [60, 20], window=33), [30, 20]),
    (Case(torch.float16, 12, 1, 1, 16, [100], window=5), [70]),
]
WRITES = [(torch.float32, 2, 64), (torch.float16, 3, 80), (torch.bfloat16, 1 + KV_WRITE_WIDTH // 128, 128)]
"""Key-value heads, head size; the last row is wider than what one program copies."""
# Rows that fill a program's tile, leave some of it and are wider than it; tiles of rows that are not full.
NORMS = [
    (torch.float32, 1, 64),
    (torch.float32, 3, 80),
    (torch.float32, 1, VALUES + 63),
    (torch.float16, 1, 2 * VALUES),
    (torch.float16, 5, 96),
    (torch.bfloat16, 2, 256),
    (torch.bfloat16, 1, 100),
]
"""Heads, size of a row."""
TURNS = [
    (torch.float32, 1, 64),
    (torch.float32, 17, 128),
    (torch.float32, 3, 80),
    (torch.float16, 9, 256),
    (torch.float16, 2, 12),
    (torch.bfloat16, 23, 96),
]
"""Heads, head size; some are more than a program's tile."""
EPSILON = 0.01
"""Large enough to be seen in fp16."""


def rms(values: Tensor) -> float:
    return values.double().square().mean().sqrt().item()


def random(case: Case, *shape: int) -> Tensor:
    return torch.randn(*shape).to(case.dtype)


def pages(case: Case, query_lens: list[int]) -> tuple[list[Tensor], Tensor, Tensor]:
    """Both caches, the block tables and the lengths. Whatever no row sees is NaN, and its block another's: the first.

    A sequence's last `query_lens` tokens are the rows.
    """
    sequences, widest = len(case.seq_lens), -(-max(case.seq_lens) // case.block_size)
    block_tables = 1 + torch.randperm(sequences * widest).view(sequences, widest)
    seen = torch.zeros(1 + sequences * widest, case.block_size, dtype=torch.bool)
    for table, length, rows in zip(block_tables, case.seq_lens, query_lens, strict=True):
        first = 0 if case.window is None else max(0, length - rows - case.window + 1)
        slots = (table[:, None] * case.block_size + torch.arange(case.block_size)).view(-1)
        seen.view(-1)[slots[first:length]] = True
        table[: first // case.block_size] = 0
        table[-(-length // case.block_size) :] = 0
    caches = [random(case, *seen.shape, case.kv_heads, case.head_size) for _ in range(2)]
    for cache in caches:
        cache[~seen] = float("nan")
    return caches, block_tables, torch.tensor(case.seq_lens)


def queries(case: Case, rows: int) -> Tensor:
    """[rows, H, D]: a slice of wider rows, as a model hands it over."""
    return random(case, rows, case.heads + 2 * case.kv_heads, case.head_size)[:, : case.heads]


def error(got: Tensor, expected: Tensor) -> float:
    """As a ratio of root mean squares; NaN if a poisoned slot was read or a value not written."""
    return rms(got - expected) / rms(expected)


def decode_error(case: Case, pieces: int) -> float:
    """The kernel's error against the twin in float64, the batch cut into about so many pieces of a tile and more."""
    caches, block_tables, seq_lens = pages(case, [1] * len(case.seq_lens))
    query, scale = queries(case, len(seq_lens)), case.head_size**-0.5
    got = paged_decode(query, *caches, block_tables.int(), seq_lens, scale, case.window, pieces, least=1)
    clean = [cache.nan_to_num().double() for cache in caches]
    return error(got, paged_decode_torch(query.double(), *clean, block_tables, seq_lens, scale, case.window))


def prefill_error(case: Case, query_lens: list[int]) -> float:
    """The kernel's error against the twin in float64."""
    caches, block_tables, seq_lens = pages(case, query_lens)
    query, scale = queries(case, sum(query_lens)), case.head_size**-0.5
    starts, longest = torch.tensor([0, *query_lens]).cumsum(0), max(query_lens)
    got = paged_prefill(query, *caches, block_tables, starts, seq_lens, longest, scale, case.window)
    clean = [cache.nan_to_num().double() for cache in caches]
    exact = paged_prefill_torch(query.double(), *clean, block_tables, starts, seq_lens, longest, scale, case.window)
    return error(got, exact)


def write_differs(dtype: torch.dtype, kv_heads: int, head_size: int) -> int:
    """Values that the kernel leaves otherwise than its twin, whose caches begin as not a number."""
    tokens, blocks, block_size = 7, 3, 5
    rows = torch.randn(tokens, 3 * kv_heads, head_size).to(dtype)
    key, value = rows[:, kv_heads : 2 * kv_heads], rows[:, 2 * kv_heads :]
    slots = torch.randperm(blocks * block_size)[:tokens]
    got, expected = (torch.full((2, blocks, block_size, kv_heads, head_size), torch.nan, dtype=dtype) for _ in range(2))
    kv_write(key, value, *got, slots)
    kv_write_torch(key, value, *expected, slots)
    assert int(expected.isfinite().sum()) == 2 * key.numel()
    return int((~torch.isclose(got, expected, rtol=0, atol=0, equal_nan=True)).sum())


class Beside(NamedTuple):
    """Heads as a model hands them over, a slice of wider rows, and what stands beside and behind them."""

    heads: Tensor
    rows: Tensor
    before: Tensor

    @property
    def others_differ(self) -> bool:
        """Whether anything but the heads is not as it was."""
        now = self.rows.clone()
        now[:-1, 1:-1] = self.before[:-1, 1:-1]
        return not torch.equal(now, self.before)


def beside(dtype: torch.dtype, tokens: int, heads: int, size: int) -> Beside:
    rows = torch.randn(tokens + 1, heads + 2, size).to(dtype)
    return Beside(rows[:-1, 1:-1], rows, rows.clone())


def norm_error(dtype: torch.dtype, heads: int, size: int) -> float:
    """The kernel's error against the twin in float64: alone, in place, and behind an addition, of which the sum too."""
    hidden, again, total = (beside(dtype, 7, heads, size) for _ in range(3))
    delta, weight = torch.randn(7, heads, size).to(dtype), torch.randn(size).to(dtype)
    exact = [rms_norm_torch(values.heads.double(), weight.double(), EPSILON) for values in (hidden, again)]
    kept = total.heads.double()
    exact += [rms_norm_torch(kept, weight.double(), EPSILON, delta.double()), kept]
    got = [rms_norm(hidden.heads, weight, EPSILON), rms_norm(again.heads, weight, EPSILON, out=again.heads)]
    got += [rms_norm(total.heads, weight, EPSILON, delta), total.heads]
    assert torch.equal(hidden.rows, hidden.before)
    assert not again.others_differ
    assert not total.others_differ
    return error(torch.stack(got), torch.stack(exact))


def turn_error(dtype: torch.dtype, heads: int, head_size: int) -> float:
    """The kernel's error against the twin in float64."""
    turned = beside(dtype, 7, heads, head_size)
    angles = torch.randn(7, head_size // 2)
    cos, sin = angles.cos(), angles.sin()
    turns = torch.stack([torch.cat([cos, cos], 1), torch.cat([-sin, sin], 1)], 1).to(dtype)
    exact = turned.heads.double()
    rotary_torch(exact, turns.double())
    rotary(turned.heads, turns)
    assert not turned.others_differ
    return error(turned.heads, exact)


def main() -> None:
    torch.manual_seed(int(sys.argv[1]))
    empty = torch.empty
    # What a kernel fails to write, or reads before it is written, is found by its being no number.
    torch.empty = lambda *shape, **how: empty(*shape, **how).fill_(float("nan"))
    decodes = [(f"decode {case}, {pieces} pieces", decode_error(case, pieces)) for case, pieces in DECODES]
    prefills = [(f"prefill {case}, rows {rows}", prefill_error(case, rows)) for case, rows in PREFILLS]
    writes = [(f"write {case}", write_differs(*case)) for case in WRITES]
    dtypes = [str(case.dtype) for case, _ in [*DECODES, *PREFILLS]]
    attention = [(dtype, *result) for dtype, result in zip(dtypes, decodes + prefills, strict=True)]
    layers = [(str(case[0]), f"norm {case}", norm_error(*case)) for case in NORMS]
    layers += [(str(case[0]), f"rotary {case}", turn_error(*case)) for case in TURNS]
    print(json.dumps({"attention": attention, "layers": layers, "writes": writes}))


if __name__ == "__main__":
    main()
