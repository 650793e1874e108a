"""Compiles the paged decode kernel ahead of time for sm_90, which needs no GPU, and prints as JSON what it takes.

python -m tests.kernels.compile
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.paged_decode import MAX_HEAD_SIZE, constants, num_warps, paged_decode_kernel

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
POINTERS = ("out_ptr", "query_ptr", "key_ptr", "value_ptr")


def compiled(dtype: str, head_size: int) -> dict[str, object]:
    """The parts that the compiler gave, bytes of shared memory, and of stack: what did not fit in registers."""
    fixed = constants(heads=8, kv_heads=2, head_size=head_size, block_size=16)
    signature = {
        **dict.fromkeys(POINTERS, f"*{dtype}"), "tables_ptr": "*i64", "lens_ptr": "*i64", "scale": "fp32",
        "query_stride": "i64", "tables_stride": "i64", **dict.fromkeys(fixed, "constexpr"),
    }  # fmt: skip
    kernel = triton.compile(
        ASTSource(fn=paged_decode_kernel, signature=signature, constexprs=fixed),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": num_warps(head_size)},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        usage = subprocess.run(
            [CUOBJDUMP, "-res-usage", cubin.name], check=True, capture_output=True, text=True
        ).stdout
    target = re.search(r"^\.target (\w+)", kernel.asm["ptx"], re.M)
    stack = re.search(r"STACK:(\d+)", usage)
    assert target
    assert stack
    return {
        "dtype": dtype, "head_size": head_size, "target": target[1], "cubin_bytes": len(kernel.asm["cubin"]),
        "shared_bytes": kernel.metadata.shared, "stack_bytes": int(stack[1]),
    }  # fmt: skip


def main() -> None:
    # The widest heads need most registers; fp32 needs most of all, and is multiplied in another way.
    fp32 = [("fp32", size) for size in (64, 80, 96, 128, MAX_HEAD_SIZE)]
    kernels = [*fp32, ("fp16", 64), ("bf16", 80), ("bf16", MAX_HEAD_SIZE)]
    print(json.dumps([compiled(*kernel) for kernel in kernels]))


if __name__ == "__main__":
    main()
