"""The kernels on this machine's GPU: right first, then how fast, beside a copy and torch's own attention.

    python -m benchmarks.kernels

Bytes are what a kernel must move at least. Their share is of a plain copy's in that time, read and written. torch's
scaled_dot_product_attention has its keys and values gathered beforehand, untimed. The other kernels stand beside their
twins. A kernel that is wrong gets no figures.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.machine import machine
from kvscope.kernels.kv_write_twin import kv_write_torch
from kvscope.kernels.paged_decode_twin import gather_pages, paged_decode_torch
from kvscope.kernels.paged_prefill_twin import paged_prefill_torch
from kvscope.kernels.rms_norm_twin import rms_norm_torch
from kvscope.kernels.rotary_twin import rotary_torch

DEVICE: Final = "cuda"
BLOCK_SIZE: Final = 16
HEADS, KV_HEADS, HEAD_SIZE = 32, 8, 128
SCALE: Final = HEAD_SIZE**-0.5
DECODES: Final = ((1, 1024), (1, 32768), (8, 4096), (32, 1024), (32, 4096), (128, 1024))
"""Sequences, tokens of each."""
PREFILLS: Final = ((1, 2048, 2048), (1, 2048, 16384), (4, 512, 4096), (16, 128, 1024))
"""Sequences, rows and tokens of each."""
TOKENS: Final = (32, 8192)
EPSILON: Final = 1e-6
COPY_BYTES: Final = 1 << 30
ROUNDING: Final = {torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}
Run = Callable[[], Tensor]


class Measurement(NamedTuple):
    """A kernel to measure: its call, the same in float64 by its twin, its competitor, and the bytes that it must
    move.
    """

    name: str
    kernel: Run
    exact: Run
    other: Run
    moved: int


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA GPU that torch can use: nothing measured (the kernels' tests need none: pytest tests/kernels)")
        return 0
    from triton.testing import do_bench

    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=DEVICE)
    copied = 2 * COPY_BYTES / do_bench(source.clone) / 1e6
    print(machine("torch", "triton"))
    print(f"{torch.cuda.get_device_name()}, {HEADS} heads on {KV_HEADS}, head size {HEAD_SIZE}, blocks of {BLOCK_SIZE}")
    print(f"a copy of {COPY_BYTES >> 20} MiB moves {copied:.0f} GB/s, read and written")
    print(f"{'':42}{'us':>9}{'GB/s':>8}{'of copy':>9}{'torch us':>10}{'speed-up':>10}   error")
    wrong = False
    for dtype, rounding in ROUNDING.items():
        for name, kernel, exact, other, moved in measurements(dtype):
            label = f"{str(dtype).removeprefix('torch.')} {name}"
            errors = [error(run(), exact()) for run in (kernel, other)]
            if not max(errors) < 4 * rounding:
                wrong = True
                print(f"{label:42}   results differ, so not timed: error {errors[0]:.1e}, torch's {errors[1]:.1e}")
                continue
            took, other_took = do_bench(kernel), do_bench(other)
            rate = moved / took / 1e6
            print(
                f"{label:42}{1000 * took:9.1f}{rate:8.0f}{rate / copied:9.0%}{1000 * other_took:10.1f}"
                f"{other_took / took:10.2f}   {errors[0]:.1e}"
            )
    return int(wrong)


def measurements(dtype: torch.dtype) -> Iterator[Measurement]:
    for sequences, length in DECODES:
        yield decode(dtype, sequences, length)
    for sequences, rows, length in PREFILLS:
        yield prefill(dtype, sequences, rows, length)
    yield write(dtype, tokens=8192)
    for tokens in TOKENS:
        yield add_and_norm(dtype, tokens)
        yield turn(dtype, tokens)


def decode(dtype: torch.dtype, sequences: int, length: int) -> Measurement:
    from kvscope.kernels.paged_decode import paged_decode

    key_cache, value_cache, tables, lens = pages(dtype, sequences, length)
    query = random(dtype, sequences, HEADS, HEAD_SIZE)
    keys, values = (gather_pages(cache, tables)[:, :, :length].contiguous() for cache in (key_cache, value_cache))
    # Query heads that share a key are to torch as many queries of one head, which serves it best.
    queries = query.view(sequences, KV_HEADS, -1, HEAD_SIZE)
    return Measurement(
        f"decode, {sequences} of {length}",
        lambda: paged_decode(query, key_cache, value_cache, tables, lens, SCALE),
        lambda: paged_decode_torch(query.double(), key_cache.double(), value_cache.double(), tables, lens, SCALE),
        lambda: scaled_dot_product_attention(queries, keys, values, scale=SCALE).view_as(query),
        keys.nbytes + values.nbytes + 2 * query.nbytes,
    )


def prefill(dtype: torch.dtype, sequences: int, rows: int, length: int) -> Measurement:
    from kvscope.kernels.paged_prefill import paged_prefill

    key_cache, value_cache, tables, lens = pages(dtype, sequences, length)
    query = random(dtype, sequences * rows, HEADS, HEAD_SIZE)
    starts = torch.arange(sequences + 1, device=DEVICE) * rows
    keys, values = (gather_pages(cache, tables)[:, :, :length].contiguous() for cache in (key_cache, value_cache))
    queries = query.view(sequences, rows, HEADS, HEAD_SIZE).transpose(1, 2)
    tokens = torch.arange(length, device=DEVICE)
    # Without a prefix torch needs no mask, and is faster so.
    visible = None if rows == length else tokens <= tokens[length - rows :, None]

    def other() -> Tensor:
        out = scaled_dot_product_attention(
            queries, keys, values, visible, is_causal=visible is None, scale=SCALE, enable_gqa=True
        )
        return out.transpose(1, 2).reshape(query.shape)

    def exact() -> Tensor:
        return paged_prefill_torch(
            query.double(), key_cache.double(), value_cache.double(), tables, starts, lens, rows, SCALE
        )

    return Measurement(
        f"prefill, {sequences} of {length}, last {rows}",
        lambda: paged_prefill(query, key_cache, value_cache, tables, starts, lens, rows, SCALE),
        exact,
        other,
        keys.nbytes + values.nbytes + 2 * query.nbytes,
    )


def write(dtype: torch.dtype, tokens: int) -> Measurement:
    from kvscope.kernels.kv_write import kv_write

    key, value = (random(dtype, tokens, KV_HEADS, HEAD_SIZE) for _ in range(2))
    slots = torch.randperm(2 * tokens, device=DEVICE)[:tokens]
    kv = torch.zeros(2, 2 * tokens // BLOCK_SIZE, BLOCK_SIZE, KV_HEADS, HEAD_SIZE, device=DEVICE, dtype=dtype)

    def into_kv(how: Callable[..., None]) -> Tensor:
        how(key, value, kv[0], kv[1], slots)
        return kv

    def exact() -> Tensor:
        expected = torch.zeros_like(kv)
        kv_write_torch(key, value, expected[0], expected[1], slots)
        return expected

    def run(how: Callable[..., None]) -> Run:
        return lambda: into_kv(how)

    return Measurement(f"write, {tokens} tokens", run(kv_write), exact, run(kv_write_torch), 4 * key.nbytes)


def add_and_norm(dtype: torch.dtype, tokens: int) -> Measurement:
    from kvscope.kernels.rms_norm import rms_norm

    hidden, delta = (random(dtype, tokens, HEADS * HEAD_SIZE) for _ in range(2))
    weight = random(dtype, HEADS * HEAD_SIZE)
    # Each adds to its own, and so gives the exact result the first time.
    mine, others = hidden.clone(), hidden.clone()
    return Measurement(
        f"add and norm, {tokens} tokens",
        lambda: rms_norm(mine, weight, EPSILON, delta),
        lambda: rms_norm_torch(hidden.double(), weight.double(), EPSILON, delta.double()),
        lambda: rms_norm_torch(others, weight, EPSILON, delta),
        4 * hidden.nbytes,
    )


def turn(dtype: torch.dtype, tokens: int) -> Measurement:
    from kvscope.kernels.rotary import rotary

    heads = random(dtype, tokens, HEADS + KV_HEADS, HEAD_SIZE)
    angles = torch.rand(tokens, HEAD_SIZE // 2, device=DEVICE)
    cos, sin = angles.cos(), angles.sin()
    turns = torch.stack([torch.cat([cos, cos], 1), torch.cat([-sin, sin], 1)], 1).to(dtype)

    def turned(how: Callable[[Tensor, Tensor], None], heads: Tensor, turns: Tensor) -> Tensor:
        how(heads, turns)
        return heads

    # Each turns its own, and so gives the exact result the first time.
    mine, others = heads.clone(), heads.clone()
    return Measurement(
        f"rotary, {tokens} tokens",
        lambda: turned(rotary, mine, turns),
        lambda: turned(rotary_torch, heads.double(), turns.double()),
        lambda: turned(rotary_torch, others, turns),
        2 * heads.nbytes + turns.nbytes,
    )


def pages(dtype: torch.dtype, sequences: int, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the caches of keys and values, block tables in random order, and lengths."""
    blocks = sequences * -(-length // BLOCK_SIZE)
    tables = 1 + torch.randperm(blocks, device=DEVICE, dtype=torch.int32).view(sequences, -1)
    keys, values = (random(dtype, 1 + blocks, BLOCK_SIZE, KV_HEADS, HEAD_SIZE) for _ in range(2))
    return keys, values, tables, torch.full((sequences,), length, device=DEVICE)


def random(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def error(got: Tensor, exact: Tensor) -> float:
    """As a ratio of root mean squares."""
    return ((got - exact).double().square().mean().sqrt() / exact.double().square().mean().sqrt()).item()


if __name__ == "__main__":
    sys.exit(main())
