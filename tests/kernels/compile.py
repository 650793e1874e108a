"""Compiles the kernels ahead of time, which needs no GPU, and prints as JSON what each takes.

python -m tests.kernels.compile few|covering|all
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import cycle, product
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvscope.kernels import kv_write, paged_decode, paged_prefill, rms_norm, rotary
from kvscope.kernels.tiles import COMMON, MAX_HEAD_SIZE, Limits

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
TARGETS = {
    **{f"sm_{arch}": GPUTarget("cuda", arch, 32) for arch in (80, 90, 100, 120)},
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
DTYPES = {"fp32": 4, "fp16": 2, "bf16": 2}
HEAD_SIZES = (64, 80, 96, 128, MAX_HEAD_SIZE)
HEADS, KV_HEADS, BLOCK_SIZE = 8, 2, 16
SHARED_KIB = {"sm_80": 163, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64}
"""A block's at most: CUDA programming guide, technical specifications by compute capability; AMD's CDNA 3 ISA, LDS."""
LIMITS = {target: Limits(100, target.startswith("gfx")) for target in SHARED_KIB}


class Kernel(NamedTuple):
    function: Any
    constants: dict[str, int]
    options: dict[str, int | bool]


class Made(NamedTuple):
    kernel: str
    target: str
    dtype: str
    head_size: int


def decode(head_size: int, itemsize: int, limits: Limits) -> Kernel:
    fixed = paged_decode.paged_decode_constants(HEADS, KV_HEADS, head_size, BLOCK_SIZE, itemsize)
    options = paged_decode.paged_decode_options(head_size, itemsize, limits)
    return Kernel(paged_decode.paged_decode_kernel, fixed, options)


def reduce(head_size: int, itemsize: int, limits: Limits) -> Kernel:
    fixed = paged_decode.paged_decode_constants(HEADS, KV_HEADS, head_size, BLOCK_SIZE, itemsize)
    kept = {name: fixed[name] for name in ("HEAD_SIZE", "HEAD_PADDED", "TILE")}
    return Kernel(paged_decode.reduce_pieces_kernel, kept, COMMON)


def prefill(head_size: int, itemsize: int, limits: Limits) -> Kernel:
    fixed = paged_prefill.paged_prefill_constants(HEADS, KV_HEADS, head_size, BLOCK_SIZE, itemsize, limits)
    options = paged_prefill.paged_prefill_options(head_size, itemsize, limits)
    return Kernel(paged_prefill.paged_prefill_kernel, fixed, options)


def norm(size: int, added: bool) -> Kernel:
    return Kernel(rms_norm.rms_norm_kernel, rms_norm.rms_norm_constants(size, added), rms_norm.rms_norm_options(size))


KERNELS: dict[str, Callable[[int, int, Limits], Kernel]] = {
    "write": lambda *_: Kernel(kv_write.kv_write_kernel, {"WIDTH": kv_write.KV_WRITE_WIDTH}, COMMON),
    "decode": decode,
    "reduce": reduce,
    "prefill": prefill,
    "norm of heads": lambda head_size, *_: norm(head_size, added=False),
    # Up to the widest rows that there may be.
    "add and norm": lambda head_size, itemsize, limits: norm(
        head_size * rms_norm.MAX_SIZE // MAX_HEAD_SIZE, added=True
    ),
    "rotary": lambda head_size, itemsize, limits: Kernel(
        rotary.rotary_kernel, rotary.rotary_constants(head_size), COMMON
    ),
}
STRIDES = ("query_stride", "key_stride", "value_stride", "out_stride", "hidden_stride", "delta_stride", "heads_stride")
TYPES = {
    **dict.fromkeys((*STRIDES, "tables_stride"), "i64"),
    **dict.fromkeys(("sequences", "window", "pieces", "least", "row", "rows", "heads", "count"), "i32"),
    **dict.fromkeys(("slots_ptr", "lens_ptr", "starts_ptr"), "*i64"),
    "tables_ptr": "*i32",
    "scale": "fp32",
    "epsilon": "fp32",
    "log_sums_ptr": "*fp32",
    "part_ptr": "*fp32",
}
"""Arguments of a type of their own; all others point to the caches' type."""
ALL = [Made(*made) for made in product(KERNELS, TARGETS, DTYPES, HEAD_SIZES)]


def few() -> list[Made]:
    """Each kernel once, and each target, and each head size."""
    dtypes = ("bf16", "fp32", "fp16", "fp32", "bf16")
    return [Made(*made) for made in zip(KERNELS, cycle(TARGETS), cycle(dtypes), cycle(HEAD_SIZES), strict=False)]


def covering() -> list[Made]:
    """Any two of kernel, target, type and head size together at least once; everywhere what needs most registers."""
    largest = ("decode", "prefill", "add and norm")
    chosen = [Made(*made) for made in product(largest, TARGETS, ["fp32"], [MAX_HEAD_SIZE])]
    missing = set().union(*map(pairs, ALL)) - set().union(*map(pairs, chosen))
    while missing:
        chosen.append(max(ALL, key=lambda made: len(pairs(made) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


def pairs(made: Made) -> set[tuple[Any, Any]]:
    return {(first, second) for at, first in enumerate(made) for second in made[at + 1 :]}


def compiled(made: Made) -> dict[str, object]:
    """Bytes of shared memory, and of stack, which is what did not fit in registers; the assembly's own target."""
    limits = LIMITS[made.target]
    kernel = KERNELS[made.kernel](made.head_size, DTYPES[made.dtype], limits)
    names = [name for name in kernel.function.arg_names if name not in kernel.constants]
    signature = {name: TYPES.get(name, f"*{made.dtype}") for name in names}
    # As at a launch: Triton looks whether addresses and strides are multiples of 16, and ours are.
    aligned = [name.endswith("_ptr") or name in STRIDES for name in kernel.function.arg_names]
    binary = triton.compile(
        ASTSource(
            fn=kernel.function,
            signature={**signature, **dict.fromkeys(kernel.constants, "constexpr")},
            constexprs=kernel.constants,
            attrs={(at,): [["tt.divisibility", 16]] for at, is_aligned in enumerate(aligned) if is_aligned},
        ),
        target=TARGETS[made.target],
        options=kernel.options,
    )
    stack, target = (of_amd if limits.amd else of_nvidia)(binary.asm)
    return {"made": made, "target": target, "shared_bytes": binary.metadata.shared, "stack_bytes": stack}


def of_nvidia(asm: dict[str, Any]) -> tuple[int, str]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(asm["cubin"])
        cubin.flush()
        usage = subprocess.run([CUOBJDUMP, "-res-usage", cubin.name], check=True, capture_output=True, text=True)
    return int(found(r"STACK:(\d+)", usage.stdout)), found(r"^\.target (\w+)", asm["ptx"])


def of_amd(asm: dict[str, Any]) -> tuple[int, str]:
    assembly = asm["amdgcn"]
    stack = int(found(r"\.private_segment_fixed_size: (\d+)", assembly))
    return stack, found(r"\.amdgcn_target \".*\b(gfx\w+)\"", assembly)


def found(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.M)
    assert match, f"the compiler said nothing of {pattern}"
    return match[1]


def main() -> None:
    sets = {"few": few, "covering": covering, "all": lambda: ALL}
    print(json.dumps([compiled(made) for made in sets[sys.argv[1]]()]))


if __name__ == "__main__":
    main()
