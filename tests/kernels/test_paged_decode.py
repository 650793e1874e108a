"""The paged decode kernel without a GPU: right in the interpreter, and compiled for sm_90 within its means.

Both run in processes of their own, because Triton decides on import whether it interprets.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install -e .[engine]")
pytest.importorskip("triton", reason="needs Triton, which is for Linux: pip install -e .[engine]")

REPOSITORY = Path(__file__).parents[2]
SHARED_BYTES_OF_SM_90 = 227 << 10
"""CUDA C++ Programming Guide, technical specifications by compute capability: per block."""
ROUNDING = {"torch.float32": 2**-23, "torch.float16": 2**-10}


def run(module: str, cache: Path, **environment: str) -> list[Any]:
    done = subprocess.run(
        [sys.executable, "-m", module],
        cwd=REPOSITORY,
        env={**os.environ, "TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_interpreted_it_gives_what_its_twin_gives(tmp_path: Path) -> None:
    errors = run("tests.kernels.interpret", tmp_path, TRITON_INTERPRET="1")
    assert {dtype for dtype, _, _ in errors} == ROUNDING.keys()
    for dtype, head_size, error in errors:
        # A few roundings, in sums of another order; not a number is never below anything.
        assert error < 4 * ROUNDING[dtype], (dtype, head_size)


def test_it_compiles_for_sm_90_without_spilling(tmp_path: Path) -> None:
    for kernel in run("tests.kernels.compile", tmp_path):
        assert kernel["target"] == "sm_90a", kernel
        assert kernel["cubin_bytes"] > 0, kernel
        assert kernel["stack_bytes"] == 0, kernel
        assert 0 < kernel["shared_bytes"] <= SHARED_BYTES_OF_SM_90, kernel


def test_heads_that_are_too_wide_are_refused() -> None:
    import torch

    from kernels.paged_decode import MAX_HEAD_SIZE, paged_decode

    cache = torch.zeros(2, 4, 1, MAX_HEAD_SIZE + 1)
    query, table = torch.zeros(1, 1, MAX_HEAD_SIZE + 1), torch.ones(1, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match=f"head size is {MAX_HEAD_SIZE + 1}"):
        paged_decode(query, cache, cache, table, torch.tensor([1]), 1.0)
