"""The kernels without a GPU: right in Triton's interpreter, and compiled for five GPUs within their means.

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

from tests.kernels.compile import SHARED_KIB

REPOSITORY = Path(__file__).parents[2]
ROUNDING = {"torch.float32": 2**-23, "torch.float16": 2**-10, "torch.bfloat16": 2**-7}


def run(cache: Path, *command: str, **environment: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", *command],
        cwd=REPOSITORY,
        env={**os.environ, "TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.usefixtures("real_parts")
def test_interpreted_they_give_what_their_twins_give(tmp_path: Path) -> None:
    seed = str(int.from_bytes(os.urandom(4)))
    errors = run(tmp_path, "tests.kernels.interpret", seed, TRITON_INTERPRET="1")
    # Where there are products, the interpreter of Triton 3.9 multiplies bfloat16's bit patterns.
    assert {dtype for dtype, _, _ in errors["attention"]} == ROUNDING.keys() - {"torch.bfloat16"}
    assert {dtype for dtype, _, _ in errors["layers"]} == ROUNDING.keys()
    for dtype, case, error in errors["attention"] + errors["layers"]:
        # A few roundings, in sums of another order; not a number is never below anything.
        assert error < 4 * ROUNDING[dtype], (case, seed)
    for case, differing in errors["writes"]:
        assert differing == 0, (case, seed)


@pytest.mark.slow
def test_a_model_served_through_them_gives_transformers_tokens(tmp_path: Path) -> None:
    tokens = run(tmp_path, "tests.kernels.whole_model", str(tmp_path / "model"), TRITON_INTERPRET="1")
    assert len(tokens["transformers"]) > 1
    assert tokens["kernels"] == tokens["transformers"]


def compile_within_means(tmp_path: Path, which: str) -> list[dict[str, Any]]:
    kernels: list[dict[str, Any]] = run(tmp_path, "tests.kernels.compile", which)
    for kernel in kernels:
        _, target, _, _ = kernel["made"]
        assert kernel["target"].removesuffix("a") == target, kernel
        assert kernel["stack_bytes"] == 0, kernel
        assert kernel["shared_bytes"] <= SHARED_KIB[target] << 10, kernel
    return kernels


@pytest.mark.slow
def test_each_compiles_for_a_gpu_without_spilling(tmp_path: Path) -> None:
    kernels = compile_within_means(tmp_path, "few")
    assert {kernel["made"][1] for kernel in kernels} == SHARED_KIB.keys()


@pytest.mark.slow
def test_they_compile_for_every_gpu_without_spilling(tmp_path: Path) -> None:
    assert len(compile_within_means(tmp_path, "covering")) <= 60


@pytest.mark.prove
def test_every_combination_compiles_without_spilling(tmp_path: Path) -> None:
    compile_within_means(tmp_path, "all")


def test_heads_and_rows_that_are_too_wide_are_refused() -> None:
    import torch

    from kvscope.kernels.paged_decode import paged_decode
    from kvscope.kernels.paged_prefill import paged_prefill
    from kvscope.kernels.rms_norm import MAX_SIZE, rms_norm
    from kvscope.kernels.tiles import MAX_HEAD_SIZE

    cache = torch.zeros(2, 4, 1, MAX_HEAD_SIZE + 1)
    query, table = torch.zeros(1, 1, MAX_HEAD_SIZE + 1), torch.ones(1, 1, dtype=torch.int64)
    starts, lens = torch.tensor([0, 1]), torch.tensor([1])
    with pytest.raises(ValueError, match=f"head size is {MAX_HEAD_SIZE + 1}"):
        paged_decode(query, cache, cache, table, lens, 1.0)
    with pytest.raises(ValueError, match=f"head size is {MAX_HEAD_SIZE + 1}"):
        paged_prefill(query, cache, cache, table, starts, lens, 1, 1.0)
    with pytest.raises(ValueError, match=f"rows of {MAX_SIZE + 1} values"):
        rms_norm(torch.zeros(1, MAX_SIZE + 1), torch.ones(MAX_SIZE + 1), 0.0)
